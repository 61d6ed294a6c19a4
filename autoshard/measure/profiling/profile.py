"""Runs steps of a plan with synthetic inputs, and compares them with the prediction.

A plan includes its program, so neither model nor data is needed: parameters, inputs and token ids
are random numbers, other indices and labels are zero. The time of an operator is the median over
ranks. The time of a collective is the minimum over ranks: the last rank to arrive does not wait.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.costs.optimizer import Optimizer
from autoshard.graph import Graph
from autoshard.launching import LaunchContext, StepTimer
from autoshard.layouts import Action, Layout
from autoshard.lowering.timeline import Phase
from autoshard.measure.profiling.probe import ProfiledPart, StepProbe, instrument
from autoshard.plan import PlacedInput, Plan, only_stage
from autoshard.pricing import Event, Simulation, simulate
from autoshard.pricing.simulation import COMPUTE, Category
from autoshard.runtime.program.local_program import LocalProgram
from autoshard.runtime.shards import local_shape, local_shard

_CATEGORIES: dict[str, Category] = {Phase.OPTIMIZER: "optimizer", Phase.RECOMPUTE: "recompute"}


@dataclass(frozen=True, slots=True)
class Row:
    """The parts of one kind in a step, summed.

    Attributes:
        name: name of the operator, or the action of resharding steps.
        lane: `"compute"`, or the mesh axis.
        predicted: predicted seconds.
        measured: measured seconds.
    """

    name: str
    lane: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Profile:
    """The prediction and the measurements of a step.

    Attributes:
        simulation: the predicted step.
        events: the measured parts, with their starts on this rank.
        seconds: median duration of a whole step, without a probe.
        predicted: predicted seconds of a step without overlap.
    """

    simulation: Simulation
    events: tuple[Event, ...]
    seconds: float
    predicted: float

    def rows(self) -> tuple[Row, ...]:
        """Predicted and measured time by operator or action, longest first."""
        found: dict[tuple[str, str], list[float]] = {}
        for side, events in enumerate((self.simulation.events, self.events)):
            for event in events:
                # Collectives inside an operator are measured together with it.
                key = (event.inside, COMPUTE) if event.inside else (event.name, event.lane)
                found.setdefault(key, [0.0, 0.0])[side] += event.seconds
        rows = (Row(name, lane, *seconds) for (name, lane), seconds in found.items())
        return tuple(sorted(rows, key=lambda row: -max(row.predicted, row.measured)))


def profile(
    context: LaunchContext,
    *,
    num_steps: int = 5,
    seed: int = 0,
    custom_operators: Collection[str] = (),
) -> Profile:
    """Run steps of a plan on its ranks, and measure them.

    Args:
        context: context of this rank.
        num_steps: number of steps after a warm-up, once as whole steps and once in parts.
        seed: seed of the synthetic inputs.
        custom_operators: custom operators that the plan may call, as in `parallelize`.

    Raises:
        PlanError: the plan calls an operator that is not allowed, or is a pipeline.
    """
    plan, mesh = context.plan, context.device_mesh
    stage = only_stage(plan, "a profile")
    timer = StepTimer(plan, context.device)
    torch.manual_seed(seed)
    whole = SyntheticStep(plan, mesh, custom_operators=custom_operators)
    for _ in range(num_steps + 1):
        dist.barrier()
        with timer.step():
            whole()
    del whole
    # Parts are measured without overlap.
    parted = SyntheticStep(plan, mesh, bucketed=False, custom_operators=custom_operators)
    probe = StepProbe(context.device)
    instrument(parted.program, stage, probe)
    seconds: list[dict[ProfiledPart, float]] = []
    begin = 0.0
    for _ in range(num_steps + 1):
        probe.clear()
        dist.barrier()
        begin = perf_counter()
        parted(probe)
        seconds.append(dict(probe.seconds))
    parts = sorted(part for part in seconds[-1] if part.name != Action.NOTHING)
    own = torch.tensor([[step.get(part, 0.0) for part in parts] for step in seconds[1:]])
    measured = _over_ranks(own.to(torch.float64).median(dim=0).values, parts, context.device)
    return Profile(
        simulate(plan, bucketed=False),
        tuple(_events(parts, measured, probe, begin)),
        median_low(timer.seconds[1:]),
        timer.predicted,
    )


def _over_ranks(
    own: torch.Tensor, parts: Sequence[ProfiledPart], device: torch.device
) -> list[float]:
    own = own.to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    ranks = torch.stack(every)
    moved = torch.tensor([bool(part.axis) for part in parts], device=device)
    shortest, middle = ranks.min(dim=0).values, ranks.median(dim=0).values
    measured: list[float] = torch.where(moved, shortest, middle).tolist()
    return measured


def _events(
    parts: Sequence[ProfiledPart], measured: Sequence[float], probe: StepProbe, begin: float
) -> Iterator[Event]:
    found = dict(zip(parts, measured, strict=True))
    for part in sorted(parts, key=probe.starts.__getitem__):
        yield Event(
            name=part.name,
            subject=part.subject,
            axis=part.axis or None,
            phase=Phase(part.phase),
            category=_CATEGORIES.get(part.phase, "communication" if part.axis else "compute"),
            start=probe.starts[part] - begin,
            seconds=found[part],
            nbytes=part.nbytes,
        )


class SyntheticStep:
    """A step of a plan on this rank, with synthetic inputs.

    Parameters and inputs are random numbers, as are the indices of embeddings, which are the
    same on all ranks; other indices and labels are zero.

    Args:
        plan: a plan with one stage.
        mesh: a mesh with the axes of the plan.
        bucketed: True if reshardings of parameters share collectives, as in `LocalProgram`.
        custom_operators: custom operators that the plan may call, as in `parallelize`.

    Raises:
        PlanError: the plan calls an operator that is not allowed.

    Attributes:
        program: program of the plan's stage.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: DeviceMesh,
        *,
        bucketed: bool = True,
        custom_operators: Collection[str] = (),
    ) -> None:
        stage = only_stage(plan, "a synthetic step")
        self.program = LocalProgram(
            stage, mesh, bucketed=bucketed, custom_operators=custom_operators
        )
        self._training = plan.options.mode == "training"
        graph = self.program.graph
        self._table_rows = table_rows(graph)
        self._inputs = [self._synthetic(placed, graph) for placed in stage.inputs]
        trained = [
            tensor
            for placed, tensor in zip(stage.inputs, self._inputs, strict=True)
            if placed.kind == "parameter" and tensor.requires_grad
        ]
        self._optimizer = _optimizer(plan.options.training.optimizer, trained)
        self._step = 0

    def __call__(self, probe: StepProbe | None = None) -> None:
        """Run forward, backward and the optimizer; a probe measures the optimizer."""
        with torch.set_grad_enabled(self._training):
            outputs = self.program(self._inputs, step=self._step)
        self._step += 1
        if not self._training:
            return
        self._backward(outputs[: self.program.graph.num_results])
        if self._optimizer is None:
            return
        if probe is None:
            self._optimizer.step()
        else:
            with probe.measured(ProfiledPart(Phase.OPTIMIZER, "optimizer", "parameters")):
                self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self, outputs: Sequence[Any]) -> None:
        """Run backward from the scalar outputs that require a gradient, or from all that do."""
        found = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        entries = [x for x in found if x.dim() == 0] or found
        torch.autograd.backward(entries, [torch.ones_like(x) for x in entries])

    def _synthetic(self, placed: PlacedInput, graph: Graph) -> torch.Tensor:
        place, tensor = self.program.place, graph.values[placed.name]
        position = Layout.parse(placed.layout), place.axis_sizes, place.coordinate
        shape = local_shape(tensor.shape, *position)
        dtype: torch.dtype = getattr(torch, placed.dtype)
        if placed.name in self._table_rows:
            # The full tensor is drawn, so that ranks with the same shard have the same ids.
            seeded = torch.Generator().manual_seed(len(shape))
            ids = torch.randint(self._table_rows[placed.name], tensor.shape, generator=seeded)
            return local_shard(ids, *position).to(place.device, dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=place.device)
        # Positive values, since buffers may be variances.
        made = torch.rand(shape, device=place.device).mul_(0.02).add_(0.01).to(dtype)
        return made.requires_grad_(self._training and tensor.requires_grad)


def table_rows(graph: Graph) -> Mapping[str, int]:
    """For each input that indexes embeddings, the rows of the smallest table that it indexes."""
    entering = {given.name for given in graph.inputs}
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.operator == "aten.embedding.default":
            table, ids = node.inputs
            rows = graph.values[table].shape[0]
            if ids in entering and rows:
                found[ids] = min(rows, found.get(ids, rows))
    return found


_Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

_RATE = 1e-6
"""A learning rate that hardly changes the parameters."""

_MAKERS: Mapping[Optimizer, _Make] = {
    Optimizer.SGD: partial(torch.optim.SGD, lr=_RATE),
    Optimizer.SGD_MOMENTUM: partial(torch.optim.SGD, lr=_RATE, momentum=0.9),
    Optimizer.ADAM: partial(torch.optim.Adam, lr=_RATE),
    Optimizer.ADAMW: partial(torch.optim.AdamW, lr=_RATE),
    Optimizer.ADAFACTOR: partial(torch.optim.Adafactor, lr=_RATE),
}


def _optimizer(name: str, tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The named optimizer; None if there are no tensors, or the plan has no optimizer."""
    make = _MAKERS.get(Optimizer(name.lower()))
    return make(tensors) if make is not None and tensors else None
