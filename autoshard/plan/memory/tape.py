"""What a rank runs for a stage, in order, and the memory in which each tensor lies.

Mirrors the runtime: a conversion runs right before its first reader, one that nodes of a
checkpoint share with others before the checkpoint, those of a bucket begin where the bucket does
and end before the first reader of any of them, and steps on axes of one rank are left out.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from autoshard.graph import Graph, Tensor
from autoshard.layouts import Action, Layout, S, parse_type
from autoshard.plan.buckets import buckets_of
from autoshard.plan.document import Checkpoint, Conversion, PlannedStep, Stage, Use
from autoshard.plan.gradients import Gradients
from autoshard.plan.memory.recompute import Keeps
from autoshard.rules import (
    Strides,
    backward_working,
    call_of,
    made_strides,
    passes_gradient,
    rule_for,
    saved_by,
    view_strides,
)
from autoshard.rules.halo import NO_BORDERS

Shape = tuple[int, ...]


class Form(NamedTuple):
    """How a tensor looks on one rank.

    Attributes:
        nbytes: bytes of its elements.
        gradient: whether it needs one.
        shape: local shape.
        strides: in elements; None where contiguous.
    """

    nbytes: int
    gradient: bool
    shape: Shape
    strides: Strides


class Instruction(NamedTuple):
    """One thing that a rank does: an operator, or a conversion.

    Attributes:
        name: of the node, or of the value that is converted.
        reads: slots that it takes.
        targets: slots that it makes.
        kept: the slots among them that autograd keeps.
        kept_bytes: what autograd keeps beside them.
        working: bytes beside what it reads and makes while it runs forward.
        working_backward: bytes beside gradients while its backward runs.
        passes_gradient: for each read whether its gradient is that of the target.
        use: what a conversion is for; None of an operator, and of the end of a bucket.
        uses: what it makes its first targets for, if it is a conversion.
        again: whether backward converts once more.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
        bucket: number of the bucket whose collectives it shares; -1 for none.
    """

    name: str
    reads: tuple[int, ...]
    targets: tuple[int, ...]
    kept: tuple[int, ...]
    kept_bytes: int
    working: int
    working_backward: int
    passes_gradient: tuple[bool, ...]
    use: Use | None = None
    uses: tuple[Use, ...] = ()
    again: bool = False
    checkpoint: int = -1
    bucket: int = -1

    @property
    def is_conversion(self) -> bool:
        """Whether it is one."""
        return bool(self.uses)

    @property
    def keeps(self) -> Keeps:
        """What autograd keeps of it."""
        if self.kept_bytes or not set(self.kept).isdisjoint(self.targets):
            return Keeps.MADE
        return Keeps.READ if self.kept else Keeps.NOTHING


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
        self.forms: list[Form] = []
        self.storages: list[int] = []
        self.instructions: list[Instruction] = []
        self.made_by: list[int] = []
        self._graph = graph
        self._kinds = graph.kinds
        self._gradients = gradients
        self._sizes = dict(stage.axes)
        self._forms: dict[Form, int] = {}
        self._numbers: list[int] = []  # of each slot's form
        self._calls: dict[object, _Call] = {}
        self._moves: dict[object, _Moves] = {}
        self._conversions = {c.use: c for c in stage.conversions}
        self._converted = {conversion.value for conversion in stage.conversions}
        self._current: dict[str, int] = {}
        self._checkpoint = -1
        self._buckets = buckets_of(stage, graph)
        self._under_way: dict[int, list[_UnderWay]] = {}
        self._bucket_of: dict[Use, int] = {}
        self._ended: dict[Use, int] = {}  # slot of what has come out of a bucket
        for placed in stage.inputs:
            nbytes = prod(placed.local_shape) * graph.values[placed.name].dtype.itemsize
            form = Form(nbytes, gradients.exists(placed.name), placed.local_shape, None)
            self._current[placed.name] = self._new_slot(
                self._new_storage(-1), form, self._number(form)
            )
        self.num_inputs = len(self.forms)
        self._add_nodes(stage)
        self._begin_buckets(len(graph.nodes))
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
            if self._checkpoint < 0:
                self._begin_buckets(i)
            number = starts.get(node.name)
            if number is not None:
                self._share_what_enters(i, stage.checkpoints[number])
                self._checkpoint = number
            self._add_node(i, layouts[node.name])
            if node.name in ends:
                self._checkpoint = -1

    def _begin_buckets(self, number: int) -> None:
        """Start the collectives of the buckets that begin before a node."""
        for order, bucket in enumerate(self._buckets):
            if bucket.begins <= number and order not in self._under_way:
                self._under_way[order] = [self._begin(c, order) for c in bucket.conversions]
                self._bucket_of.update(dict.fromkeys(bucket.uses, order))

    def _begin(self, conversion: Conversion, bucket: int) -> "_UnderWay":
        """Two slots: what is in flight, if anything is, and through which the gradient comes."""
        source = self._current[conversion.value]
        before = self.forms[source]
        moves = self._moves_for(conversion, before)
        several = len(self._buckets[bucket].conversions) > 1
        is_view = moves.is_view and not several
        form = Form(moves.nbytes, before.gradient, moves.shape, None)
        moved = None
        if not moves.in_place:
            sent = before.nbytes if several else 0
            flat = Form(moves.nbytes + sent, False, moves.shape, None)
            storage = self._new_storage(len(self.instructions))
            moved = self._new_slot(storage, flat, self._number(flat))
        way = Form(moves.in_flight_backward, before.gradient, before.shape, None)
        gradient = self._new_slot(self.storages[source], way, self._number(way))
        self.instructions.append(
            Instruction(
                conversion.value,
                (source,),
                (gradient,) if moved is None else (moved, gradient),
                (),
                0,
                0,
                0,
                (moves.reduces_once,),
                use=conversion.use,
                uses=(conversion.use,),
                again=conversion.again and is_view,
                bucket=bucket,
            )
        )
        return _UnderWay(conversion, moved, gradient, form, moves, is_view)

    def _end(self, bucket: int) -> None:
        """Wait for a bucket, and take it apart."""
        members = self._under_way[bucket]
        several = len(members) > 1
        working = backward = 0
        targets = []
        for way in members:
            if way.moved is None:
                storage = self.storages[way.gradient]
            elif way.is_view:
                storage = self.storages[way.moved]
            else:
                storage = self._new_storage(len(self.instructions))
            targets.append(self._new_slot(storage, way.form, self._number(way.form)))
            self._ended[way.conversion.use] = targets[-1]
            rest = len(way.conversion.steps) > 1
            working = max(working, way.moves.working if rest else 0)
            # Gradients are laid out rank by rank, or behind one another.
            laid_out = several and way.moved is not None
            backward += way.moves.nbytes if laid_out else way.moves.working_backward
        moved = tuple(way.moved for way in members if way.moved is not None)
        self.instructions.append(
            Instruction(
                members[0].conversion.value,
                (*(way.gradient for way in members), *moved),
                tuple(targets),
                (),
                0,
                working,
                backward,
                (False,) * (len(members) + len(moved)),
                uses=tuple(way.conversion.use for way in members),
                again=members[0].conversion.again and not members[0].is_view and bool(moved),
                bucket=bucket,
            )
        )

    def _share_what_enters(self, start: int, checkpoint: Checkpoint) -> None:
        for node in self._graph.nodes[start:]:
            for value in node.inputs:
                if value in self._current:
                    self._share(value)
            if node.name == checkpoint.last:
                return

    def _add_node(self, number: int, layouts: tuple[str, ...]) -> None:
        node = self._graph.nodes[number]
        reads = tuple(
            [self._read(value, node.name, position) for position, value in enumerate(node.inputs)]
        )
        flows = self._gradients.flows(node)
        key = (self._kinds[number], layouts, flows, *[self._numbers[slot] for slot in reads])
        call = self._calls.get(key)
        if call is None:
            inputs = [self.forms[slot] for slot in reads]
            call = self._calls[key] = self._call(number, layouts, inputs, flows=flows)
        maker = len(self.instructions)
        targets = tuple(
            [
                self._new_slot(
                    self.storages[reads[0]] if call.is_view else self._new_storage(maker),
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
            tuple((form, self._number(form)) for form in forms),
            seen is not None,
            tuple(sorted(saved.inputs)) if flows else (),
            tuple(sorted(saved.outputs)) if flows else (),
            extra_bytes if flows else 0,
            borders.extended + (0 if flows else extra_bytes),
            backward + borders.working_backward if flows else 0,
            tuple(passes_gradient(call, i) for i in range(len(inputs))),
        )

    def _read(self, value: str, consumer: str, position: int) -> int:
        """The slot from which a use of a value reads, converted as the plan says."""
        if value not in self._converted:
            return self._current[value]
        self._share(value)
        own = self._conversions.get((value, consumer, position))
        return self._current[value] if own is None else self._convert(own)

    def _share(self, value: str) -> None:
        shared = self._conversions.pop((value, None, 0), None)
        if shared is not None:
            self._current[value] = self._convert(shared)

    def _convert(self, conversion: Conversion) -> int:
        bucket = self._bucket_of.get(conversion.use)
        if bucket is not None:
            if conversion.use not in self._ended:
                self._end(bucket)
            return self._ended[conversion.use]
        source = self._current[conversion.value]
        if not self._active(conversion):
            return source
        before = self.forms[source]
        moves = self._moves_for(conversion, before)
        storage = (
            self.storages[source] if moves.in_place else self._new_storage(len(self.instructions))
        )
        form = Form(moves.nbytes, before.gradient, moves.shape, None)
        target = self._new_slot(storage, form, self._number(form))
        self.instructions.append(
            Instruction(
                conversion.value,
                (source,),
                (target,),
                (),
                0,
                moves.working,
                moves.working_backward,
                (moves.passes_gradient,),
                use=conversion.use,
                uses=(conversion.use,),
                again=conversion.again and not moves.in_place,
                checkpoint=self._checkpoint,
            )
        )
        return target

    def _active(self, conversion: Conversion) -> list[PlannedStep]:
        return [step for step in conversion.steps if self._sizes[step.axis] > 1]

    def _moves_for(self, conversion: Conversion, before: Form) -> "_Moves":
        """What the steps of a conversion do to a tensor; looked at once for those alike."""
        steps = self._active(conversion)
        tensor = self._graph.values[conversion.value]
        chain = [(s.axis, s.source, s.target, s.forward, s.backward) for s in steps]
        key = (before.shape, before.strides, tensor.dtype, *chain)
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = self._moves_of(before, tensor.dtype.itemsize, steps)
        return moves

    def _moves_of(self, before: Form, itemsize: int, steps: Sequence[PlannedStep]) -> "_Moves":
        shape = list(before.shape)
        sizes = [before.nbytes]
        for step in steps:
            source, target = parse_type(step.source), parse_type(step.target)
            if source.is_shard:
                shape[source.dim] *= self._sizes[step.axis]
            if target.is_shard:
                shape[target.dim] //= self._sizes[step.axis]
            sizes.append(prod(shape) * itemsize)
        forward = [
            step_working(step.forward, step.source, step.target, *sizes[i : i + 2])
            for i, step in enumerate(steps)
        ]
        backward = [
            step_working(step.backward, step.target, step.source, sizes[i + 1], sizes[i])
            for i, step in enumerate(steps)
        ]
        between = [0, *sizes[1:-1], 0]
        still = all(step.forward == Action.NOTHING for step in steps)
        in_place = before.strides is None and still
        # Steps take contiguous memory, so what is strided is copied first.
        copied = before.nbytes if before.strides is not None and not still else 0
        forward[0] += copied
        around = [between[i] + between[i + 1] for i in range(len(steps))]
        return _Moves(
            tuple(shape),
            sizes[-1],
            in_place,
            max(map(sum, zip(forward, around, strict=True))),
            max(map(sum, zip(backward, around, strict=True))),
            all(step.backward == Action.NOTHING for step in steps),
            sizes[-2],
            len(steps) == 1,
            len(steps) == 1 and parse_type(steps[0].source) == S(0),
        )

    def _new_slot(self, storage: int, form: Form, number: int) -> int:
        self.forms.append(form)
        self.storages.append(storage)
        self._numbers.append(number)
        return len(self.forms) - 1

    def _number(self, form: Form) -> int:
        return self._forms.setdefault(form, len(self._forms))

    def _new_storage(self, maker: int) -> int:
        self.made_by.append(maker)
        return len(self.made_by) - 1


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


class _Moves(NamedTuple):
    """What equal conversions of equal tensors share."""

    shape: Shape
    nbytes: int
    in_place: bool
    working: int
    working_backward: int
    passes_gradient: bool
    in_flight_backward: int  # bytes of what the first reduction of backward makes
    reduces_once: bool
    is_view: bool  # whether what arrives from all ranks is the tensor as it is


class _UnderWay(NamedTuple):
    """A conversion of a bucket that has begun.

    Attributes:
        conversion: which one.
        moved: slot of what is in flight; None where nothing moves forward.
        gradient: slot through which the gradient comes.
        form: of what comes out.
        moves: what the steps do.
        is_view: whether what comes out lies in the memory of what is in flight.
    """

    conversion: Conversion
    moved: int | None
    gradient: int
    form: Form
    moves: _Moves
    is_view: bool


def _nbytes(shape: Shape, tensor: Tensor) -> int:
    return prod(shape) * tensor.dtype.itemsize


def step_working(action: str, source: str, target: str, before: int, after: int) -> int:
    """Bytes that a step takes beside what it reads and makes.

    Collectives gather and scatter along the first dim, so along others a copy is laid out
    anew; an all-to-all receives slices and joins them. Slices of chunks are put in order.
    """
    old, new = parse_type(source), parse_type(target)
    if action == Action.NOTHING:
        return 0
    ordered = (after if old.chunks else 0) + (before if new.chunks else 0)
    if action == Action.ALL_GATHER:
        return ordered + (after if old.dim else 0)
    if action == Action.REDUCE_SCATTER:
        return ordered + (before if new.dim else 0)
    if action == Action.ALL_TO_ALL:
        return ordered + after + (before if new.dim else 0)
    return ordered
