"""`PlannedGenerator`: the tokens of `generate` with the unsharded model."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import device_mesh, whole
from support.language_models import SHAPES, VOCABULARY
from support.meshes import slow_devices
from support.models import graph_of, llama, t5
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from autoshard.errors import PlanError
from autoshard.integrations.generation import PlannedGenerator
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize

ROWS, PROMPT, CAPACITY, NEW = 4, 6, 16, 9


def model() -> nn.Module:
    torch.manual_seed(0)
    made = llama(layers=1)[0].eval()
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = None
    with torch.no_grad():
        made.lm_head.weight.mul_(20)  # logits far apart
    return made


def with_cache() -> nn.Module:
    inner = model()
    inner.generation_config.cache_implementation = "static"
    inner.generation_config.use_cache = True
    return TorchExportableModuleWithStaticCache(inner, batch_size=ROWS, max_cache_len=CAPACITY)


def prompt(seed: int = 1, length: int = PROMPT) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (ROWS, length), generator=draw)


@dataclass
class Generated:
    """Greedy and sampled tokens, of several prompts over one cache.

    Attributes:
        mesh: one of `SHAPES`.
        sizes: number of tokens that each plan takes.
    """

    mesh: str
    sizes: tuple[int, ...]
    plans: dict[str, Plan] = field(default_factory=dict)

    def prepare(self) -> None:
        for size in self.sizes:
            pins = next(iter(self.plans.values())).state_pins() if self.plans else {}
            example = {"input_ids": prompt(length=size), "cache_position": torch.arange(size)}
            options = PlanOptions(mode="inference", pins=pins)
            graph = graph_of((with_cache(), example))
            plan = make_plan(graph, slow_devices(**SHAPES[self.mesh]), options)
            assert plan.found
            assert plan.collectives
            self.plans[str(size)] = plan

    def __call__(self) -> None:
        mesh = device_mesh(self.plans[str(self.sizes[0])])
        generator = PlannedGenerator(parallelize(with_cache(), self.plans, mesh))
        unsharded = model()
        sampling: dict[str, Any] = {"do_sample": True, "top_k": 8, "temperature": 5.0}
        for seed, changed in ((1, {}), (2, {}), (2, sampling)):
            settings = {"max_new_tokens": NEW, "do_sample": False, **changed}
            torch.manual_seed(5)
            expected = unsharded.generate(prompt(seed), **deepcopy(settings))
            torch.manual_seed(5 + torch.distributed.get_rank())
            found = generator.generate(prompt(seed), **settings)
            assert torch.equal(found, expected), (seed, settings)
        assert len(expected.unique()) > 3
        self.check_refused(generator)

        self.check_other_settings(generator, unsharded)
        self.check_ranks(generator, unsharded, mesh)

    def check_other_settings(self, generator: PlannedGenerator, unsharded: Any) -> None:
        """Fewer prompts than rows, beams, and what only says how, has the tokens of the model."""
        sampled = {"do_sample": True, "num_return_sequences": 2}
        usual = torch.arange(PROMPT).expand(ROWS, -1)
        for rows, changed in (
            *((1, {}), (3, {"output_hidden_states": False}), (2, {"num_beams": 2}), (2, sampled)),
            (2, {"num_beams": 2, "do_sample": True, "prefill_chunk_size": 2}),
            (ROWS, {"position_ids": usual}),
        ):
            settings = {"max_new_tokens": 4, "do_sample": False, **changed}
            torch.manual_seed(7)
            expected = unsharded.generate(prompt()[:rows], **deepcopy(settings))
            torch.manual_seed(7)
            assert torch.equal(generator.generate(prompt()[:rows], **settings), expected), settings
        found = generator.generate(prompt().int(), max_new_tokens=4, do_sample=False)
        expected = unsharded.generate(prompt(), max_new_tokens=4, do_sample=False)
        assert torch.equal(found.long(), expected)

    def check_ranks(self, generator: PlannedGenerator, unsharded: Any, mesh: DeviceMesh) -> None:
        """Other prompts on each rank are refused in every call, and right as a DTensor."""
        settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        own = prompt()[dist.get_rank() :: dist.get_world_size()]
        expected = unsharded.generate(prompt(), **settings)
        assert torch.equal(generator.generate(prompt(), **settings), expected)
        for ids in (prompt(dist.get_rank()), own):
            with pytest.raises(PlanError, match=r"ranks 0 and 1 pass different.*from_local\(ids"):
                generator.generate(ids, **settings)
        with pytest.raises(PlanError, match="ranks 0 and 1 pass different prompts or settings"):
            generator.generate(prompt(), max_new_tokens=4 + dist.get_rank(), do_sample=False)
        rows = DTensor.from_local(own, mesh, [Shard(0)] * mesh.ndim)
        found = generator.generate(rows, **settings)
        every = whole(rows)
        assert torch.equal(found, unsharded.generate(every, **settings))

    def check_refused(self, generator: PlannedGenerator) -> None:
        mask = torch.ones(ROWS, PROMPT, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(PlanError, match="prompts are padded"):
            generator.generate(prompt(), attention_mask=mask, max_new_tokens=2)
        with pytest.raises(PlanError, match="the cache holds 16 tokens, and 17 are needed"):
            generator.generate(prompt(), max_new_tokens=CAPACITY, do_sample=False)
        for changed, message in (
            ({"num_beams": 2}, r"has 4 rows, and 8 are needed.*fewer prompts.*batch_size=8"),
            (
                {"position_ids": torch.zeros(ROWS, PROMPT)},
                r"'position_ids' has no effect.*leave it",
            ),
            ({"output_attentions": True}, r"'output_attentions' has no effect"),
            ({"inputs_embeds": torch.zeros(ROWS, PROMPT, 32)}, r"'inputs_embeds' has no effect"),
            ({"prompt_lookup_num_tokens": 2}, r"assisted_generation of generate needs more than"),
        ):
            with pytest.raises(PlanError, match=message) as error:
                generator.generate(prompt(), max_new_tokens=2, do_sample=False, **changed)
            assert "load_state_dict(full_tensor(planned.model" in str(error.value) or "8" in message


def with_full_weights(made: Any, planned: nn.Module) -> Any:
    """Another model that has the full weights, as errors advise."""
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    made.load_state_dict(full_tensor(planned.state_dict()))
    return made


@dataclass
class Unplanned:
    """`generate` that is not planned is refused with a way out, which has the tokens of the model.

    Attributes:
        mesh: one of `SHAPES`.
    """

    mesh: str
    plans: dict[str, Plan] = field(default_factory=dict)

    def prepare(self) -> None:
        for name, build in (("t5", encoder), ("llama", model)):
            example = {"input_ids": prompt(), "labels": prompt(), "use_cache": False}
            options = PlanOptions(mode="inference")
            graph = graph_of((build(), example))
            self.plans[name] = make_plan(graph, slow_devices(**SHAPES[self.mesh]), options)
            assert self.plans[name].found

    def __call__(self) -> None:
        settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        for name, build in (("t5", encoder), ("llama", model)):
            plan = self.plans[name]
            planned: Any = parallelize(build(), plan, device_mesh(plan))
            for cache in ({}, {"use_cache": False}, {"num_beams": 2}):
                with pytest.raises(PlanError, match=r"PlannedGenerator.*load_state_dict\(full_ten"):
                    planned.generate(prompt(), **settings, **cache)
            reason = "has an encoder" if name == "t5" else "has no static cache: wrap"
            with pytest.raises(PlanError, match=reason):
                PlannedGenerator(planned)
            found = with_full_weights(build(), planned).generate(prompt(), num_beams=2, **settings)
            expected = build().generate(prompt(), num_beams=2, **settings)
            assert torch.equal(found, expected)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return t5(layers=1)[0].eval()


CASES: dict[str, Callable[[], None]] = {
    "greedy and sampled, 4": Generated("4", (1,)),
    "greedy and sampled, 2x2": Generated("2x2", (1, 4)),
    "unplanned, 4": Unplanned("4"),
}
ON_2: dict[str, Callable[[], None]] = {
    "greedy and sampled, 2": Generated("2", (1, 4)),
    "unplanned, 2": Unplanned("2"),
}
