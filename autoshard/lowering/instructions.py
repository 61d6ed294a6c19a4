"""Lowering: a stage of a plan as a list of the instructions that one rank runs.

The runtime binds kernels and process groups to these instructions. The memory timeline, the
counts of collectives and the simulation read the same list, so that predictions agree with what
runs.

* A resharding runs right before its first reader. One that is shared by nodes inside and outside
  of a checkpoint runs before the checkpoint.
* A bucket begins where `autoshard.lowering.buckets` schedules it. It ends before the first reader
  of any of its members, or before the checkpoint of that reader if the bucket is outside of it.
* Steps on axes of size 1 are left out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from autoshard.errors import LayoutError, PlanError
from autoshard.graph import Graph, Node
from autoshard.layouts import Action, Layout
from autoshard.lowering.buckets import Bucket, buckets_of
from autoshard.lowering.recompute import recomputed
from autoshard.plan.predictions import CollectiveCount, Direction
from autoshard.plan.stage import PlacedNode, PlannedStep, Resharding, Stage, Use

Shape = tuple[int, ...]
Slots = tuple[int, ...]
"""Indices of tensors in static single assignment form; the first ones are the stage's inputs."""


class Collective(NamedTuple):
    """A collective of a step.

    Attributes:
        kind: such as all_gather.
        axis: name of the mesh axis.
        direction: forward or backward.
        nbytes: bytes of a rank's tensor before or after it, whichever is larger.
        runs: how often it runs in a training step, once or once per micro-batch.
    """

    kind: str
    axis: str
    direction: Direction
    nbytes: int
    runs: int


class LocalCall(NamedTuple):
    """Run an operator on local tensors.

    Attributes:
        reads: slots of the node's inputs.
        targets: slots of the node's outputs.
        number: number of the node in the program.
        placed: the node's layouts, and the collectives inside it.
        shapes: local shape of each output, on ranks with the largest shard.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
        recomputed: True if backward runs it again.
    """

    reads: Slots
    targets: Slots
    number: int
    placed: PlacedNode
    shapes: tuple[Shape, ...]
    checkpoint: int
    recomputed: bool

    def collectives(self, micro_batches: int) -> Iterator[Collective]:
        """The collectives inside the operator."""
        for inner in self.placed.inside:
            what = inner.action, inner.axis
            yield Collective(*what, inner.direction, inner.nbytes, micro_batches)
            if inner.direction == "forward" and self.recomputed:
                yield Collective(*what, "backward", inner.nbytes, micro_batches)


class UnbucketedReshard(NamedTuple):
    """Run a resharding that is not in a bucket.

    Attributes:
        reads: slot of the source.
        targets: slot of the result.
        resharding: the planned resharding.
        steps: its steps on axes of several ranks; at least one.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
        recomputed: True if backward runs its forward steps again.
    """

    reads: Slots
    targets: Slots
    resharding: Resharding
    steps: tuple[PlannedStep, ...]
    checkpoint: int
    recomputed: bool

    def collectives(self, micro_batches: int) -> Iterator[Collective]:
        """The collectives of the steps."""
        runs = micro_batches, micro_batches
        for step in self.steps:
            nbytes = step.nbytes, step.backward_nbytes
            yield from _step_collectives(step, nbytes, runs, recomputed=self.recomputed)


class BeginBucket(NamedTuple):
    """Start the first collective of a bucket.

    Attributes:
        reads: slots of the sources.
        targets: one slot, of the pending bucket.
        bucket: its reshardings.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
        recomputed: True if backward runs its forward steps again.
    """

    reads: Slots
    targets: Slots
    bucket: Bucket
    checkpoint: int
    recomputed: bool

    def collectives(self, micro_batches: int) -> Iterator[Collective]:
        """All collectives of the bucket, including those that run when it ends."""
        every_run = self.bucket.runs(micro_batches)
        for (step, *nbytes), runs in zip(self.bucket.steps, every_run, strict=True):
            yield from _step_collectives(step, nbytes, runs, recomputed=self.recomputed)


