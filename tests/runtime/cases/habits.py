"""What the cases of habits share: models in float64, their plans, and loops run with both models.

A habit is a piece of training code, written once. It runs with the planned model and with the same
model on one device; what it returns, and the state of both models in the end, are equal.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from runtime.cases.updated_buffers import MESHES
from support.comparison import device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from autoshard.errors import PlanError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

EXACT = 1e-10
"""Tolerance in float64, relative to the largest element of a tensor."""

BATCH, LENGTH, TOKENS, FEATURES = 8, 4, 32, 16
Batch = dict[str, torch.Tensor]
Pins = Mapping[str, Mapping[str, str]]
Loop = Callable[[nn.Module], object]
"""Uses a model; returns numbers and tensors to be compared."""


class Net(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 64)
        self.down = nn.Linear(64, FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS, bias=False)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(self.norm(x))))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(ids)
        return embedded + self.block(embedded)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(ids))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


SHARDED: dict[str, Pins] = {
    "4": {
        "inputs": {"*": "S(0)"},
        "parameters": {
            "norm.*": "I",
            "embed.weight": "S(0)",
            "up.*": "S(0)",
            "down.*": "S(0)",
            "head.weight": "S(1)",
        },
    },
    "2x2": {
        "inputs": {"*": "S(0),R"},
        "parameters": {
            "norm.*": "I,I",
            "embed.weight": "S(0),I",
            "up.*": "I,S(0)",
            "down.weight": "S(0),S(1)",
            "down.bias": "S(0),I",
            "head.weight": "S(0),S(0)",
        },
    },
}
"""By mesh: parameters sharded along no axis, one and both, and the batch along the first."""


def batches(number: int, *, size: int = BATCH) -> list[Batch]:
    """Tokens and labels, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(TOKENS, (number, 2, size, LENGTH), generator=generator)
    return [{"ids": ids, "labels": labels} for ids, labels in drawn]


def first_batch() -> dict[str, Any]:
    return batches(1)[0]


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    """An ordinary step of training; the loss."""
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    return float(loss.item())


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """Some steps of an ordinary loop; the losses."""
    optimizer = adam(model)
    return [step(model, optimizer, batch) for batch in batches(steps)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@cache
def _plan_of(
    mesh: str,
    build: Callable[[], nn.Module],
    example: Callable[[], dict[str, Any]],
    pins: tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
) -> Plan:
    graph = graph_of((build().double(), example()))
    options = PlanOptions(pins={kind: dict(items) for kind, items in pins})
    axes = {"a": 2} if mesh == "2" else MESHES[mesh]
    plan = make_plan(graph, slow_devices(**axes), options)
    assert plan.found, plan.reason
    assert any("S" in placed.layout for placed in plan.stages[0].parameters)
    assert plan.collectives
    return plan


@dataclass
class Habit:
    """A loop that has the same numbers with a planned model.

    Attributes:
        mesh: its name; "2" has two ranks, and the pins of "4".
        loop: the habit.
        build: makes the model.
        example: makes the keyword arguments that the model is exported with.
        pins: of the plan, by mesh.
        tolerance: of numbers, relative.
        options: of `parallelize`.
    """

    mesh: str
    loop: Loop
    build: Callable[[], nn.Module] = Net
    example: Callable[[], dict[str, Any]] = first_batch
    pins: Mapping[str, Pins] = field(default_factory=lambda: SHARDED)
    tolerance: float = EXACT
    options: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self) -> None:
        assert self.plan.found

    @property
    def plan(self) -> Plan:
        """A plan that shards parameters; made once for all cases with this model."""
        given = self.pins["4" if self.mesh == "2" else self.mesh]
        pins = tuple((kind, tuple(items.items())) for kind, items in given.items())
        return _plan_of(self.mesh, self.build, self.example, pins)

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The planned model, and the same model on one device."""
        torch.manual_seed(0)
        reference = self.build().double()
        mesh = device_mesh(self.plan)
        return parallelize(deepcopy(reference), self.plan, mesh, **self.options), reference

    def __call__(self) -> None:
        planned, reference = self.models()
        expected, found = self.loop(reference), self.loop(planned)
        assert_same(found, expected, "result", self.tolerance)
        assert_same(planned.state_dict(), reference.state_dict(), "state", self.tolerance)


def is_planned(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def unreduced(model: nn.Module) -> AbstractContextManager[None]:
    """`no_sync()` of a planned model; nothing on one device."""
    return getattr(model, "no_sync", nullcontext)()


def assert_same(found: object, expected: object, what: str, tolerance: float = EXACT) -> None:
    """Check that two structures have the same numbers and tensors."""
    leaves, spec = pytree.tree_flatten(found)
    others, other_spec = pytree.tree_flatten(expected)
    assert spec == other_spec
    for number, (one, other) in enumerate(zip(leaves, others, strict=True)):
        if not isinstance(other, torch.Tensor | float):
            assert one == other
            continue
        actual, wanted = (torch.as_tensor(whole(x)).detach() for x in (one, other))
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(
            actual,
            wanted,
            rtol=0.0,
            atol=tolerance * max(scale, 1e-5),
            equal_nan=True,
            msg=lambda text, number=number: f"{what} {number}: {text}",
        )


@dataclass
class Refused(Habit):
    """A loop that runs on one device, and that a planned model refuses with a clear error.

    Attributes:
        match: what the message says.
        error: its class.
    """

    match: str = ""
    error: type[Exception] = PlanError

    def __call__(self) -> None:
        planned, reference = self.models()
        self.loop(reference)
        with pytest.raises(self.error, match=self.match):
            self.loop(planned)
