"""Where pipelines are cut: at marks in forward, between layers, between opaque modules."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from runtime.cases.pipelines import check_gradients
from support.comparison import close, device_mesh
from support.meshes import slow_devices
from torch import nn
from torch.distributed.pipelining import pipe_split

from autoshard.graph import OpaqueModule, export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

FEATURES, ROWS, NUMBER = 8, 4, 4


class Branching(nn.Module):
    """A block whose operators depend on the data, with a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, FEATURES)
        self.down = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x + self.up(x) if x.sum() > 0 else self.down(x)


class Stack(nn.Module):
    """Blocks, of which the first is used again at the end; a skip over all of them; a loss."""

    def __init__(self, block: Callable[[], nn.Module], *, marked: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.marked = marked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.marked and number == 1:
                pipe_split()
            hidden = block(hidden)
        return (self.first(hidden) + first).square().mean()


@dataclass
class Cut:
    """A training step equals the unsharded model's, and stages hold the expected blocks.

    Attributes:
        build: makes the model.
        options: of the plan.
        held: numbers of the blocks of each stage.
        opaque: as for `export_model`.
    """

    build: Callable[[], nn.Module]
    options: dict[str, Any]
    held: tuple[set[int], set[int]]
    opaque: Any = ()
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        archive = export_model(self.build(), (torch.randn(ROWS, FEATURES),), opaque=self.opaque)
        options = {"micro_batches": NUMBER, "schedule": "1F1B", **self.options}
        plan = make_plan(load_graph(archive), slow_devices(pp=2), PlanOptions(**options))
        assert plan.found, plan.reason
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = self.build()
        torch.manual_seed(0)
        planned = parallelize(self.build(), self.plan, device_mesh(self.plan))
        x = torch.randn(NUMBER * ROWS, FEATURES)
        losses = torch.stack([reference(part) for part in x.split(ROWS)])
        losses.mean().backward()
        close(planned.step(x), losses.detach().mean().double(), "loss")
        check_gradients(planned, reference)
        names = [name.split(".") for name, _ in planned.named_parameters()]
        held = {int(parts[1]) for parts in names if parts[0] == "blocks"}
        assert held == self.held[dist.get_rank()]
        counters = dict(planned.named_buffers())
        for name, expected in reference.named_buffers():
            if name in counters:
                close(counters[name], expected, name)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES)


CASES = {
    "calls of pipe_split": Cut(lambda: Stack(linear, marked=True), {}, ({0}, {1, 2, 3})),
    "layers": Cut(lambda: Stack(linear), {"balance": (3, 1)}, ({0, 1, 2}, {3})),
    "a named module": Cut(lambda: Stack(linear), {"cuts": ("before:blocks.2",)}, ({0, 1}, {2, 3})),
    "opaque modules with measured costs": Cut(
        lambda: Stack(Branching),
        {"cuts": ("after:blocks.2",)},
        ({0, 1, 2}, {3}),
        opaque="auto",
    ),
    "opaque modules with declared costs": Cut(
        lambda: Stack(Branching),
        {"stages": 2, "balance": "flops"},
        ({0}, {1, 2, 3}),
        opaque=[
            OpaqueModule(f"blocks.{i}", flops=flops) for i, flops in enumerate((4e9, 1e9, 1e9, 1e9))
        ],
    ),
}
