"""Running steps of a plan with made-up numbers, and measuring what the plan predicts.

A plan carries its program, so nothing else is needed: parameters, inputs and token ids are random
numbers, other indices and labels are zero. Each part is measured by itself
(`autoshard.runtime.profiling.probe`).
Ranks do not arrive at a collective together; the shortest time of all ranks is that of the
last one to arrive, which waits for nobody. Of operators it is the median over ranks.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from autoshard.layouts import Action
from autoshard.plan import Event, Simulation, simulate
from autoshard.plan.memory.schedule import Phase
from autoshard.plan.simulation.events import COMPUTE, Category
from autoshard.runtime.launch import LaunchContext, StepTimer
from autoshard.runtime.profiling.probe import Part, Probe, instrument
from autoshard.runtime.profiling.step import MadeUpStep

_CATEGORIES: dict[str, Category] = {Phase.OPTIMIZER: "optimizer", Phase.RECOMPUTE: "recompute"}


@dataclass(frozen=True, slots=True)
class Row:
    """All parts of one kind in a step.

    Attributes:
        name: of the operator, or of what steps of reshardings run.
        lane: compute, or the axis.
        predicted: seconds.
        measured: seconds.
    """

    name: str
    lane: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Profile:
    """A step as it was predicted and as it ran.

    Attributes:
        simulation: the prediction.
        events: what was measured, as it began on this rank.
        seconds: of a whole step without measuring its parts; the median of several.
        predicted: seconds of a step in which nothing is hidden beside compute.
    """

    simulation: Simulation
    events: tuple[Event, ...]
    seconds: float
    predicted: float

    def rows(self) -> tuple[Row, ...]:
        """Predicted beside measured, what takes longest first."""
        found: dict[tuple[str, str], list[float]] = {}
        for side, events in enumerate((self.simulation.events, self.events)):
            for event in events:
                # Collectives inside an operator are measured with it.
                key = (event.inside, COMPUTE) if event.inside else (event.name, event.lane)
                found.setdefault(key, [0.0, 0.0])[side] += event.seconds
        rows = (Row(name, lane, *seconds) for (name, lane), seconds in found.items())
        return tuple(sorted(rows, key=lambda row: -max(row.predicted, row.measured)))


def profile(
    launched: LaunchContext,
    *,
    num_steps: int = 5,
    seed: int = 0,
    custom_operators: Collection[str] = (),
) -> Profile:
    """Run steps of a plan on its ranks, and measure them.

    Args:
        launched: what this rank knows.
        num_steps: that are measured, after one to warm up; first whole, then in parts.
        seed: of the made-up numbers.
        custom_operators: as `parallelize` takes them: a plan may come from elsewhere.

    Raises:
        PlanError: the plan calls an operator that may not be called.
    """
    plan, mesh = launched.plan, launched.device_mesh
    (stage,) = plan.stages
    timer = StepTimer(plan, launched.device)
    torch.manual_seed(seed)
    whole = MadeUpStep(plan, mesh, custom_operators=custom_operators)
    for _ in range(num_steps + 1):
        dist.barrier()
        with timer.step():
            whole()
    del whole
    # A part is measured by itself, so that nothing else runs beside it.
    parted = MadeUpStep(plan, mesh, bucketed=False, custom_operators=custom_operators)
    probe = Probe(launched.device)
    instrument(parted.program, stage, probe)
    seconds: list[dict[Part, float]] = []
    begin = 0.0
    for _ in range(num_steps + 1):
        probe.clear()
        dist.barrier()
        begin = perf_counter()
        parted(probe)
        seconds.append(dict(probe.seconds))
    parts = sorted(part for part in seconds[-1] if part.name != Action.NOTHING)
    own = torch.tensor([[step.get(part, 0.0) for part in parts] for step in seconds[1:]])
    measured = _over_ranks(own.to(torch.float64).median(dim=0).values, parts, launched.device)
    return Profile(
        simulate(plan, bucketed=False),
        tuple(_events(parts, measured, probe, begin)),
        _median(timer.seconds[1:]),
        timer.predicted,
    )


def _over_ranks(own: torch.Tensor, parts: Sequence[Part], device: torch.device) -> list[float]:
    own = own.to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    ranks = torch.stack(every)
    moved = torch.tensor([bool(part.axis) for part in parts], device=device)
    shortest, middle = ranks.min(dim=0).values, ranks.median(dim=0).values
    measured: list[float] = torch.where(moved, shortest, middle).tolist()
    return measured


def _median(seconds: Sequence[float]) -> float:
    return float(torch.tensor(seconds, dtype=torch.float64).median())


def _events(
    parts: Sequence[Part], measured: Sequence[float], probe: Probe, begin: float
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
