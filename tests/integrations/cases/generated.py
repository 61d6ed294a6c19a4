"""`PlannedGenerator`: the tokens of `generate` with the unsharded model."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.comparison import device_mesh
from support.language_models import MESHES, VOCABULARY
from support.meshes import slow_devices
from support.models import graph_of, llama
from torch import nn
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from autoshard.errors import PlanError
from autoshard.integrations.generation import PlannedGenerator
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

ROWS, PROMPT, CAPACITY, NEW = 2, 6, 16, 9


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
        mesh: one of `MESHES`.
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
            plan = make_plan(graph, slow_devices(**MESHES[self.mesh]), options)
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

    def check_refused(self, generator: PlannedGenerator) -> None:
        mask = torch.ones(ROWS, PROMPT, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(PlanError, match="prompts are padded"):
            generator.generate(prompt(), attention_mask=mask, max_new_tokens=2)
        with pytest.raises(PlanError, match="the cache holds 16 tokens, and 17 are needed"):
            generator.generate(prompt(), max_new_tokens=CAPACITY, do_sample=False)


CASES: dict[str, Callable[[], None]] = {
    "greedy and sampled, 4": Generated("4", (1,)),
    "greedy and sampled, 2x2": Generated("2x2", (1, 4)),
}