class EndBucket(NamedTuple):
    """Wait for a bucket, and split it.

    Attributes:
        reads: slot of the pending bucket.
        targets: slots of the results, one for each resharding.
        bucket: its reshardings.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
    """

    reads: Slots
    targets: Slots
    bucket: Bucket
    checkpoint: int

    def collectives(self, _: int) -> Iterator[Collective]:
        """No collectives: they are counted where the bucket begins."""
        return iter(())


class Cast(NamedTuple):
    """Convert a parameter to the element type in which operators read it.

    It serves the uses of a parameter in the layout in which it is stored; reshardings convert
    parameters themselves. Backward converts it again instead of saving the result.

    Attributes:
        reads: slot of the parameter.
        targets: slot of the result.
        value: name of the parameter in the program.
        checkpoint: -1; one that is read inside of a checkpoint runs before it.
    """

    reads: Slots
    targets: Slots
    value: str
    checkpoint: int = -1

    def collectives(self, _: int) -> Iterator[Collective]:
        """No collectives."""
        return iter(())


Instruction = LocalCall | UnbucketedReshard | BeginBucket | EndBucket | Cast


@dataclass(frozen=True)
class Lowering:
    """The instructions of a stage.

    Attributes:
        stage: a plan's stage.
        graph: the stage's program.
        instructions: the instructions in execution order; those of a checkpoint are consecutive.
        outputs: slot of each output of the program; None for a literal.
    """

    stage: Stage
    graph: Graph
    instructions: tuple[Instruction, ...]
    outputs: tuple[int | None, ...]

    def collectives(self) -> Iterator[Collective]:
        """Every collective of a training step, forward and backward."""
        for instruction in self.instructions:
            yield from instruction.collectives(self.stage.micro_batches)


def lower(stage: Stage, graph: Graph, *, bucketed: bool = True) -> Lowering:
    """Lower a stage to instructions.

    Args:
        stage: a plan's stage.
        graph: the stage's program.
        bucketed: True if reshardings of parameters share collectives, as the plan counts them;
            otherwise each runs separately.

    Raises:
        PlanError: the stage is inconsistent or does not fit its program.
    """
    return _Lowerer(stage, graph, bucketed=bucketed).lower()


def count_collectives(
    stages: Sequence[Stage], graphs: Sequence[Graph]
) -> tuple[CollectiveCount, ...]:
    """The collectives of one step of a program, summed by kind, axis and direction.

    Args:
        stages: the stages of a plan.
        graphs: the program of each stage.

    Raises:
        PlanError: a stage is inconsistent or does not fit its program.
    """
    return summed_collectives(map(lower, stages, graphs))


def summed_collectives(lowerings: Iterable[Lowering]) -> tuple[CollectiveCount, ...]:
    """The collectives of one step of lowered stages, summed by kind, axis and direction."""
    count: Counter[tuple[str, str, Direction]] = Counter()
    nbytes: Counter[tuple[str, str, Direction]] = Counter()
    for lowering in lowerings:
        for kind, axis, direction, size, runs in lowering.collectives():
            count[kind, axis, direction] += runs
            nbytes[kind, axis, direction] += runs * size
    return tuple(
        CollectiveCount(
            kind=kind, axis=axis, direction=direction, count=n, nbytes=nbytes[kind, axis, direction]
        )
        for (kind, axis, direction), n in sorted(count.items())
    )


_COLLECTIVES = frozenset(action.value for action in Action if action.is_collective)


def _step_collectives(
    step: PlannedStep, nbytes: Sequence[int], runs: tuple[int, int], *, recomputed: bool
) -> Iterator[Collective]:
    (gathers, reductions), (forward, backward) = runs, nbytes
    if step.forward in _COLLECTIVES:
        yield Collective(step.forward, step.axis, "forward", forward, gathers)
        if recomputed:
            yield Collective(step.forward, step.axis, "backward", forward, gathers)
    if step.backward in _COLLECTIVES:
        yield Collective(step.backward, step.axis, "backward", backward, reductions)


