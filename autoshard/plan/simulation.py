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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.collection import collection_paused
from autoshard.costs import ForwardBackward, Overlap, overlapped_seconds
from autoshard.errors import PlanError
from autoshard.graph import Graph, Node, graph_from_json
from autoshard.layouts import Action, Layout, Step, is_padded, parse_type, regather_price
from autoshard.ops import call_of, rule_for
from autoshard.plan.buckets import Bucket, bucket_fill_factors, buckets_of
from autoshard.plan.document import PlacedNode, Plan, PlannedStep, Resharding, Stage, Use
from autoshard.plan.gradients import Gradient
from autoshard.plan.legality import share_of
from autoshard.plan.lowering import BeginBucket, Call, Reshard
from autoshard.plan.pricing import Prices
from autoshard.plan.recompute import recomputed
from autoshard.plan.timeline import Phase, Timeline, timeline

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

    def by_category(self) -> Mapping[Category, float]:
        """Seconds of all events by category, overlapped ones included."""
        found: dict[Category, float] = {}
        for event in self.events:
            found[event.category] = found.get(event.category, 0.0) + event.seconds
        return found

    @property
    def overlapped(self) -> float:
        """Seconds of the events that overlap with compute."""
        return sum(event.seconds for event in self.events if event.overlapped)


