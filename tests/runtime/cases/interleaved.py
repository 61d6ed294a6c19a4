"""Weights that make several things at once, cut in chunks: no traffic around them.

In double precision, so that nothing but the order of sums may differ from the whole model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support import models
from support.comparison import check_training
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.nn import functional

from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

EXACT = 1e-10


class Gpt2(nn.Module):
    """GPT-2 with a loss in its own precision, which transformers' is not."""

    def __init__(self) -> None:
        super().__init__()
        self.lm, _ = models.gpt2()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.lm(ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Gated(nn.Module):
    """A gated layer whose two halves one product makes, taken apart in some way."""

    def __init__(self, halve: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(16, 2 * 24)
        self.down = nn.Linear(24, 16)
        self.halve = halve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.halve(self.up(x))
        return self.down(functional.silu(gate) * up).square().mean()


class Attention(nn.Module):
    """Self-attention as vision models write it: a view with a dim of three, taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 3 * 16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width)).square().mean()


class GroupedQueries(nn.Module):
    """Queries of eight heads, keys and values of four, made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 32 + 16 + 16)
        self.out = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, -1, 4).transpose(1, 2)
            for part in self.qkv(x).split([32, 16, 16], -1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, 32)).square().mean()


class Joined(nn.Module):
    """Two things that are made apart and go into one product."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(16, 24)
        self.right = nn.Linear(16, 24)
        self.out = nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.left(x).tanh(), self.right(x)], -1)).square().mean()


class Halves(nn.Module):
    """A product of two halves of the input, taken apart in some way."""

    def __init__(self, halve: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.halve = halve
        self.down = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.halve(x)
        return self.down(functional.silu(gate) * up).square().mean()


class Pairs(nn.Module):
    """The differences between the two halves of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.layer(x).tanh().chunk(2)
        return (left - right).square().mean()


def small(module: Callable[[], nn.Module]) -> models.Case:
    return module(), {"x": torch.randn(2, 8, 16, dtype=torch.float64)}


MODELS: dict[str, Callable[[], models.Case]] = {
    "gpt2": lambda: (Gpt2(), {"ids": torch.randint(0, 64, (4, 8))}),
    "attention": partial(small, Attention),
    "grouped queries": partial(small, GroupedQueries),
    "chunk": partial(small, partial(Gated, lambda x: x.chunk(2, -1))),
    "split": partial(small, partial(Gated, lambda x: x.split([24, 24], -1))),
    "slices": partial(small, partial(Gated, lambda x: (x[..., :24], x[..., 24:]))),
    "narrow": partial(small, partial(Gated, lambda x: (x.narrow(-1, 0, 24), x.narrow(-1, 24, 24)))),
    "joined": partial(small, Joined),
    "halves": partial(small, partial(Halves, lambda x: x.chunk(2, -1))),
    "halves of a view": partial(small, partial(Halves, lambda x: x.unflatten(2, (2, 8)).unbind(2))),
    "pairs": lambda: (Pairs(), {"x": torch.randn(8, 16, dtype=torch.float64)}),
}


def built(name: str) -> models.Case:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.double(), inputs


@dataclass
class Case:
    """One model on one mesh, steered.

    Attributes:
        model: its name.
        options: that steer.
        cut: a parameter or an input, and the layout in which it must rest or be taken then.
        axes: of the mesh.
    """

    model: str
    options: dict[str, Any]
    cut: tuple[str, str]
    axes: dict[str, int] = field(default_factory=lambda: {"dp": 1, "tp": 4})
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = graph_of(built(self.model))
        options = PlanOptions(**self.options)
        plan = make_plan(graph, slow_devices(**self.axes), options)
        assert plan.found, plan.reason
        # What runs is what a file would hold.
        self.plan = Plan.from_json(plan.to_json())
        (stage,) = self.plan.stages
        name, layout = self.cut
        (placed_input,) = (placed for placed in stage.inputs if placed.target == name)
        taken = {
            text
            for node, placed in zip(graph.nodes, stage.nodes, strict=True)
            for used, text in zip(node.inputs, placed.inputs, strict=True)
            if used == placed_input.name
        }
        assert layout in {placed_input.layout, *taken}

    def __call__(self) -> None:
        model, inputs = built(self.model)
        check_training(model, self.plan, kwargs=inputs, tolerance=EXACT)


MEGATRON = {"algo": "megatron"}
GATED = ("up.weight", "I,S(0)/1+1")
CASES = {
    "megatron gpt2": Case(
        "gpt2", MEGATRON, ("lm.transformer.h.0.attn.c_attn.weight", "I,S(1)/1+1+1")
    ),
    "gpt2 at rest": Case(
        "gpt2",
        {"pins": {"parameters": {"*.c_attn.weight": "S(0),S(1)/1+1+1"}}},
        ("lm.transformer.h.0.attn.c_attn.weight", "S(0),S(1)/1+1+1"),
        {"dp": 2, "tp": 2},
    ),
    "grouped queries": Case(
        "grouped queries",
        {"pins": {"nodes": {"linear": "*,S(2)/2+1+1"}}},
        ("qkv.weight", "I,S(0)/2+1+1"),
    ),
    "attention": Case("attention", MEGATRON, ("qkv.weight", "I,S(0)/1+1+1")),
    **{name: Case(name, MEGATRON, GATED) for name in ("chunk", "split", "slices", "narrow")},
    "joined": Case("joined", MEGATRON, ("out.weight", "I,S(1)/1+1")),
    "halves of an input": Case(
        "halves", {"pins": {"nodes": {"chunk": "*,S(2)"}}}, ("x", "R,S(2)/1+1")
    ),
    "halves of a view of an input": Case(
        "halves of a view", {"pins": {"nodes": {"unbind": "*,S(2)"}}}, ("x", "R,S(2)/1+1")
    ),
    "halves of a batch": Case(
        "pairs", {"pins": {"nodes": {"linear": "*,S(0)/1+1"}}}, ("x", "R,S(0)/1+1")
    ),
}
