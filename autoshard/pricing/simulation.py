"""Simulation of a step of a plan: a trace of the events on each lane, and the memory over time.

Durations are the costs in the plan document, so the length of the step is the plan's total cost,
and the events of each category add up to the plan's costs. Operators are on the compute lane;
steps of reshardings and collectives inside operators are on the lane of their axis. The order of
events is that of the memory timeline.

Communication that overlaps with compute (option `overlap`) is drawn in parallel to the operator
that reads the weight. A runtime that prefetches runs an all-gather one layer earlier.

Every micro-batch of a step is drawn: what runs once per step is in the first one (gathers of
parameters) or in the last one (reductions of gradients). The memory is that of a micro-batch in the
middle.

A bucket is drawn as one collective with all its bytes. Its duration is the sum of the costs of its
members, each of which includes a latency: an upper estimate. Overlapped parts are drawn in
parallel to the readers of the members, each with the name and the bytes of the whole bucket.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.base.arguments import check_arguments
from autoshard.base.collection import collection_paused
from autoshard.errors import PlanError
from autoshard.graph import Graph, Node, graph_from_json
from autoshard.lowering.instructions import BeginBucket, LocalCall, UnbucketedReshard
from autoshard.lowering.timeline import Phase, Timeline, timeline
from autoshard.plan.document import Plan
from autoshard.plan.stage import Resharding, Stage, Use
from autoshard.pricing.stage_times import Piece, ReshardingTiming, StageTiming

Category = Literal["compute", "communication", "optimizer", "recompute"]
"""The item of a plan's costs to which an event is added."""

_MAX_OPERATORS = 200_000
"""Maximum number of operators that a simulated step runs forward, in all micro-batches."""

COMPUTE = "compute"
"""Name of the lane of operators and of the optimizer."""


@dataclass(frozen=True, slots=True)
class Event:
    """One operator, collective or local copy of a step.

    Attributes:
        name: name of the operator, or action of a resharding step.
        subject: the node, or the resharded value and its reader; for a bucket, the first ones.
        axis: the mesh axis of a collective; None for compute.
        phase: phase of the step.
        category: the item of the plan's costs to which it is added.
        start: seconds since the step began.
        seconds: duration.
        nbytes: bytes of a rank's tensor before or after it, whichever is larger, summed over the
            members of a bucket; 0 for compute.
        overlapped: True if it overlaps with compute.
        inside: the operator that runs the collective; empty for a resharding.
        micro_batch: number of the micro-batch.
    """

    name: str
    subject: str
    axis: str | None
    phase: Phase
    category: Category
    start: float
    seconds: float
    nbytes: int = 0
    overlapped: bool = False
    inside: str = ""
    micro_batch: int = 0

    @property
    def lane(self) -> str:
        """The lane of the event: compute, or its axis."""
        return COMPUTE if self.axis is None else f"axis {self.axis}"


@dataclass(frozen=True)
class Simulation:
    """One step of a plan on one rank; all ranks do the same.

    Attributes:
        plan: digest of the plan.
        lanes: names of all lanes: compute, then one per axis.
        events: the events, in order of their start.
        seconds: duration of the step.
        moments: start of each moment of the step, in seconds since it began, shape [M].
        numbers: number of each moment in `memory`, which has one micro-batch, shape [M].
        memory: live bytes at the moments of a micro-batch.
    """

    plan: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    seconds: float
    moments: NDArray[np.float64]
    numbers: NDArray[np.intp]
    memory: Timeline

    @property
    def overlapped(self) -> float:
        """Seconds of the events that overlap with compute."""
        return sum(event.seconds for event in self.events if event.overlapped)


@collection_paused()
@check_arguments
def simulate(plan: Plan, *, bucketed: bool = True) -> Simulation:
    """Simulate one step of a plan.

    Args:
        plan: a plan with one stage.
        bucketed: True if reshardings of a bucket are drawn as shared collectives, as they run.

    Raises:
        PlanError: the document has no plan, or an inconsistent one, or the step has so many
            micro-batches that their events would not fit memory.
    """
    if not plan.found:
        raise PlanError(f"the document has no plan to simulate: {plan.reason}")
    if plan.pipeline is not None:
        raise PlanError("the plan is a pipeline: `simulate_pipeline` simulates its schedule")
    stage = plan.stages[0]
    number = len(stage.nodes) * stage.micro_batches
    if stage.micro_batches > 1 and number > _MAX_OPERATORS:
        raise PlanError(
            f"{stage.micro_batches} micro-batches of {len(stage.nodes)} operators are {number:,} "
            f"operators, but a simulation has at most {_MAX_OPERATORS:,}: plan fewer micro-batches "
            f"to see a step"
        )
    return _Simulator(plan, stage, graph_from_json(stage.program), bucketed=bucketed).run()