@collection_paused()
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
    (stage,) = plan.stages
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A collective or a local copy of a resharding, or a part of its duration.

    Attributes:
        name: name of the action.
        axis: name of the mesh axis.
        seconds: duration.
        nbytes: bytes of a rank's tensor before or after it, whichever is larger.
    """

    name: str
    axis: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Split:
    """Pieces that run one after the other.

    Attributes:
        exposed: the first pieces, which do not overlap with compute.
        overlapped: the later pieces, which do; one piece may be divided between both.
    """

    exposed: tuple[_Piece, ...] = ()
    overlapped: tuple[_Piece, ...] = ()

    @classmethod
    def of(cls, pieces: Sequence[_Piece], overlapped: float) -> "_Split":
        """Split pieces so that the last `overlapped` seconds of them are overlapped."""
        if overlapped <= 0:
            return cls(tuple(pieces))
        left = _seconds(pieces) - overlapped
        exposed, beside = [], []
        for piece in pieces:
            seconds = min(max(left, 0.0), piece.seconds)
            left -= piece.seconds
            if seconds:
                exposed.append(replace(piece, seconds=seconds))
            if piece.seconds > seconds:
                beside.append(replace(piece, seconds=piece.seconds - seconds))
        return cls(tuple(exposed), tuple(beside))


@dataclass(frozen=True, slots=True)
class _ReshardingTiming:
    """Pieces of a resharding: in forward, re-gathered in backward, and of its gradient."""

    forward: _Split
    again: _Split
    backward: _Split


class _StageTiming:
    """Seconds of the operators and reshardings of a stage, by pass.

    Args:
        plan: the plan.
        stage: one of its stages.
        graph: the stage's program.
    """

    def __init__(self, plan: Plan, stage: Stage, graph: Graph) -> None:
        self.prices = Prices(graph, plan.mesh, plan.options)
        self.gradients = self.prices.gradients
        self._mesh = plan.mesh
        self._stage = stage
        self._graph = graph
        self._placed = {placed.name: placed for placed in stage.nodes}
        self._again = recomputed(graph, stage)
        self._overlap = Overlap(graph, plan.mesh) if plan.options.overlap else None
        self._fill_factors = bucket_fill_factors(graph, plan.mesh)
        self._buckets = buckets_of(stage, graph, self._again)
        self._bucketed = {use: bucket for bucket in self._buckets for use in bucket.uses}
        self._known: dict[Hashable, ForwardBackward[float]] = {}

    def inputs(self) -> tuple[float, float]:
        """Seconds of writing and storing inputs, and of the optimizer's update, per step."""
        loading = update = 0.0
        inputs = {i.name: i for i in self._graph.inputs}
        for placed in self._stage.inputs:
            time, _ = self.prices.input(inputs[placed.name], [placed.local_shape])
            if placed.kind == "parameter" and self.gradients.exists(placed.name):
                update += float(time[0])
            else:
                loading += float(time[0])
        return loading, update + self.prices.full_accumulation(self._stage.reshardings)

    def node(self, node: Node) -> ForwardBackward[float]:
        """Seconds of an operator's compute in a micro-batch; equal operators are priced once.

        Raises:
            PlanError: no rule of the operator allows the layouts of the plan.
        """
        placed = self._placed[node.name]
        kind = self._graph.kind(node)
        key = (kind, placed.inputs, placed.outputs, self.gradients.flows(node), placed.time)
        if key not in self._known:
            forward = self._forward(node, placed)
            both = placed.time / self._stage.micro_batches
            self._known[key] = ForwardBackward(forward, max(both - forward, 0.0))
        return self._known[key]

    def _forward(self, node: Node, placed: PlacedNode) -> float:
        uses = (self.gradients.of_use(value, node) for value in node.inputs)
        gradients = (
            *(gradient is not Gradient.NONE for gradient in uses),
            *(self.gradients.exists(value) for value in node.outputs),
        )
        layouts = [Layout.parse(text) for text in (*placed.inputs, *placed.outputs)]
        rule = rule_for(call_of(self._graph, node))
        share = share_of(rule, layouts, gradients, self._mesh.axis_sizes)
        if share is None:
            raise PlanError(
                f"no rule of {node.operator} allows the layouts of node {node.name!r}; "
                f"run `autoshard check` for all errors of the plan"
            )
        return self.prices.rank_compute(node, share.sizes).forward

    def reshardings(
        self, *, bucketed: bool, first: bool, last: bool
    ) -> dict[Use, _ReshardingTiming]:
        """Pieces of every resharding in a micro-batch; those of a bucket are merged.

        Args:
            bucketed: True to merge.
            first: True for the first micro-batch of a step.
            last: True for the last one.
        """
        found = {
            c.use: self._resharding(c, first=first, last=last) for c in self._stage.reshardings
        }
        if bucketed:
            for bucket in self._buckets:
                found.update(_bucket_timing(bucket, [found[use] for use in bucket.uses]))
        return found

    def _resharding(self, resharding: Resharding, *, first: bool, last: bool) -> _ReshardingTiming:
        micro_batches, bucket = self._stage.micro_batches, self._bucketed.get(resharding.use)
        runs = [(micro_batches, micro_batches)] * len(resharding.steps)
        if bucket is not None:
            runs = bucket.runs(micro_batches)
        forward: list[_Piece] = []
        backward: list[_Piece] = []
        for step, (gathers, reductions) in zip(resharding.steps, runs, strict=True):
            moved, reduced = self._pieces(step, resharding.value, gathers, reductions)
            if moved.seconds and (first or gathers > 1):
                forward.append(moved)
            if reduced.seconds and (last or reductions > 1):
                backward.insert(0, reduced)
        again = forward if resharding.use in self._again.reshardings else []
        early, late = self._overlapped(resharding, forward, [*again, *backward])
        trailing = min(late, _seconds(backward))
        return _ReshardingTiming(
            _Split.of(forward, early),
            _Split.of(again, late - trailing),
            _Split.of(backward, trailing),
        )

    def _pieces(
        self, step: PlannedStep, value: str, gathers: int, reductions: int
    ) -> tuple[_Piece, _Piece]:
        """The forward and the backward action of a step, each in one of its runs."""
        axis = self._mesh.axis_names.index(step.axis)
        source, target = parse_type(step.source), parse_type(step.target)
        shape = self._graph.values[value].shape
        priced = Step(
            axis=axis,
            source=source,
            target=target,
            nbytes=step.nbytes,
            forward=Action(step.forward),
            backward=Action(step.backward),
            padded=is_padded(source, target, shape, self._mesh.axis_sizes[axis]),
        )
        factor = self._fill_factors.get(value, 1.0)
        forward = min(regather_price(priced, self._mesh, factor), step.time / gathers)
        backward = (step.time - gathers * forward) / reductions
        return (
            _Piece(step.forward, step.axis, forward, step.nbytes),
            _Piece(step.backward, step.axis, backward, step.nbytes),
        )

    def _overlapped(
        self, resharding: Resharding, early: Sequence[_Piece], late: Sequence[_Piece]
    ) -> tuple[float, float]:
        """Seconds that overlap with the reader's forward, and with its backward."""
        number = self._graph.numbers.get(resharding.consumer or "")
        if self._overlap is None or number is None:
            return 0.0, 0.0
        reader = self._graph.nodes[number]
        share = self._overlap.share(reader, resharding.position)
        if share is None:
            return 0.0, 0.0
        compute = self.node(reader)
        first = ForwardBackward(_seconds(early), 0.0), ForwardBackward(share * compute.forward, 0.0)
        second = (
            ForwardBackward(0.0, _seconds(late)),
            ForwardBackward(0.0, share * compute.backward),
        )
        return float(overlapped_seconds(*first)), float(overlapped_seconds(*second))


def _seconds(pieces: Iterable[_Piece]) -> float:
    return sum(piece.seconds for piece in pieces)


