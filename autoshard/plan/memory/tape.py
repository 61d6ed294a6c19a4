"""What a rank runs for a stage, in order, and the memory in which each tensor lies.

Mirrors the runtime: a resharding runs right before its first reader, one that nodes of a
checkpoint share with others before the checkpoint, those of a bucket begin where the bucket does
and end before the first reader of any of them (or the checkpoint, if they run outside of it), and
steps on axes of one rank are left out.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from autoshard.graph import Graph, Tensor
from autoshard.layouts import Layout
from autoshard.ops import (
    backward_working,
    call_of,
    made_strides,
    passes_gradient,
    rule_for,
    saved_by,
    view_strides,
)
from autoshard.ops.halo import NO_BORDERS
from autoshard.plan.buckets import buckets_of
from autoshard.plan.document import Checkpoint, PlannedStep, Resharding, Stage
from autoshard.plan.gradients import Gradients
from autoshard.plan.memory.bucket_tape import BucketTape
from autoshard.plan.memory.moves import Moves, moves_of
from autoshard.plan.memory.record import Form, Instruction, Record, Shape


class Tape:
    """The instructions of a stage.

    Args:
        stage: of a plan.
        graph: the stage's program.
        gradients: of the program.

    Attributes:
        forms: of every slot, that is of every tensor of the program on one rank; the slots of
            the stage's inputs come first.
        storages: number of the memory in which each slot lies; views share it.
        num_inputs: how many inputs there are.
        instructions: in the order in which they run.
        outputs: slots of what leaves the graph.
        made_by: for each storage the instruction that makes it; -1 for inputs.
    """

    def __init__(self, stage: Stage, graph: Graph, gradients: Gradients) -> None:
        self._record = Record()
        self.forms = self._record.forms
        self.storages = self._record.storages
        self.instructions = self._record.instructions
        self.made_by = self._record.made_by
        self._graph = graph
        self._kinds = graph.kinds
        self._gradients = gradients
        self._sizes = dict(stage.axes)
        self._calls: dict[object, _Call] = {}
        self._moves: dict[object, Moves] = {}
        self._reshardings = {c.use: c for c in stage.reshardings}
        self._resharded = {resharding.value for resharding in stage.reshardings}
        self._current: dict[str, int] = {}
        self._checkpoint = -1
        self._buckets = BucketTape(buckets_of(stage, graph), self._record, self._moves_for)
        for placed in stage.inputs:
            nbytes = prod(placed.local_shape) * graph.values[placed.name].dtype.itemsize
            form = Form(nbytes, gradients.exists(placed.name), placed.local_shape, None)
            self._current[placed.name] = self._record.add_input(form)
        self.num_inputs = len(self.forms)
        self._add_nodes(stage)
        self._buckets.begin(len(graph.nodes), self._current)
        self.outputs = tuple(
            self._read(output.name, "output", position)
            for position, output in enumerate(graph.outputs)
            if output.name is not None
        )

    def _add_nodes(self, stage: Stage) -> None:
        starts = {checkpoint.first: i for i, checkpoint in enumerate(stage.checkpoints)}
        ends = {checkpoint.last for checkpoint in stage.checkpoints}
        layouts = {placed.name: placed.outputs for placed in stage.nodes}
        for i, node in enumerate(self._graph.nodes):
            number = starts.get(node.name)
            if number is not None:
                self._buckets.begin(i, self._current)
                self._share_what_enters(i, stage.checkpoints[number])
                self._checkpoint = number
            self._buckets.begin(i, self._current, self._checkpoint)
            self._add_node(i, layouts[node.name])
            if node.name in ends:
                self._checkpoint = -1

    def _share_what_enters(self, start: int, checkpoint: Checkpoint) -> None:
        for node in self._graph.nodes[start:]:
            for position, value in enumerate(node.inputs):
                if value in self._current:
                    self._share(value)
                self._buckets.end((value, node.name, position))
            if node.name == checkpoint.last:
                return

    def _add_node(self, number: int, layouts: tuple[str, ...]) -> None:
        node = self._graph.nodes[number]
        reads = tuple(
            [self._read(value, node.name, position) for position, value in enumerate(node.inputs)]
        )
        flows = self._gradients.flows(node)
        numbers = self._record.numbers
        key = (self._kinds[number], layouts, flows, *[numbers[slot] for slot in reads])
        call = self._calls.get(key)
        if call is None:
            inputs = [self.forms[slot] for slot in reads]
            call = self._calls[key] = self._call(number, layouts, inputs, flows=flows)
        targets = tuple(
            [
                self._record.add_slot(
                    self.storages[reads[0]] if call.is_view else self._record.add_storage(),
                    form,
                    number,
                )
                for form, number in call.outputs
            ]
        )
        self._current.update(zip(node.outputs, targets, strict=True))
        kept = tuple([reads[i] for i in call.kept_inputs] + [targets[i] for i in call.kept_outputs])
        self.instructions.append(
            Instruction(
                node.name,
                reads,
                targets,
                kept,
                call.kept_bytes,
                call.working,
                call.working_backward,
                call.passes_gradient,
                checkpoint=self._checkpoint,
            )
        )

    def _call(
        self, number: int, layouts: tuple[str, ...], inputs: Sequence[Form], *, flows: bool
    ) -> "_Call":
        node = self._graph.nodes[number]
        call = call_of(self._graph, node)
        sizes = tuple(self._sizes.values())
        shapes = [
            Layout.parse(text).local_shape(tensor.shape, sizes)
            for text, tensor in zip(layouts, call.outputs, strict=True)
        ]
        seen = view_strides(call, inputs[0].shape, inputs[0].strides, shapes) if inputs else None
        strides = seen or [
            made_strides(call, [i.shape for i in inputs], [i.strides for i in inputs], shape)
            for shape in shapes
        ]
        # What autograd would see is made in any case.
        needed = [form.gradient or not flows for form in inputs]
        saved = saved_by(call, needed)
        local = [*(form.shape for form in inputs), *shapes]
        halo = rule_for(call).halo
        borders = halo.borders(call.inputs[0].shape, local[0]) if halo.edges else NO_BORDERS
        extra_bytes = sum(extra.nbytes(local) for extra in saved.extras) + borders.kept
        backward = sum(extra.nbytes(local) for extra in backward_working(call, needed))
        forms = [
            Form(_nbytes(shape, tensor), self._gradients.exists(value), shape, stride)
            for value, tensor, shape, stride in zip(
                node.outputs, call.outputs, shapes, strides, strict=True
            )
        ]
        return _Call(
            tuple((form, self._record.number(form)) for form in forms),
            seen is not None,
            tuple(sorted(saved.inputs)) if flows else (),
            tuple(sorted(saved.outputs)) if flows else (),
            extra_bytes if flows else 0,
            borders.extended + (0 if flows else extra_bytes),
            backward + borders.working_backward if flows else 0,
            tuple(passes_gradient(call, i) for i in range(len(inputs))),
        )

    def _read(self, value: str, consumer: str, position: int) -> int:
        """The slot from which a use of a value reads, resharded as the plan says."""
        if value not in self._resharded:
            return self._current[value]
        self._share(value)
        own = self._reshardings.get((value, consumer, position))
        return self._current[value] if own is None else self._reshard(own)

    def _share(self, value: str) -> None:
        shared = self._reshardings.pop((value, None, 0), None)
        if shared is not None:
            self._current[value] = self._reshard(shared)

    def _reshard(self, resharding: Resharding) -> int:
        bucketed = self._buckets.end(resharding.use)
        if bucketed is not None:
            return bucketed
        source = self._current[resharding.value]
        if not self._active(resharding):
            return source
        before = self.forms[source]
        moves = self._moves_for(resharding, before)
        storage = self.storages[source] if moves.in_place else self._record.add_storage()
        form = Form(moves.nbytes, before.gradient, moves.shape, None)
        target = self._record.add_slot(storage, form)
        self.instructions.append(
            Instruction(
                resharding.value,
                (source,),
                (target,),
                (),
                0,
                moves.working,
                moves.working_backward,
                (moves.passes_gradient,),
                use=resharding.use,
                uses=(resharding.use,),
                regather=resharding.regather and not moves.in_place,
                checkpoint=self._checkpoint,
            )
        )
        return target

    def _active(self, resharding: Resharding) -> list[PlannedStep]:
        return [step for step in resharding.steps if self._sizes[step.axis] > 1]

    def _moves_for(self, resharding: Resharding, before: Form) -> Moves:
        """What the steps of a resharding do to a tensor; looked at once for those alike."""
        steps = self._active(resharding)
        tensor = self._graph.values[resharding.value]
        chain = [(s.axis, s.source, s.target, s.forward, s.backward) for s in steps]
        key = (before.shape, before.strides, tensor.dtype, *chain)
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = moves_of(before, tensor.dtype.itemsize, steps, self._sizes)
        return moves


class _Call(NamedTuple):
    """What calls of one kind in the same layouts share."""

    outputs: tuple[tuple[Form, int], ...]
    is_view: bool
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    kept_bytes: int
    working: int
    working_backward: int
    passes_gradient: tuple[bool, ...]


def _nbytes(shape: Shape, tensor: Tensor) -> int:
    return prod(shape) * tensor.dtype.itemsize
