"""Memory of each instruction of a lowered stage on one rank.

Tensors are those of the lowering, with local shapes and strides. Views share the storage of their
base. Sizes that depend on data are estimated by their mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.graph import DType, Graph, Tensor
from autoshard.graph.gradients import Gradients
from autoshard.layouts import Action, S, parse_type
from autoshard.lowering.instructions import (
    BeginBucket,
    Cast,
    EndBucket,
    LocalCall,
    Lowering,
    Shape,
    UnbucketedReshard,
)
from autoshard.lowering.recompute import AS_IN_EAGER, Keeps, Saving
from autoshard.ops import (
    Strides,
    call_of,
    made_strides,
    passes_gradient,
    rule_for,
    saved_tensors,
    view_strides,
)
from autoshard.ops.rules.collectives import NO_HALO_BYTES
from autoshard.plan.stage import PlannedStep, Use


class LocalTensor(NamedTuple):
    """A tensor on one rank.

    Attributes:
        nbytes: bytes of its elements.
        requires_grad: True if it requires a gradient.
        shape: local shape.
        strides: strides in elements; None if contiguous.
    """

    nbytes: int
    requires_grad: bool
    shape: Shape
    strides: Strides


class MemoryOp(NamedTuple):
    """Memory of an operator, a resharding, or the beginning (per member) or end of a bucket.

    Attributes:
        name: name of the node, or of the resharded value.
        instruction: number of the lowered instruction.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
        reads: its input tensors.
        targets: its output tensors.
        passes_gradient: for each input, True if it shares the gradient tensor of the output.
        saved: the inputs and outputs that autograd saves.
        saved_bytes: bytes of internal tensors that autograd saves.
        working: bytes of working memory in forward, without inputs and outputs.
        working_backward: bytes of working memory in backward, without gradients.
        uses: the uses for which its first outputs are resharded; empty for an operator.
        regather: True if backward reshards the outputs again instead of keeping them.
        frequency: how often it runs in a training step of several micro-batches.
        keeps: the kind of tensors that autograd saves in eager mode, which decides what a
            checkpoint runs again.
    """

    name: str
    instruction: int
    checkpoint: int
    reads: tuple[int, ...]
    targets: tuple[int, ...]
    passes_gradient: tuple[bool, ...]
    saved: tuple[int, ...] = ()
    saved_bytes: int = 0
    working: int = 0
    working_backward: int = 0
    uses: tuple[Use, ...] = ()
    regather: bool = False
    frequency: Frequency = Frequency.MICRO_BATCH
    keeps: Keeps = Keeps.NOTHING


class ReshardingMemory(NamedTuple):
    """Memory of the steps of a resharding on one rank.

    Attributes:
        result: the resharded tensor.
        in_place: True if the result shares the storage of the source.
        working: bytes of working memory in forward, without source and result.
        working_backward: bytes of working memory in backward, without gradients.
        passes_gradient: True if source and result share their gradient tensor.
        pending_backward: bytes of the output of the first reduction in backward.
        gradient_nbytes: bytes of the gradient of the result, as it is reduced.
        has_one_step: True if there is one step.
        arrives_in_order: True if the output of the collective needs no reordering.
        converts: True if the source is a parameter that is converted first.
        converts_gradient: True if the gradient is converted after its reduction.
    """

    result: LocalTensor
    in_place: bool
    working: int
    working_backward: int
    passes_gradient: bool
    pending_backward: int
    gradient_nbytes: int
    has_one_step: bool
    arrives_in_order: bool
    converts: bool = False
    converts_gradient: bool = False

    @classmethod
    def of(
        cls,
        before: LocalTensor,
        itemsize: int,
        steps: Sequence[PlannedStep],
        axis_sizes: Mapping[str, int],
    ) -> "ReshardingMemory":
        """Memory of the steps of a resharding.

        Args:
            before: the source.
            itemsize: bytes of an element.
            steps: one or more steps on axes of several ranks.
            axis_sizes: size of each axis by name.
        """
        shape = list(before.shape)
        sizes = [before.nbytes]
        for step in steps:
            source, target = parse_type(step.source), parse_type(step.target)
            num_ranks = step.num_ranks(axis_sizes)
            if source.is_shard:
                shape[source.dim] *= num_ranks
            if target.is_shard:
                shape[target.dim] //= num_ranks
            sizes.append(prod(shape) * itemsize)
        forward, backward = [], []
        for step, old, new in zip(steps, sizes, sizes[1:], strict=False):
            forward.append(step_working(step.forward, step.source, step.target, old, new))
            backward.append(step_working(step.backward, step.target, step.source, new, old))
        moves = any(step.forward != Action.NOTHING for step in steps)
        if before.strides is not None and moves:
            # Collectives need contiguous memory, so a strided tensor is copied first.
            forward[0] += before.nbytes
        # A step has its input and its output in memory. Those between two steps are working memory;
        # source and result are counted as tensors.
        between = [0, *sizes[1:-1], 0]
        around = [between[i] + between[i + 1] for i in range(len(steps))]
        return cls(
            LocalTensor(sizes[-1], before.requires_grad, tuple(shape), None),
            before.strides is None and not moves,
            max(map(sum, zip(forward, around, strict=True))),
            max(map(sum, zip(backward, around, strict=True))),
            all(step.backward == Action.NOTHING for step in steps),
            sizes[-2],
            sizes[-1],
            len(steps) == 1,
            len(steps) == 1 and parse_type(steps[0].source) == S(0),
        )

    def converted(
        self, source: LocalTensor, stored: DType, read: DType, reduced: DType
    ) -> "ReshardingMemory":
        """The memory where element types are converted.

        Args:
            source: the tensor before the steps, in the element type of the result.
            stored: element type of the source at rest.
            read: element type of the result.
            reduced: element type in which gradients are reduced.
        """
        if stored is read is reduced:
            return self
        copied = 0 if stored is read or self.in_place else source.nbytes
        backward, pending, gradient = (
            nbytes // read.itemsize * reduced.itemsize
            for nbytes in (self.working_backward, self.pending_backward, self.gradient_nbytes)
        )
        return self._replace(
            working=self.working + copied,
            working_backward=backward + (0 if read is reduced else gradient),
            pending_backward=pending,
            gradient_nbytes=gradient,
            passes_gradient=self.passes_gradient and stored is read,
            converts=stored is not read,
            converts_gradient=stored is not reduced,
        )


def step_working(action: str, source: str, target: str, before: int, after: int) -> int:
    """Bytes of working memory of a step, without its input and output.

    Collectives gather and scatter along dim 0, so other dims need a transposed copy; an all-to-all
    receives slices and joins them. Interleaved sub-shards are reordered.
    """
    old, new = parse_type(source), parse_type(target)
    if action == Action.NOTHING:
        return 0
    ordered = (after if old.sub_shards else 0) + (before if new.sub_shards else 0)
    if action == Action.ALL_GATHER:
        return ordered + (after if old.dim else 0)
    if action == Action.REDUCE_SCATTER:
        return ordered + (before if new.dim else 0)
    if action == Action.ALL_TO_ALL:
        return ordered + after + (before if new.dim else 0)
    return ordered


class _CallMemory(NamedTuple):
    """Memory of all calls of one kind with the same layouts."""

    outputs: tuple[LocalTensor, ...]
    is_view: bool
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    saved_bytes: int
    working: int
    working_backward: int
    passes_gradient: tuple[bool, ...]
    keeps: Keeps


class _Pending(NamedTuple):
    """A resharding of a bucket that has begun.

    Attributes:
        moved: output tensor of the collective in forward; None if forward runs no collective.
        gradient: tensor that represents the pending reduction of the gradient.
        memory: memory of the steps.
        is_view: True if the result is a view of `moved`.
    """

    moved: int | None
    gradient: int
    memory: ReshardingMemory
    is_view: bool


class StageMemory:
    """The tensors and the memory operations of a lowered stage.

    Args:
        lowering: the lowered stage.
        gradients: gradient flow of its program.
        saving: how the saved tensors differ from those of eager mode.

    Attributes:
        tensors: every tensor on one rank; the stage's inputs come first.
        storages: number of the storage of each tensor; views share it.
        made_by: number of the operation that allocates each storage; -1 for inputs.
        ops: the operations in execution order.
        outputs: tensors that are outputs of the program.
    """

    def __init__(
        self,
        lowering: Lowering,
        gradients: Gradients,
        saving: Saving = AS_IN_EAGER,
    ) -> None:
        self.lowering = lowering
        self.tensors: list[LocalTensor] = []
        self.storages: list[int] = []
        self.made_by: list[int] = []
        self.ops: list[MemoryOp] = []
        self._graph: Graph = lowering.graph
        self._gradients = gradients
        self._saving = saving
        self._unsaved: set[int] = set()  # storages
        self._sizes = dict(lowering.stage.axes)
        self._interned: dict[LocalTensor, LocalTensor] = {}
        self._calls: dict[object, _CallMemory] = {}
        self._reshardings: dict[object, ReshardingMemory] = {}
        self._pending: dict[int, list[_Pending]] = {}  # by slot of the bucket
        self._of_slot: dict[int, int] = {}
        for slot, placed in enumerate(lowering.stage.inputs):
            nbytes = prod(placed.local_shape) * self._graph.stored_dtype(placed.name).itemsize
            tensor = LocalTensor(nbytes, gradients.exists(placed.name), placed.local_shape, None)
            self._of_slot[slot] = self._add(self._intern(tensor), self._new_storage(-1))
        for number, instruction in enumerate(lowering.instructions):
            match instruction:
                case LocalCall():
                    self._call(instruction, number)
                case UnbucketedReshard():
                    self._reshard(instruction, number)
                case BeginBucket():
                    self._begin(instruction, number)
                case EndBucket():
                    self._end(instruction, number)
                case Cast():
                    self._cast(instruction, number)
        self.outputs = tuple(self._of_slot[slot] for slot in lowering.outputs if slot is not None)

    @cached_property
    def storage_bytes(self) -> list[int]:
        """Bytes of each storage: those of its first tensor."""
        nbytes = [0] * len(self.made_by)
        for storage, tensor in zip(reversed(self.storages), reversed(self.tensors), strict=True):
            nbytes[storage] = tensor.nbytes
        return nbytes

    @cached_property
    def gathered_once(self) -> frozenset[int]:
        """The storages of what is gathered once per step of several micro-batches."""
        once = (op for op in self.ops if op.frequency in GATHERED_ONCE)
        return frozenset(self.storages[tensor] for op in once for tensor in op.targets)

    def saved_by(self, op: MemoryOp) -> Iterator[tuple[int, bool]]:
        """The storages that are saved for an operation, and True if they are saved in float8."""
        positions = () if op.uses else self._saving.in_float8.get(op.name, ())
        in_float8 = {op.reads[position] for position in positions}
        for tensor in op.saved:
            if self.storages[tensor] not in self._unsaved:
                yield self.storages[tensor], tensor in in_float8

    def _add(self, tensor: LocalTensor, storage: int) -> int:
        self.tensors.append(tensor)
        self.storages.append(storage)
        return len(self.tensors) - 1

    def _intern(self, tensor: LocalTensor) -> LocalTensor:
        """Return one object for equal tensors, so that they can be compared by identity."""
        return self._interned.setdefault(tensor, tensor)

    def _new_storage(self, maker: int | None = None) -> int:
        """Add a storage that the given operation allocates; by default the next operation."""
        self.made_by.append(len(self.ops) if maker is None else maker)
        return len(self.made_by) - 1

    def _call(self, instruction: LocalCall, number: int) -> None:
        node = self._graph.nodes[instruction.number]
        reads = tuple([self._of_slot[slot] for slot in instruction.reads])
        flows = self._gradients.flows(node)
        kind, layouts = self._graph.kinds[instruction.number], instruction.placed.outputs
        saving = self._saving.cache_key(node)
        key = (kind, layouts, flows, saving, *[id(self.tensors[tensor]) for tensor in reads])
        call = self._calls.get(key)
        if call is None:
            inputs = [self.tensors[tensor] for tensor in reads]
            call = self._calls[key] = self._call_memory(instruction, inputs, flows=flows)
        targets = tuple(
            [
                self._add(t, self.storages[reads[0]] if call.is_view else self._new_storage())
                for t in call.outputs
            ]
        )
        self._of_slot.update(zip(instruction.targets, targets, strict=True))
        again = self._saving.computed_again
        if not again.isdisjoint(node.outputs):
            made = zip(node.outputs, targets, strict=True)
            self._unsaved.update(self.storages[tensor] for value, tensor in made if value in again)
        saved = [reads[i] for i in call.saved_inputs] + [targets[i] for i in call.saved_outputs]
        self.ops.append(
            MemoryOp(
                node.name,
                number,
                instruction.checkpoint,
                reads,
                targets,
                call.passes_gradient,
                tuple(saved),
                call.saved_bytes,
                call.working,
                call.working_backward,
                keeps=call.keeps,
            )
        )

    def _call_memory(
        self, instruction: LocalCall, inputs: Sequence[LocalTensor], *, flows: bool
    ) -> _CallMemory:
        node = self._graph.nodes[instruction.number]
        call, shapes = call_of(self._graph, node), instruction.shapes
        views = view_strides(call, inputs[0].shape, inputs[0].strides, shapes) if inputs else None
        strides = views or [
            made_strides(call, [i.shape for i in inputs], [i.strides for i in inputs], shape)
            for shape in shapes
        ]
        # Without backward, internal tensors that would be saved are allocated and freed.
        needed = [tensor.requires_grad or not flows for tensor in inputs]
        saving = self._saving
        in_eager = saved_tensors(call, saving.needs_saved(node, needed))
        saved = saving.saved(node, call, needed)
        local = [*(tensor.shape for tensor in inputs), *shapes]
        halo = rule_for(call).halo
        borders = halo.nbytes(call.inputs[0].shape, local[0]) if halo.edges else NO_HALO_BYTES
        saved_bytes = sum(extra.nbytes(local) for extra in saved.extras) + borders.saved
        backward = sum(extra.nbytes(local) for extra in saving.workspace(node, call, needed))
        outputs = [
            LocalTensor(
                0 if value in saving.unwritten else _nbytes(shape, tensor),
                self._gradients.exists(value),
                shape,
                stride,
            )
            for value, tensor, shape, stride in zip(
                node.outputs, call.outputs, shapes, strides, strict=True
            )
        ]
        keeps = Keeps.MADE if borders.saved else Keeps.of(in_eager)
        return _CallMemory(
            tuple(self._intern(tensor) for tensor in outputs),
            views is not None,
            tuple(sorted(saved.inputs)) if flows else (),
            tuple(sorted(saved.outputs)) if flows else (),
            saved_bytes if flows else 0,
            borders.extended + (0 if flows else saved_bytes),
            backward + borders.backward_workspace if flows else 0,
            tuple(passes_gradient(call, i) for i in range(len(inputs))),
            keeps if flows else Keeps.NOTHING,
        )

    def _cast(self, instruction: Cast, number: int) -> None:
        (slot,), value = instruction.reads, instruction.value
        source = self._of_slot[slot]
        target = self._add(self._as_read(value, source), self._new_storage())
        self._of_slot[instruction.targets[0]] = target
        self.ops.append(
            MemoryOp(
                value,
                number,
                instruction.checkpoint,
                (source,),
                (target,),
                passes_gradient=(False,),
                regather=True,
            )
        )

    def _as_read(self, value: str, source: int) -> LocalTensor:
        """A tensor in the element type in which operators read the value."""
        tensor = self.tensors[source]
        if value not in self._graph.converted or source >= len(self.lowering.stage.inputs):
            return tensor
        nbytes = _nbytes(tensor.shape, self._graph.values[value])
        return self._intern(tensor._replace(nbytes=nbytes))

    def _reshard(self, instruction: UnbucketedReshard, number: int) -> None:
        (source,) = (self._of_slot[slot] for slot in instruction.reads)
        resharding = instruction.resharding
        memory = self._resharding_memory(resharding.value, instruction.steps, source)
        is_copy = memory.converts or not memory.in_place
        storage = self._new_storage() if is_copy else self.storages[source]
        target = self._add(memory.result, storage)
        self._of_slot[instruction.targets[0]] = target
        self.ops.append(
            MemoryOp(
                resharding.value,
                number,
                instruction.checkpoint,
                (source,),
                (target,),
                passes_gradient=(memory.passes_gradient,),
                working=memory.working,
                working_backward=memory.working_backward,
                uses=(resharding.use,),
                regather=is_copy and (resharding.regather or _converts_again(instruction, memory)),
            )
        )

    def _begin(self, instruction: BeginBucket, number: int) -> None:
        """Add one operation for each member of a bucket that begins."""
        several = len(instruction.reads) > 1
        members = self._pending[instruction.targets[0]] = []
        for slot, resharding in zip(instruction.reads, instruction.bucket.reshardings, strict=True):
            source = self._of_slot[slot]
            before = self._as_read(resharding.value, source)
            memory = self._resharding_memory(resharding.value, resharding.steps, source)
            # What ranks send of several tensors lies rank by rank in the result, so each is copied
            # out of it; a single one is there as it is.
            is_view = memory.arrives_in_order and not several
            moved = None
            if not memory.in_place:
                # Several tensors are copied into one buffer, which is sent.
                nbytes = memory.result.nbytes + (before.nbytes if several else 0)
                flat = LocalTensor(nbytes, False, memory.result.shape, None)
                moved = self._add(flat, self._new_storage())
            reduced = LocalTensor(memory.pending_backward, before.requires_grad, before.shape, None)
            gradient = self._add(reduced, self.storages[source])
            members.append(_Pending(moved, gradient, memory, is_view))
            self.ops.append(
                MemoryOp(
                    resharding.value,
                    number,
                    instruction.checkpoint,
                    (source,),
                    (gradient,) if moved is None else (moved, gradient),
                    passes_gradient=(memory.has_one_step and not memory.converts_gradient,),
                    working=before.nbytes if memory.converts and moved is not None else 0,
                    uses=(resharding.use,),
                    regather=resharding.regather and is_view,
                )
            )

    def _end(self, instruction: EndBucket, number: int) -> None:
        members = self._pending.pop(instruction.reads[0])
        bucket = instruction.bucket
        several = len(members) > 1
        working = backward = 0
        targets = []
        for member in members:
            memory = member.memory
            if member.moved is None:
                storage = self.storages[member.gradient]
                if memory.converts:
                    storage = self._new_storage()
            else:
                storage = self.storages[member.moved] if member.is_view else self._new_storage()
            targets.append(self._add(memory.result, storage))
            working = max(working, 0 if memory.has_one_step else memory.working)
            # Gradients are copied into one buffer, rank by rank.
            laid_out = several and member.moved is not None
            # They may be converted before that.
            copies = 2 if memory.gradient_nbytes != memory.result.nbytes else 1
            nbytes = memory.gradient_nbytes * copies
            backward += nbytes if laid_out else memory.working_backward
        self._of_slot.update(zip(instruction.targets, targets, strict=True))
        moved = [member.moved for member in members if member.moved is not None]
        reads = (*(member.gradient for member in members), *moved)
        self.ops.append(
            MemoryOp(
                bucket.reshardings[0].value,
                number,
                instruction.checkpoint,
                reads,
                tuple(targets),
                passes_gradient=(False,) * len(reads),
                working=working,
                working_backward=backward,
                uses=bucket.uses,
                regather=(bucket.regather and not members[0].is_view and bool(moved))
                or (members[0].memory.converts and not moved),
                frequency=bucket.frequency,
            )
        )

    def _resharding_memory(
        self, value: str, steps: Sequence[PlannedStep], source: int
    ) -> ReshardingMemory:
        before, dtype = self._as_read(value, source), self._graph.values[value].dtype
        is_stored = source < len(self.lowering.stage.inputs)
        stored = self._graph.stored_dtype(value) if is_stored else dtype
        dtypes = stored, dtype, self._graph.reduced_dtype(value)
        chain = [(s.axis, s.source, s.target, s.forward, s.backward) for s in steps]
        key = (id(before), *dtypes, *chain)
        if key not in self._reshardings:
            found = ReshardingMemory.of(before, dtype.itemsize, steps, self._sizes)
            found = found.converted(before, *dtypes)
            self._reshardings[key] = found._replace(result=self._intern(found.result))
        return self._reshardings[key]


def _converts_again(instruction: UnbucketedReshard, memory: ReshardingMemory) -> bool:
    """True if backward converts a parameter again, since forward only converts it."""
    return memory.converts and memory.in_place and instruction.checkpoint < 0


def _nbytes(shape: Shape, tensor: Tensor) -> int:
    return prod(shape) * tensor.dtype.itemsize