def _bucket_timing(
    bucket: Bucket, own: Sequence[_ReshardingTiming]
) -> Iterator[tuple[Use, _ReshardingTiming]]:
    """Merge the pieces of the reshardings of a bucket.

    All exposed pieces become pieces of the first resharding, one for each step; overlapped pieces
    stay with their reshardings. Every piece has the bytes of the whole bucket.
    """
    nbytes = {step.axis: total for step, total in bucket.steps}
    passes = [[getattr(t, name) for t in own] for name in ("forward", "again", "backward")]
    for i, use in enumerate(bucket.uses):
        exposed = [[p for s in splits for p in s.exposed] if i == 0 else [] for splits in passes]
        pairs = zip(exposed, passes, strict=True)
        yield (
            use,
            _ReshardingTiming(
                *(
                    _Split(_merged(all_exposed, nbytes), _merged(splits[i].overlapped, nbytes))
                    for all_exposed, splits in pairs
                )
            ),
        )


def _merged(pieces: Iterable[_Piece], nbytes: Mapping[str, int]) -> tuple[_Piece, ...]:
    """Merge pieces with equal actions on one axis; the steps of a bucket are on different axes.

    Args:
        pieces: pieces of the reshardings of a bucket.
        nbytes: total bytes of the reshardings, by the axis of the step.
    """
    seconds: dict[tuple[str, str], float] = {}
    for piece in pieces:
        key = piece.name, piece.axis
        seconds[key] = seconds.get(key, 0.0) + piece.seconds
    return tuple(_Piece(name, axis, s, nbytes[axis]) for (name, axis), s in seconds.items())


class _Simulator:
    def __init__(self, plan: Plan, stage: Stage, graph: Graph, *, bucketed: bool) -> None:
        self._plan = plan
        self._stage = stage
        self._graph = graph
        self._timing = _StageTiming(plan, stage, graph)
        self._bucketed = bucketed
        self._timings: dict[Use, _ReshardingTiming] = {}
        self._memory = timeline(
            stage,
            graph,
            training=self._timing.prices.training,
            optimizer=self._timing.prices.optimizer,
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
        loading, update = self._timing.inputs()
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
            lanes=(COMPUTE, *(f"axis {name}" for name in self._plan.mesh.axis_names)),
            events=tuple(sorted(self._events, key=lambda event: event.start)),
            seconds=self._now,
            moments=np.array(starts),
            numbers=np.array(numbers, dtype=np.intp),
            memory=memory,
        )

    def _micro_batches(self) -> Iterator[dict[Use, _ReshardingTiming]]:
        """The pieces of all reshardings in each micro-batch of the step."""
        known: dict[tuple[bool, bool], dict[Use, _ReshardingTiming]] = {}
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
            case Call() as call:
                self._call(self._graph.nodes[call.number], phase)
            case Reshard() as reshard:
                self._reshard(reshard.resharding.use, phase)
            case BeginBucket() as begin:
                for use in begin.bucket.uses:
                    self._reshard(use, phase)
            case _:
                pass

    def _call(self, node: Node, phase: Phase) -> None:
        """Add an operator, the communication that overlaps with it, and the collectives inside."""
        passes = self._timing.node(node)
        backward, again = phase is Phase.BACKWARD, phase is Phase.RECOMPUTE
        start = self._now
        seconds = passes.backward if backward else passes.forward
        category: Category = "recompute" if again else "compute"
        self._compute(node.operator, node.name, phase, category, seconds)
        micro_batches = self._stage.micro_batches
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
            _Piece(step.action, step.axis, step.time / micro_batches, step.nbytes)
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
        pieces: Sequence[_Piece],
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


_MICROSECONDS = 1e6


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
    yield _record("M", "process_name", process, args={"name": name})
    for thread, lane in enumerate(lanes):
        yield _record("M", "thread_name", process, thread, args={"name": lane})
        yield _record("M", "thread_sort_index", process, thread, args={"sort_index": thread})
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
        yield _record(
            "X",
            event.name,
            process,
            lanes.index(event.lane),
            cat=event.category,
            ts=event.start * _MICROSECONDS,
            dur=event.seconds * _MICROSECONDS,
            args=args,
        )


def _counters(simulation: Simulation) -> Iterator[dict[str, Any]]:
    kinds = tuple(simulation.memory.nbytes)
    nbytes = [alive[simulation.numbers] for alive in simulation.memory.nbytes.values()]
    for start, *alive in zip(simulation.moments, *nbytes, strict=True):
        args = {kind: int(count) for kind, count in zip(kinds, alive, strict=True)}
        yield _record("C", "memory, bytes", 0, ts=float(start) * _MICROSECONDS, args=args)


def _record(phase: str, name: str, process: int, thread: int = 0, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, **rest}
