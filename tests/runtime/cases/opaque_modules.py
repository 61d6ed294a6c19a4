"""Modules that are kept whole, and static caches of transformers, on 4 ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.updated_buffers import Stateful
from support.comparison import check_training, device_mesh, whole
from support.meshes import slow_devices
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from autoshard.checker import check_plan
from autoshard.errors import PlanError
from autoshard.graph import OPAQUE_MODULE, OpaqueModule, export_model, load_graph
from autoshard.plan import Plan
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

FEATURES, LENGTH = 32, 12
MESHES = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}}


class Router(nn.Module):
    """Sends each row to one expert, with a loop over the experts that some row chose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x: torch.Tensor, *, power: int) -> dict[str, Any]:
        self.calls += 1
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().squeeze(-1)
            out = out.index_add(0, rows, self.experts[expert](x[rows] * self.scale))
        self.load = 0.9 * self.load + 0.1 * scores.detach().mean(0)
        return {"out": out, "balance": (scores.mean(0) ** power).sum(), "unused": None}


class Halves(nn.Module):
    """Branches on the data of every row."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.other = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [(self.one if row.sum() > 0 else self.other)(row) for row in x]
        return torch.stack(rows)


class Recomputed(nn.Module):
    """Branches on its data, and recomputes its layer in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool(x.isfinite().all()):
            return x
        for use_reentrant in (False, True):
            x = checkpoint(self.layer, x.relu(), use_reentrant=use_reentrant)
        return x


class Noise(nn.Module):
    """Draws random numbers, in Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + torch.rand_like(x)) if bool(x.isfinite().all()) else x


class Around(nn.Module):
    """A loss of layers around a module that cannot be traced."""

    def __init__(self, inner: nn.Module, **options: int) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.inner = inner
        self.down = nn.Linear(64, FEATURES)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(torch.relu(self.up(x)), **self.options)
        if isinstance(made, dict):
            return self.down(made["out"]).square().mean() + made["balance"]
        return self.down(made).square().mean()


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, FEATURES, generator=generator)} for _ in range(count)]


@dataclass
class Opaque:
    """A training step of a model with an opaque module.

    Attributes:
        build: makes the model.
        entry: the module that is kept whole.
        axes: of the mesh.
        check: of the plan on a rank; compares a step by default.
    """

    build: Callable[[], nn.Module]
    entry: str | type | OpaqueModule
    axes: dict[str, int]
    check: Callable[["Opaque"], None] | None = None
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = load_graph(export_model(self.build(), (), batches()[0], opaque=[self.entry]))
        self.plan = make_plan(graph, slow_devices(**self.axes))
        assert check_plan(self.plan, graph) == ()
        assert self.plan.collectives
        (node,) = (n.name for n in graph.nodes if n.operator == OPAQUE_MODULE)
        (made,) = (n.outputs for n in self.plan.stages[0].nodes if n.name == node)
        along_batch = isinstance(self.entry, OpaqueModule) and self.entry.along_batch
        assert ("S(0)" in made[0]) is along_batch
        self.plan = Plan.from_json(self.plan.to_json())  # as a file or a service has it

    def __call__(self) -> None:
        torch.manual_seed(0)
        if self.check is not None:
            self.check(self)
        else:
            check_training(self.build(), self.plan, kwargs=batches()[0], tolerance=1e-6)


def check_random(case: Opaque) -> None:
    """All ranks draw the same numbers, and every step draws others."""
    model = parallelize(case.build(), case.plan, device_mesh(case.plan))
    (first, *_) = batches()
    found = torch.stack([whole(model(**first).detach()) for _ in range(2)])
    others = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(others, found)
    for other in others:
        torch.testing.assert_close(other, found, rtol=0, atol=0)
    assert found[0] != found[1]


def check_misuse(case: Opaque) -> None:
    """What the export did not see is an error, with the module's name."""
    model = parallelize(case.build(), case.plan, device_mesh(case.plan))
    inner, forward = model.inner, model.inner.forward
    first = batches()[0]
    for change, message in (
        (lambda x: x.double(), r"opaque module 'inner'.* returns .*float64"),
        (lambda x: x.add_(1.0), "writes into an argument"),
        (lambda x: (x, 1), "returns a int"),
        (nn.functional.dropout, "draws random numbers, which it did not when exported"),
    ):
        inner.forward = lambda x, change=change: change(forward(x.clone()) * 0 + x)
        if "argument" in message:
            inner.forward = change
        with pytest.raises(PlanError, match=message):
            model(**first)
    del inner.forward
    assert model(**first).ndim == 0


def with_static_cache(build: Callable[[], nn.Module]) -> nn.Module:
    model = build().eval()
    model.generation_config.cache_implementation = "static"
    model.generation_config.use_cache = True
    return TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=LENGTH).eval()


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=32))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tokens() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(64, (1, 1), generator=generator),
            "cache_position": torch.tensor([i]),
        }
        for i in range(LENGTH)
    ]


class Decoding(Stateful):
    """One token a call, with a cache that is sharded by heads."""

    def prepare(self) -> None:
        super().prepare()
        layouts = {i.target: i.layout for i in self.plan.stages[0].inputs}
        assert all("S(1)" in layouts[name] for name in CACHES)

    def __call__(self) -> None:
        super().__call__()
        # The cache object holds the shards too, so that no rank keeps the whole cache.
        _, planned = self.models()
        for i, layer in enumerate(planned.static_cache.layers):
            assert layer.keys is planned.get_buffer(f"key_cache_{i}")
            assert layer.keys.to_local().numel() < layer.keys.numel()


CACHES = frozenset(f"{name}_cache_{i}" for i in range(2) for name in ("key", "value"))

CASES: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {mesh}": case
        for mesh, axes in MESHES.items()
        for name, case in {
            "a router": Stateful(
                lambda: Around(Router(), power=2),
                batches,
                axes,
                frozenset(),
                export={"opaque": ["inner"]},
            ),
            "a class": Opaque(lambda: Around(Halves()), Halves, axes),
            "recomputed": Opaque(lambda: Around(Recomputed()), "inner", axes),
            "along the batch": Opaque(
                lambda: Around(Halves()), OpaqueModule("inner", along_batch=True), axes
            ),
            "a static cache of Llama": Decoding(
                partial(with_static_cache, llama), tokens, axes, CACHES, {"mode": "inference"}
            ),
            "a static cache of GPT-2": Decoding(
                partial(with_static_cache, gpt2), tokens, axes, CACHES, {"mode": "inference"}
            ),
        }.items()
    },
    "random numbers": Opaque(lambda: Around(Noise()), "inner", {"a": 4}, check_random),
    "misuse": Opaque(lambda: Around(Halves()), "inner", {"a": 4}, check_misuse),
}
