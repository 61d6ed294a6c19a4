"""Turning a stage of a plan into instructions for one rank."""

from collections.abc import Iterator, Sequence

from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import LayoutError, PlanError
from autoshard.graph import Graph, Node, Output
from autoshard.graph.experts import ragged_values
from autoshard.layouts import Layout
from autoshard.plan import PlacedNode, Resharding, Stage
from autoshard.plan.buckets import Bucket, buckets_of
from autoshard.plan.document import Use
from autoshard.plan.memory.spans import checkpoint_spans
from autoshard.runtime.buckets import BucketSteps
from autoshard.runtime.instructions import Begin, Call, End, Instruction, Recompute, Reshard
from autoshard.runtime.kernels import bind_kernel
from autoshard.runtime.local_node import LocalNode, Place
from autoshard.runtime.resharding import bind_steps
from autoshard.runtime.shards import local_shape


class Compiler:
    """Turns a stage into instructions.

    A resharding runs right before its first reader; one that is shared with nodes outside a
    checkpoint runs before the checkpoint. Those of a bucket begin where the bucket does, and
    end before the first reader of any of them, or before the checkpoint that it is in if the
    bucket is not.

    Args:
        stage: of a plan.
        graph: the stage's program.
        mesh: the stage's devices.
        place: where on the mesh this rank is.
        custom: names of operators that may be called though they are not of ATen.
        bucketed: whether reshardings of parameters share collectives, as the plan counts them.

    Attributes:
        instructions: what runs, in order.
        output_slots: where each output of the graph is afterwards; None for a literal.
    """

    def __init__(
        self,
        stage: Stage,
        graph: Graph,
        mesh: DeviceMesh,
        place: Place,
        *,
        custom: frozenset[str] = frozenset(),
        bucketed: bool = True,
    ) -> None:
        self._stage = stage
        self._custom = custom
        self._graph = graph
        self._ragged = ragged_values(graph)
        self._mesh = mesh
        self._place = place
        self.instructions: list[Instruction] = []
        self.output_slots: list[int | None] = []
        self._num_slots = 0
        self._slots = {placed.name: self._new_slot() for placed in stage.inputs}
        self._placed = {placed.name: placed for placed in stage.nodes}
        self._reshardings = {c.use: c for c in stage.reshardings}
        self._waiting = list(buckets_of(stage, graph)) if bucketed else []
        self._begun: dict[Use, tuple[Bucket, BucketSteps, int]] = {}
        self._resharded: dict[Use, int] = {}

    def compile(self) -> None:
        """Fill `instructions` and `output_slots`.

        Raises:
            PlanError: the stage contradicts itself, or calls what may not be called.
        """
        self._check_inputs()
        if len(self._reshardings) < len(self._stage.reshardings):
            raise PlanError(f"stage {self._stage.name!r} reshards one use of a value twice")
        start = 0
        for number, span in enumerate(checkpoint_spans(self._graph, self._stage)):
            self._add_calls(self._graph.nodes[start : span.start])
            self._begin_buckets(span.start)
            self._add_checkpoint(self._graph.nodes[span.start : span.stop], number)
            start = span.stop
        self._add_calls(self._graph.nodes[start:])
        self._begin_buckets(len(self._graph.nodes))
        for position, output in enumerate(self._graph.outputs):
            self.output_slots.append(self._output_slot(output, position))
        if self._reshardings:
            value, consumer, _ = next(iter(self._reshardings))
            raise PlanError(f"the plan reshards {value!r} for {consumer!r}, which does not use it")

    def _check_inputs(self) -> None:
        for placed in self._stage.inputs:
            if placed.name not in self._graph.values:
                raise PlanError(
                    f"stage {self._stage.name!r} places {placed.name!r}, which is no value"
                )
            layout, whole = Layout.parse(placed.layout), self._graph.values[placed.name].shape
            self._local_shapes([placed.name], [layout])  # names the input if axes may not cut it so
            shape = layout.local_shape(whole, self._place.axis_sizes)
            if shape != placed.local_shape:
                raise PlanError(
                    f"input {placed.name!r} has the local shape {placed.local_shape} in the plan, "
                    f"but {placed.layout} gives {shape}"
                )

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _add_checkpoint(self, nodes: Sequence[Node], number: int) -> None:
        for node in nodes:
            for position, value in enumerate(node.inputs):
                if value in self._slots:
                    self._share(value)
                self._end_bucket_of((value, node.name, position))
        outside, self.instructions = self.instructions, []
        self._add_calls(nodes, checkpoint=number)
        outside.append(Recompute.of(self.instructions))
        self.instructions = outside

    def _add_calls(self, nodes: Sequence[Node], *, checkpoint: int = -1) -> None:
        for node in nodes:
            if node.name not in self._placed:
                raise PlanError(f"stage {self._stage.name!r} has no layouts for node {node.name!r}")
            self._begin_buckets(self._graph.numbers[node.name], checkpoint)
            self._add_call(node, self._placed[node.name])

    def _add_call(self, node: Node, placed: PlacedNode) -> None:
        reads = tuple(
            self._read(value, node.name, position) for position, value in enumerate(node.inputs)
        )
        local = self._local_node(node, placed)
        for name in node.outputs:
            self._slots[name] = self._new_slot()
        self.instructions.append(
            Call(
                node=node.name,
                reads=reads,
                targets=tuple(self._slots[name] for name in node.outputs),
                writes=local.tracked(),
                shapes=tuple(self._known_shapes(node.outputs, local.output_shapes)),
                kernel=bind_kernel(local),
            )
        )

    def _known_shapes(
        self, values: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int | None, ...]]:
        """What follows from the plan of shapes; how many rows an expert has does not."""
        for value, shape in zip(values, shapes, strict=True):
            yield (None, None, *shape[2:]) if value in self._ragged else shape

    def _local_node(self, node: Node, placed: PlacedNode) -> LocalNode:
        inputs = tuple(Layout.parse(text) for text in placed.inputs)
        outputs = tuple(Layout.parse(text) for text in placed.outputs)
        return LocalNode(
            node=node,
            inputs=inputs,
            outputs=outputs,
            shapes=tuple(self._graph.values[value].shape for value in node.inputs),
            input_shapes=self._local_shapes(node.inputs, inputs),
            output_shapes=self._local_shapes(node.outputs, outputs),
            place=self._place,
            custom=self._custom,
        )

    def _local_shapes(
        self, values: Sequence[str], layouts: Sequence[Layout]
    ) -> tuple[tuple[int, ...], ...]:
        """The rank's own shapes."""
        if len(values) != len(layouts):
            raise PlanError(f"there are {len(layouts)} layouts for the values {list(values)}")
        place, shapes = self._place, []
        for value, layout in zip(values, layouts, strict=True):
            try:
                shape = self._graph.values[value].shape
                shapes.append(local_shape(shape, layout, place.axis_sizes, place.coordinate))
            except LayoutError as error:
                raise PlanError(f"value {value!r}: {error}") from None
        return tuple(shapes)

    def _output_slot(self, output: Output, position: int) -> int | None:
        return None if output.name is None else self._read(output.name, "output", position)

    def _read(self, value: str, consumer: str, position: int) -> int:
        """The slot from which a use of a value reads, resharded as the plan says."""
        self._share(value)
        own = self._reshardings.pop((value, consumer, position), None)
        return self._slots[value] if own is None else self._add_resharding(own)

    def _share(self, value: str) -> None:
        """Reshard a value for all its readers, if the plan says so and none has read it yet."""
        shared = self._reshardings.pop((value, None, 0), None)
        if shared is not None:
            self._slots[value] = self._add_resharding(shared)

    def _begin_buckets(self, number: int, checkpoint: int = -1) -> None:
        """Begin what begins before a node, inside a checkpoint or outside of all."""
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            if bucket.begins > number or bucket.checkpoint != checkpoint:
                self._waiting.append(bucket)
                continue
            crossing = self._new_slot()
            sources = tuple(self._slots[resharding.value] for resharding in bucket.reshardings)
            shapes = [self._graph.values[c.value].shape for c in bucket.reshardings]
            steps = BucketSteps(bucket, self._mesh, shapes)
            self.instructions.append(Begin(reads=sources, targets=(crossing,), steps=steps))
            begun = bucket, steps, crossing
            self._begun.update((use, begun) for use in bucket.uses)

    def _end_bucket_of(self, use: Use) -> None:
        """End the bucket of a use, if it has begun and is not over."""
        if use in self._begun and use not in self._resharded:
            self._end_bucket(*self._begun[use])

    def _end_bucket(self, bucket: Bucket, steps: BucketSteps, crossing: int) -> None:
        for use in bucket.uses:
            self._resharded[use] = self._new_slot()
        targets = tuple(self._resharded[use] for use in bucket.uses)
        self.instructions.append(
            End(reads=(crossing,), targets=targets, steps=steps, again=bucket.regather)
        )

    def _add_resharding(self, resharding: Resharding) -> int:
        use = resharding.use
        self._end_bucket_of(use)
        if use in self._resharded:
            return self._resharded[use]
        source = self._slots[resharding.value]
        shape = self._graph.values[resharding.value].shape
        steps = bind_steps(resharding.steps, self._mesh, shape)
        if not steps:
            return source
        target = self._new_slot()
        self.instructions.append(
            Reshard(
                reads=(source,),
                targets=(target,),
                use=resharding.use,
                steps=steps,
                again=resharding.regather,
            )
        )
        return target
