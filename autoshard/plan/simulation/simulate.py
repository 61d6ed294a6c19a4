"""One step of a plan, laid out over time from the plan document alone.

Prices are those of the plan, so the step ends when the plan says that it does, and the events
of each category add up to the plan's costs. Operators are on the lane of compute; what a
resharding runs, and collectives inside operators, on the lane of their axis. Order and moments
are those of the memory timeline.

What the option `overlap` hides is drawn beside the compute that pays for it: that of the
weight's own reader. A runtime that prefetches would run a gather beside the compute before;
in a stack of layers that are alike the picture is the same, one layer later.

A bucket is drawn as the one collective that it is, with all its bytes. Its time is the sum of its
members' prices, each of which counts a latency, so it is an upper estimate. What of it is hidden
is drawn beside the readers of its members, each part with the name and the bytes of the whole.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.collection import collection_paused
from autoshard.errors import PlanError
from autoshard.graph import Graph, Node, graph_from_json
from autoshard.plan.buckets import buckets_of
from autoshard.plan.document import Direction, Plan, Resharding, Stage
from autoshard.plan.gradients import Gradients
from autoshard.plan.memory.record import Instruction
from autoshard.plan.memory.schedule import Phase, Schedule
from autoshard.plan.memory.tape import Tape
from autoshard.plan.memory.timeline import timeline
from autoshard.plan.simulation.events import (
    COMPUTE,
    Category,
    Event,
    Simulation,
    bucket_label,
    resharding_label,
)
from autoshard.plan.simulation.timing import Piece, ReshardingTiming, Timing


@collection_paused()
def simulate(plan: Plan, *, bucketed: bool = True) -> Simulation:
    """One step of a plan over time.

    Args:
        plan: that was found.
        bucketed: whether reshardings that share collectives are drawn together, as they run.

    Raises:
        PlanError: the document holds no plan, or one that contradicts itself.
    """
    if not plan.found:
        raise PlanError(f"the document has no plan to simulate: {plan.reason}")
    (stage,) = plan.stages
    graph = graph_from_json(stage.program)
    return _Simulator(plan, stage, graph, bucketed=bucketed).simulation()


class _Simulator:
    def __init__(self, plan: Plan, stage: Stage, graph: Graph, *, bucketed: bool) -> None:
        self._plan = plan
        self._stage = stage
        self._graph = graph
        self._timing = Timing(plan, stage, graph)
        self._training = self._timing.prices.training
        gradients = Gradients(graph, training=self._training)
        self._gradients = gradients
        self._tape = Tape(stage, graph, gradients)
        self._placed = {placed.name: placed for placed in stage.nodes}
        targets = {placed.name: placed.target for placed in stage.inputs}
        self._reshardings = {c.use: c for c in stage.reshardings}
        self._timings = {c.use: self._timing.resharding(c) for c in stage.reshardings}
        self._labels = {c.use: resharding_label(c, targets) for c in stage.reshardings}
        for bucket in buckets_of(stage, graph) if bucketed else ():
            self._timings.update(self._timing.bucket(bucket))
            self._labels.update(dict.fromkeys(bucket.uses, bucket_label(bucket, targets)))
        self._into: dict[str, list[Resharding]] = {}
        for resharding in stage.reshardings:
            self._into.setdefault(resharding.consumer or "", []).append(resharding)
        self._events: list[Event] = []
        self._now = 0.0

    def simulation(self) -> Simulation:
        """Run all moments."""
        schedule = Schedule(self._tape, training=self._training)
        memory = timeline(
            self._stage,
            self._graph,
            training=self._training,
            optimizer=self._timing.prices.optimizer,
        )
        once_more: dict[int, list[Resharding]] = {}
        for use, moment in memory.regathered.items():
            once_more.setdefault(moment, []).append(self._reshardings[use])
        loading, update = self._input_seconds()
        self._compute("inputs", "inputs", Phase.FORWARD, "compute", loading)
        starts = []
        for moment, ((phase, _), number) in enumerate(
            zip(schedule.moments, schedule.numbers, strict=True)
        ):
            starts.append(self._now)
            for resharding in once_more.get(moment, ()):
                self._reshard(resharding, Phase.RECOMPUTE)
            if number >= 0:
                self._advance(self._tape.instructions[number], phase)
        self._compute("optimizer", "parameters", Phase.OPTIMIZER, "optimizer", update)
        return Simulation(
            plan=self._plan.id,
            lanes=(COMPUTE, *(f"axis {name}" for name in self._plan.mesh.axis_names)),
            events=tuple(sorted(self._events, key=lambda event: event.start)),
            seconds=self._now,
            moments=np.array(starts),
            memory=memory,
        )

    def _input_seconds(self) -> tuple[float, float]:
        """Seconds of writing and holding inputs, and of the optimizer's update."""
        loading = update = 0.0
        inputs = {i.name: i for i in self._graph.inputs}
        for placed in self._stage.inputs:
            time, _ = self._timing.prices.input(inputs[placed.name], [placed.local_shape])
            if placed.kind == "parameter" and self._gradients.exists(placed.name):
                update += float(time[0])
            else:
                loading += float(time[0])
        return loading, update

    def _advance(self, instruction: Instruction, phase: Phase) -> None:
        if instruction.use is None and instruction.is_resharding:
            return
        if instruction.use is None:
            self._call(self._graph.nodes[self._graph.numbers[instruction.name]], phase)
        else:
            self._reshard(self._reshardings[instruction.use], phase)

    def _call(self, node: Node, phase: Phase) -> None:
        """An operator, what is hidden beside it, and what ranks run inside it."""
        passes = self._timing.node(node)
        backward = phase is Phase.BACKWARD
        again = phase is Phase.RECOMPUTE
        start = self._now
        seconds = passes.backward if backward else passes.forward
        category: Category = "recompute" if again else "compute"
        self._compute(node.operator, node.name, phase, category, seconds)
        end, self._now = self._now, start
        for resharding in () if again else self._into.get(node.name, ()):
            timing = self._timings[resharding.use]
            label = self._labels[resharding.use]
            if backward:
                self._run(
                    timing.again.overlapped, label, Phase.RECOMPUTE, "recompute", overlapped=True
                )
                self._run(
                    timing.backward.overlapped, label, phase, "communication", overlapped=True
                )
            else:
                self._run(timing.forward.overlapped, label, phase, "communication", overlapped=True)
        self._now = end
        self._inside(node, phase)

    def _inside(self, node: Node, phase: Phase) -> None:
        direction: Direction = "backward" if phase is Phase.BACKWARD else "forward"
        pieces = [
            Piece(step.action, step.axis, step.time, step.nbytes)
            for step in self._placed[node.name].inside
            if step.direction == direction
        ]
        category: Category = "recompute" if phase is Phase.RECOMPUTE else "communication"
        self._run(pieces, node.name, phase, category, inside=node.operator)

    def _reshard(self, resharding: Resharding, phase: Phase) -> None:
        """What compute waits for of a resharding."""
        timing: ReshardingTiming = self._timings[resharding.use]
        label = self._labels[resharding.use]
        if phase is Phase.RECOMPUTE:
            self._run(timing.again.waited, label, phase, "recompute")
        elif phase is Phase.BACKWARD:
            self._run(timing.backward.waited, label, phase, "communication")
        else:
            self._run(timing.forward.waited, label, phase, "communication")

    def _compute(
        self, name: str, subject: str, phase: Phase, category: Category, seconds: float
    ) -> None:
        if seconds:
            self._events.append(Event(name, subject, None, phase, category, self._now, seconds))
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
                )
            )
            self._now += piece.seconds