class _Lowerer:
    def __init__(self, stage: Stage, graph: Graph, *, bucketed: bool) -> None:
        self._stage = stage
        self._graph = graph
        self._sizes = dict(stage.axes)
        self._again = recomputed(graph, stage)
        self._placed = {placed.name: placed for placed in stage.nodes}
        self._shapes: dict[tuple[int, tuple[str, ...]], tuple[Shape, ...]] = {}
        self._reshardings = {c.use: c for c in stage.reshardings}  # those that have not run yet
        self._resharded = {c.value for c in stage.reshardings}
        self._waiting = list(buckets_of(stage, graph, self._again)) if bucketed else []
        self._next_bucket = -inf  # the first node before which one of them may begin
        self._pending: dict[Use, tuple[Bucket, int]] = {}  # begun buckets, and their slots
        self._ended: dict[Use, int] = {}  # slots of the results of ended buckets
        self._instructions: list[Instruction] = []
        self._current = {placed.name: slot for slot, placed in enumerate(stage.inputs)}
        self._num_slots = len(stage.inputs)
        self._converted: dict[int, int] = {}  # slots of stored parameters, and of their casts
        self._checkpoint = -1

    def lower(self) -> Lowering:
        if len(self._reshardings) < len(self._stage.reshardings):
            raise PlanError(f"stage {self._stage.name!r} reshards one use of a value twice")
        self._check_inputs()
        spans = {span.start: (number, span) for number, span in enumerate(self._again.spans)}
        stops = {span.stop for span in self._again.spans}
        for number, node in enumerate(self._graph.nodes):
            if number in stops:
                self._checkpoint = -1
            if number in spans:
                self._begin_buckets(number)
                self._enter_checkpoint(*spans[number])
            self._begin_buckets(number)
            self._call(number, node)
        self._checkpoint = -1
        self._begin_buckets(len(self._graph.nodes))
        outputs = tuple(
            None if output.name is None else self._read(output.name, "output", position)
            for position, output in enumerate(self._graph.outputs)
        )
        if self._reshardings:
            value, consumer, _ = next(iter(self._reshardings))
            raise PlanError(f"the plan reshards {value!r} for {consumer!r}, which does not use it")
        return Lowering(self._stage, self._graph, tuple(self._instructions), outputs)

    def _check_inputs(self) -> None:
        for name in self._current.keys() - self._graph.values.keys():
            raise PlanError(
                f"stage {self._stage.name!r} places {name!r}, which its program does not have"
            )
        for entering in self._graph.inputs:
            if entering.name in self._graph.values and entering.name not in self._current:
                raise PlanError(
                    f"stage {self._stage.name!r} has no layout for input {entering.name!r}"
                )
        for placed in self._stage.inputs:
            shape = self._graph.values[placed.name].shape
            pairs = zip(placed.local_shape, shape, strict=False)
            if len(placed.local_shape) != len(shape) or any(not 0 <= a <= b for a, b in pairs):
                raise PlanError(
                    f"stage {self._stage.name!r} has shards of {placed.name!r} that are larger "
                    f"than the tensor"
                )

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _enter_checkpoint(self, number: int, span: range) -> None:
        """Run what nodes of a checkpoint read, and what belongs outside of it.

        These are shared reshardings, ends of buckets, and casts of parameters.
        """
        for node in self._graph.nodes[span.start : span.stop]:
            for position, value in enumerate(node.inputs):
                use = value, node.name, position
                if value in self._current:
                    self._share(value)
                    if use not in self._reshardings:
                        self._as_read(value)
                self._end_bucket(use)
        self._checkpoint = number

    def _call(self, number: int, node: Node) -> None:
        placed = self._placed.get(node.name)
        if placed is None:
            raise PlanError(f"stage {self._stage.name!r} has no layouts for node {node.name!r}")
        reads = tuple(
            [self._read(value, node.name, position) for position, value in enumerate(node.inputs)]
        )
        targets = tuple([self._new_slot() for _ in node.outputs])
        self._current.update(zip(node.outputs, targets, strict=True))
        shapes = self._local_shapes(number, placed)
        again = node.name in self._again.nodes
        self._instructions.append(
            LocalCall(reads, targets, number, placed, shapes, self._checkpoint, again)
        )

    def _local_shapes(self, number: int, placed: PlacedNode) -> tuple[Shape, ...]:
        key = self._graph.kinds[number], placed.outputs
        if key not in self._shapes:
            values = self._graph.nodes[number].outputs
            if len(values) != len(placed.outputs):
                raise PlanError(
                    f"there are {len(placed.outputs)} layouts for the values {list(values)}"
                )
            sizes = tuple(self._sizes.values())
            try:
                self._shapes[key] = tuple(
                    Layout.parse(text).local_shape(self._graph.values[value].shape, sizes)
                    for value, text in zip(values, placed.outputs, strict=True)
                )
            except LayoutError as error:
                raise PlanError(f"node {placed.name!r}: {error}") from None
        return self._shapes[key]

    def _read(self, value: str, consumer: str, position: int) -> int:
        """The slot that a use of a value reads, after its planned resharding."""
        own = None
        if value in self._resharded:
            self._share(value)
            own = self._reshardings.pop((value, consumer, position), None)
        return self._as_read(value) if own is None else self._reshard(own)

    def _as_read(self, value: str) -> int:
        """The slot of a value in the element type in which operators read it."""
        slot = self._current[value]
        # Only what is stored is converted here: reshardings return the type in which operators
        # read.
        if value not in self._graph.converted or slot >= len(self._stage.inputs):
            return slot
        if slot not in self._converted:
            self._converted[slot] = self._new_slot()
            self._instructions.append(Cast((slot,), (self._converted[slot],), value))
        return self._converted[slot]

    def _share(self, value: str) -> None:
        """Reshard a value for all its readers, if that is planned and has not been done yet."""
        shared = self._reshardings.pop((value, None, 0), None)
        if shared is not None:
            self._current[value] = self._reshard(shared)

    def _reshard(self, resharding: Resharding) -> int:
        use = resharding.use
        self._end_bucket(use)
        if use in self._ended:
            return self._ended[use]
        source = self._current[resharding.value]
        steps = tuple([step for step in resharding.steps if step.num_ranks(self._sizes) > 1])
        if not steps:
            return source if resharding.consumer is None else self._as_read(resharding.value)
        target = self._new_slot()
        again = use in self._again.reshardings
        self._instructions.append(
            UnbucketedReshard((source,), (target,), resharding, steps, self._checkpoint, again)
        )
        return target

    def _begin_buckets(self, number: int) -> None:
        """Begin the buckets that are scheduled before a node, in the current checkpoint if any."""
        if number < self._next_bucket:
            return
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            if bucket.begins > number or bucket.checkpoint != self._checkpoint:
                self._waiting.append(bucket)
                continue
            pending = self._new_slot()
            sources = tuple(self._current[value] for value, _, _ in bucket.uses)
            again = bucket.uses[0] in self._again.reshardings
            self._instructions.append(
                BeginBucket(sources, (pending,), bucket, self._checkpoint, again)
            )
            self._pending.update(dict.fromkeys(bucket.uses, (bucket, pending)))
        self._next_bucket = min((bucket.begins for bucket in self._waiting), default=inf)

    def _end_bucket(self, use: Use) -> None:
        """End the bucket of a use, if it has begun and not ended."""
        if use in self._pending and use not in self._ended:
            bucket, pending = self._pending[use]
            self._ended.update((use, self._new_slot()) for use in bucket.uses)
            targets = tuple(self._ended[use] for use in bucket.uses)
            self._instructions.append(EndBucket((pending,), targets, bucket, self._checkpoint))