def resharding_label(resharding: Resharding, targets: Mapping[str, str]) -> str:
    """A label with the resharded value and its reader.

    Args:
        resharding: the resharding.
        targets: names of inputs in the model, by value.
    """
    value = targets.get(resharding.value, resharding.value)
    return f"{value} for {resharding.consumer}" if resharding.consumer else value


class _Simulator:
    def __init__(self, plan: Plan, stage: Stage, graph: Graph, *, bucketed: bool) -> None:
        self._plan = plan
        self._stage = stage
        self._graph = graph
        self._timing = StageTiming(stage, graph, plan.mesh, plan.options)
        self._bucketed = bucketed
        self._timings: dict[Use, ReshardingTiming] = {}
        self._memory = timeline(
            stage,
            graph,
            training=self._timing.prices.training,
            optimizer=self._timing.prices.optimizer,
            saving=self._timing.prices.saving,
        )
        self._placed = {placed.name: placed for placed in stage.nodes}
        targets = {placed.name: placed.target for placed in stage.inputs}
        self._labels = {c.use: resharding_label(c, targets) for c in stage.reshardings}
        if bucketed:
            for instruction in self._memory.lowering.instructions:
                if isinstance(instruction, BeginBucket):
                    first, *more = instruction.bucket.uses
                    label = f"{self._labels[first]} and {len(more)} more"
                    self._labels.update((use, label) for use in (first, *more) if more)
        self._into: dict[str | None, list[Use]] = {}
        for resharding in stage.reshardings:
            self._into.setdefault(resharding.consumer, []).append(resharding.use)
        self._events: list[Event] = []
        self._now = 0.0
        self._micro_batch = 0

    def run(self) -> Simulation:
        """Add the events of all moments."""
        memory = self._memory
        regathered: dict[int, list[Use]] = {}
        for use, moment in memory.regathered.items():
            regathered.setdefault(moment, []).append(use)
        inputs = self._timing.inputs()
        loading, update = inputs.arriving + inputs.stored, inputs.accumulation + inputs.update
        self._compute("inputs", "inputs", Phase.FORWARD, "compute", loading)
        starts: list[float] = []
        numbers: list[int] = []
        for micro_batch, timings in enumerate(self._micro_batches()):
            self._micro_batch, self._timings = micro_batch, timings
            previous: tuple[Phase, int] | None = None
            pairs = zip(memory.moments, memory.instructions, strict=True)
            for moment, ((phase, _), number) in enumerate(pairs):
                if phase is Phase.OPTIMIZER:
                    continue
                starts.append(self._now)
                numbers.append(moment)
                for use in regathered.get(moment, ()):
                    self._reshard(use, Phase.RECOMPUTE)
                # A bucket has one moment per member, but is drawn once.
                if number >= 0 and (phase, number) != previous:
                    self._advance(number, phase)
                previous = phase, number
        if self._timing.prices.training:
            starts.append(self._now)
            numbers.append(len(memory.moments) - 1)
        self._compute("optimizer", "parameters", Phase.OPTIMIZER, "optimizer", update)
        return Simulation(
            plan=self._plan.id,
            lanes=(COMPUTE, *(f"axis {name}" for name in self._lanes())),
            events=tuple(sorted(self._events, key=lambda event: event.start)),
            seconds=self._now,
            moments=np.array(starts),
            numbers=np.array(numbers, dtype=np.intp),
            memory=memory,
        )

    def _micro_batches(self) -> Iterator[dict[Use, ReshardingTiming]]:
        """The pieces of all reshardings in each micro-batch of the step."""
        known: dict[tuple[bool, bool], dict[Use, ReshardingTiming]] = {}
        number = self._stage.micro_batches
        for i in range(number):
            first, last = i == 0, i == number - 1
            if (first, last) not in known:
                known[first, last] = self._timing.reshardings(
                    bucketed=self._bucketed, first=first, last=last
                )
            yield known[first, last]

    def _advance(self, number: int, phase: Phase) -> None:
        match self._memory.lowering.instructions[number]:
            case LocalCall() as call:
                self._call(self._graph.nodes[call.number], phase)
            case UnbucketedReshard() as reshard:
                self._reshard(reshard.resharding.use, phase)
            case BeginBucket() as begin:
                for use in begin.bucket.uses:
                    self._reshard(use, phase)
            case _:
                pass

    def _lanes(self) -> Iterator[str]:
        """Names of the axes, and of those that communicate as one group."""
        names = self._plan.mesh.axis_names
        yield from names
        used = {event.axis for event in self._events if event.axis is not None}
        yield from sorted(used.difference(names))

    def _call(self, node: Node, phase: Phase) -> None:
        """Add an operator, the communication that overlaps with it, and the collectives inside."""
        passes = self._timing.node(node)
        backward, again = phase is Phase.BACKWARD, phase is Phase.RECOMPUTE
        start = self._now
        seconds = passes.backward if backward else passes.forward
        category: Category = "recompute" if again else "compute"
        self._compute(node.operator, node.name, phase, category, seconds)
        micro_batches = self._stage.micro_batches
        # What overlaps starts with the operator, on the lane of its axis.
        end, self._now = self._now, start
        for use in () if again else self._into.get(node.name, ()):
            timing, label = self._timings[use], self._labels[use]
            if backward:
                again_beside = timing.again.overlapped
                self._run(again_beside, label, Phase.RECOMPUTE, "recompute", overlapped=True)
            split = timing.backward if backward else timing.forward
            self._run(split.overlapped, label, phase, "communication", overlapped=True)
        self._now = end
        direction = "backward" if backward else "forward"
        pieces = [
            Piece(step.action, step.axis, step.time / micro_batches, step.nbytes)
            for step in self._placed[node.name].inside
            if step.direction == direction
        ]
        category = "recompute" if again else "communication"
        self._run(pieces, node.name, phase, category, inside=node.operator)

    def _reshard(self, use: Use, phase: Phase) -> None:
        """Add the exposed part of a resharding."""
        timing, label = self._timings[use], self._labels[use]
        if phase is Phase.RECOMPUTE:
            self._run(timing.again.exposed, label, phase, "recompute")
        else:
            split = timing.backward if phase is Phase.BACKWARD else timing.forward
            self._run(split.exposed, label, phase, "communication")

    def _compute(
        self, name: str, subject: str, phase: Phase, category: Category, seconds: float
    ) -> None:
        if seconds:
            now, number = self._now, self._micro_batch
            self._events.append(
                Event(name, subject, None, phase, category, now, seconds, micro_batch=number)
            )
            self._now += seconds

    def _run(
        self,
        pieces: Sequence[Piece],
        subject: str,
        phase: Phase,
        category: Category,
        *,
        overlapped: bool = False,
        inside: str = "",
    ) -> None:
        for piece in pieces:
            self._events.append(
                Event(
                    piece.name,
                    subject,
                    piece.axis,
                    phase,
                    category,
                    self._now,
                    piece.seconds,
                    piece.nbytes,
                    overlapped,
                    inside,
                    self._micro_batch,
                )
            )
            self._now += piece.seconds


MICROSECONDS = 1e6


def chrome_trace(simulation: Simulation, measured: Iterable[Event] = ()) -> str:
    """A simulation as a trace for chrome://tracing and Perfetto.

    Format: "Trace Event Format" (Google, 2016), JSON object form: complete events (`X`) on one
    thread per lane, counters (`C`) for memory, and metadata (`M`) for names; times in
    microseconds.

    Args:
        simulation: the simulated step.
        measured: events of a measured step, shown below the simulated ones.
    """
    predicted = f"predicted, plan {simulation.plan[:12]}"
    records = [
        *_process(0, predicted, simulation.lanes, simulation.events),
        *_counters(simulation),
    ]
    if events := list(measured):
        records += _process(1, "measured", simulation.lanes, events)
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def _process(
    process: int, name: str, lanes: Sequence[str], events: Iterable[Event]
) -> Iterator[dict[str, Any]]:
    """Names of a process and of its lanes, and events on them."""
    yield trace_record("M", "process_name", process, args={"name": name})
    for thread, lane in enumerate(lanes):
        yield trace_record("M", "thread_name", process, thread, args={"name": lane})
        yield trace_record("M", "thread_sort_index", process, thread, args={"sort_index": thread})
    for event in events:
        args: dict[str, Any] = {"of": event.subject, "phase": event.phase.value}
        if event.nbytes:
            args["bytes"] = event.nbytes
        if event.overlapped:
            args["overlapped"] = True
        if event.inside:
            args["inside"] = event.inside
        if event.micro_batch:
            args["micro_batch"] = event.micro_batch
        yield trace_record(
            "X",
            event.name,
            process,
            lanes.index(event.lane),
            cat=event.category,
            ts=event.start * MICROSECONDS,
            dur=event.seconds * MICROSECONDS,
            args=args,
        )


def _counters(simulation: Simulation) -> Iterator[dict[str, Any]]:
    kinds = tuple(simulation.memory.nbytes)
    nbytes = [alive[simulation.numbers] for alive in simulation.memory.nbytes.values()]
    for start, *alive in zip(simulation.moments, *nbytes, strict=True):
        args = {kind: int(count) for kind, count in zip(kinds, alive, strict=True)}
        yield trace_record("C", "memory, bytes", 0, ts=float(start) * MICROSECONDS, args=args)


def trace_record(
    phase: str, name: str, process: int, thread: int = 0, **rest: Any
) -> dict[str, Any]:
    """One record of a trace."""
    return {"ph": phase, "name": name, "pid": process, "tid": thread, **rest}
