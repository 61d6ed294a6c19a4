"""Memory timeline: live bytes of one rank over one step, derived from the plan document.

Time is counted in moments: every memory operation in forward, the turn from forward to backward,
every operation in backward, and the optimizer's step. A checkpoint runs forward again right
before its backward.

| kind        | alive                                                                          |
|-------------|--------------------------------------------------------------------------------|
| parameters, buffers, inputs, optimizer | always                                              |
| gradients   | of parameters: from the last backward that adds to one until the optimizer's   |
|             | step, which frees them                                                         |
| activations | what autograd saves (`autoshard.ops.saved_tensors`), from forward until the    |
|             | backward of the first operator that saves it, without what compiled kernels    |
|             | compute again, and in one byte an element if products save it in float8;       |
|             | outputs of the program, until the end; in inference all that operators make,   |
|             | until its last use                                                             |
| temporaries | all else: outputs until their last use, resharded tensors, full parameters     |
|             | and full gradients, gradients of activations, what backward recomputes         |

A storage counts once, however many views it has. Working memory of reshardings is counted; of
operators, only the tensors of `autoshard.ops.backward_workspace`. The optimizer is assumed to be
fused, without working memory.

A step of several micro-batches is represented by one in the middle, followed by the optimizer: all
sums of gradients, and all parameters that are gathered once per step, are in memory throughout. In
the first and in the last micro-batch, some of them are not; the collectives of both are counted.

A pipeline stage that has several micro-batches in flight runs one of them while the others wait
between forward and backward. Each of those holds the activations that are alive at the turn, and
what it received from the previous stage. They are counted until the optimizer's step: a stage with
K in flight runs the forward of the Kth and the backward of the first while the other K - 1 wait.
With no more than K micro-batches in a step, the first backward has no sums of gradients yet, so the
peak may be overestimated by them. A pipeline's step takes the whole batch, so user inputs are
counted for all micro-batches.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.base.collection import collection_paused
from autoshard.costs import (
    Frequency,
    OptimizerSpec,
    inputs_held,
    most_held,
    parameter_bytes,
)
from autoshard.graph import DType, Graph, InputKind, check_total_bytes
from autoshard.graph.gradients import Gradient, Gradients
from autoshard.lowering.instructions import Lowering, lower
from autoshard.lowering.memory import MemoryOp, StageMemory
from autoshard.lowering.recompute import AS_IN_EAGER, Saving, recomputed_part
from autoshard.plan.stage import Stage, Use

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "inputs",
    "activations",
    "temporaries",
)
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_KIND_OF_INPUT = {
    "parameter": "parameters",
    "buffer": "buffers",
    "constant": "buffers",
    "prepared": "buffers",
    "received": "inputs",
    "user": "inputs",
}


class Phase(StrEnum):
    """Phase of a step."""

    FORWARD = "forward"
    TURN = "turn"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class LifeRole(IntEnum):
    """Role of something in memory towards the operation, or the input, that it is counted for."""

    VALUE = 0
    """A tensor that it makes, or saves inside."""
    GRADIENT = 1
    """The gradient of what it makes."""
    WORKING = 2
    """Memory that it uses while it runs."""


Moment = tuple[Phase, str]
"""The phase of the step, and the name of the node that runs or of the value that is resharded;
the name is empty if there is no operation."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes at each of M moments.

    Attributes:
        memory: the operations of the step.
        moments: the moments in order.
        instructions: number of the lowered instruction of each moment; -1 if there is none.
        nbytes: bytes by kind, each of shape [M].
        lives: everything that is in memory, shape [L, 6]: number of its kind in `KINDS`, first and
            last moment, bytes, number of the operation that it is counted for or -1 - that of the
            input, and `LifeRole`. Micro-batches that wait for their backward are not among it.
        per_micro_batch: activations that a micro-batch keeps between its forward and its backward;
            None in inference.
        unneeded: reshardings with `regather` whose results backward does not need.
        regathered: for each other resharding with `regather`, the moment at which it runs again.
    """

    memory: StageMemory
    moments: tuple[Moment, ...]
    instructions: tuple[int, ...]
    nbytes: Mapping[str, NDArray[np.int64]]
    lives: NDArray[np.int64]
    per_micro_batch: int | None = None
    unneeded: frozenset[Use] = frozenset()
    regathered: Mapping[Use, int] = field(default_factory=dict)

    @property
    def lowering(self) -> Lowering:
        """The instructions of the step."""
        return self.memory.lowering

    @cached_property
    def total(self) -> NDArray[np.int64]:
        """Total bytes of all kinds, shape [M]."""
        total: NDArray[np.int64] = np.add.reduce(list(self.nbytes.values()))
        return total

    @property
    def peak_moment(self) -> int:
        """The first moment with the most live bytes."""
        return int(np.argmax(self.total))

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return int(self.total[self.peak_moment])

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes at the peak by kind."""
        return {kind: int(nbytes[self.peak_moment]) for kind, nbytes in self.nbytes.items()}

    @property
    def turn(self) -> int | None:
        """The moment between forward and backward; None in inference."""
        turn = (i for i, moment in enumerate(self.moments) if moment[0] is Phase.TURN)
        return next(turn, None)

    @property
    def at_turn(self) -> int | None:
        """Bytes between forward and backward; None in inference."""
        return None if self.turn is None else int(self.total[self.turn])

    @property
    def at_optimizer_step(self) -> int | None:
        """Bytes at the optimizer's step; None in inference."""
        return None if self.turn is None else int(self.total[-1])


@collection_paused()
def timeline(
    stage: Stage,
    graph: Graph,
    *,
    training: bool,
    optimizer: OptimizerSpec | None = None,
    saving: Saving = AS_IN_EAGER,
) -> Timeline:
    """Memory of one rank over one step.

    Args:
        stage: a plan's stage.
        graph: the stage's program, `graph_from_json(stage.program)`.
        training: True if there is a backward pass.
        optimizer: the optimizer; None for AdamW.
        saving: how the saved tensors differ from those of eager mode (`Prices.saving`).

    Raises:
        PlanError: the stage is inconsistent or does not fit its program.
        SchemaError: the program has more bytes than can be summed.
    """
    check_total_bytes(graph, most_held(stage.micro_batches, stage.in_flight))
    gradients = Gradients(graph, training=training)
    memory = StageMemory(lower(stage, graph), gradients, saving)
    lifetimes = _Lifetimes(memory, _Schedule(memory, training=training))
    lifetimes.add_inputs(stage, (optimizer or OptimizerSpec()) if training else None)
    if training:
        lifetimes.add_gradients(_entries(memory, graph, gradients), stage)
        lifetimes.add_saved()
    lifetimes.add_forward()
    return lifetimes.timeline(stage.in_flight)


def _entries(memory: StageMemory, graph: Graph, gradients: Gradients) -> list[int]:
    """The output tensors at which backward starts."""
    positions = [i for i, output in enumerate(graph.outputs) if output.name is not None]
    return [
        tensor
        for position, tensor in zip(positions, memory.outputs, strict=True)
        if gradients.of_output(position) is Gradient.FLOWS
    ]


class _Schedule:
    """The moments of a step.

    Args:
        memory: the operations.
        training: True if there is a backward pass.

    Attributes:
        moments: the moments in order.
        instructions: number of the lowered instruction of each moment; -1 if there is none.
        recompute: the moment at which an operation runs again, by its number.
        backward: the moment of each operation's backward; empty in inference.
        turn: the moment between forward and backward; None in inference.
    """

    def __init__(self, memory: StageMemory, *, training: bool) -> None:
        self.turn: int | None = None
        self.recompute: dict[int, int] = {}
        self.backward: list[int] = []
        self._ops = memory.ops
        self.moments = [(Phase.FORWARD, op.name) for op in memory.ops]
        self.instructions = [op.instruction for op in memory.ops]
        if not training:
            # Inputs occupy memory even if there are no operations.
            if not self.moments:
                self._add(Phase.FORWARD)
            return
        self.turn = self._add(Phase.TURN)
        self.backward = [0] * len(self._ops)
        # Backward runs the other way round, but what is recomputed runs in the order of forward,
        # right before the backward of its checkpoint.
        for region in reversed(self._regions()):
            for i in self._recomputed(region):
                self.recompute[i] = self._add(Phase.RECOMPUTE, self._ops[i])
            for i in reversed(region):
                self.backward[i] = self._add(Phase.BACKWARD, self._ops[i])
        self._add(Phase.OPTIMIZER)

    def _add(self, phase: Phase, op: MemoryOp | None = None) -> int:
        self.moments.append((phase, "" if op is None else op.name))
        self.instructions.append(-1 if op is None else op.instruction)
        return len(self.moments) - 1

    def _regions(self) -> list[range]:
        """The ranges of checkpoints, and of single operations outside of checkpoints."""
        regions: list[range] = []
        previous = -1
        for i, op in enumerate(self._ops):
            joins = op.checkpoint == previous >= 0
            regions.append(range(regions.pop().start if joins else i, i + 1))
            previous = op.checkpoint
        return regions

    def _recomputed(self, region: range) -> range:
        if self._ops[region.start].checkpoint < 0:
            return range(0)
        return recomputed_part(region, lambda i: self._ops[i].keeps)[1]


class _Lifetimes:
    """Collects the lifetimes of tensors."""

    def __init__(self, memory: StageMemory, schedule: _Schedule) -> None:
        self._memory = memory
        self._schedule = schedule
        self._end = len(schedule.moments) - 1
        self._lives = array("q")  # rows of `Timeline.lives`, one after the other
        self._nbytes = memory.storage_bytes
        self._saved: dict[int, int] = {}  # last moment of each storage that backward needs
        self._narrow: dict[int, int] = {}  # last moment of each copy in float8 that it needs
        self._regathered: dict[int, tuple[int, int]] = {}  # first and last one of a re-gathered one
        self._copies: dict[int, int] = {}  # last moment of what a checkpoint makes again

    def timeline(self, in_flight: int) -> Timeline:
        """Sum the bytes of all lifetimes, and of the micro-batches that wait."""
        lives = np.frombuffer(self._lives, dtype=np.int64).reshape(-1, 6)
        # A tensor is a change before its first moment and one after its last; sums over time are
        # then linear in tensors plus moments, however long they live.
        changes = np.zeros((len(KINDS), self._end + 2), dtype=np.int64)
        np.add.at(changes, (lives[:, 0], lives[:, 1]), lives[:, 3])
        np.subtract.at(changes, (lives[:, 0], lives[:, 2] + 1), lives[:, 3])
        alive = changes.cumsum(axis=1)[:, :-1]
        kept = None
        if self._schedule.turn is not None:
            activations = alive[_NUMBER["activations"]]
            kept = int(activations[self._schedule.turn])
            # None waits at the optimizer's step, the last moment: all backwards are over.
            activations[:-1] += (in_flight - 1) * kept
        regathered = {use: self._regathered.get(storage) for use, storage in self._regathers()}
        return Timeline(
            self._memory,
            tuple(self._schedule.moments),
            tuple(self._schedule.instructions),
            dict(zip(KINDS, alive, strict=True)),
            lives,
            kept,
            frozenset(use for use, life in regathered.items() if life is None),
            {use: life[0] for use, life in regathered.items() if life is not None},
        )

    def _regathers(self) -> Iterator[tuple[Use, int]]:
        """Uses of the reshardings with `regather`, and the storages of their results.

        Those that only convert parameters again in backward are no choice of the plan.
        """
        stage = self._memory.lowering.stage
        planned = {resharding.use for resharding in stage.reshardings if resharding.regather}
        for op in self._memory.ops:
            if op.regather:
                for use, tensor in zip(op.uses, op.targets, strict=False):
                    if use in planned:
                        yield use, self._memory.storages[tensor]

    def _add(
        self,
        kind: str,
        first: int,
        last: int,
        nbytes: int,
        of: int,
        *,
        role: LifeRole = LifeRole.VALUE,
    ) -> None:
        if nbytes:
            self._lives.extend((_NUMBER[kind], first, last, nbytes, of, role))

    def add_inputs(self, stage: Stage, optimizer: OptimizerSpec | None) -> None:
        """Add the inputs of the stage, and the optimizer's state."""
        for i, (placed, tensor) in enumerate(zip(stage.inputs, self._memory.tensors, strict=False)):
            times = inputs_held(InputKind(placed.kind), stage.micro_batches, stage.in_flight)
            self._add(_KIND_OF_INPUT[placed.kind], 0, self._end, times * tensor.nbytes, ~i)
            if optimizer and placed.kind == "parameter" and tensor.requires_grad:
                nbytes = parameter_bytes(tensor.shape, DType(placed.dtype), optimizer)
                self._add("optimizer", 0, self._end, nbytes.optimizer, ~i)

    def add_forward(self) -> None:
        """Results of operations, until their last use or as long as autograd saves them."""
        ops, made_by, storages = self._memory.ops, self._memory.made_by, self._memory.storages
        last = list(made_by)
        for i, op in enumerate(ops):
            for tensor in op.reads:
                last[storages[tensor]] = i
            self._add("temporaries", i, i, op.working, i, role=LifeRole.WORKING)
        returned = {storages[tensor] for tensor in self._memory.outputs}
        inference = not self._schedule.backward
        for storage, maker in enumerate(made_by):
            if maker < 0:
                continue
            if storage in self._memory.gathered_once:
                self._add("temporaries", 0, self._end - 1, self._nbytes[storage], maker)
                continue
            saved = self._saved.get(storage)
            if storage in self._narrow:
                half = self._nbytes[storage] // 2  # of an element of 16 bits
                self._add("activations", maker, self._narrow[storage], half, maker)
            if storage in returned:
                self._add("activations", maker, self._end, self._nbytes[storage], maker)
            elif saved is not None or (inference and not ops[maker].uses):
                until = max(last[storage], saved or 0)
                self._add("activations", maker, until, self._nbytes[storage], maker)
            else:
                self._add("temporaries", maker, last[storage], self._nbytes[storage], maker)

    def add_saved(self) -> None:
        """Add tensors that autograd saves, and those that are re-gathered or recomputed instead."""
        storages = self._memory.storages
        for i, op in enumerate(self._memory.ops):
            until, again = self._schedule.backward[i], self._schedule.recompute.get(i)
            for storage, in_float8 in self._memory.saved_by(op):
                self._save(storage, until, op.checkpoint, in_float8=in_float8)
            if again is None:
                self._add("activations", i, until, op.saved_bytes, i)
                continue
            for tensor in op.reads:
                self._save(storages[tensor], again, op.checkpoint)
            self._add("temporaries", again, again, op.working, i, role=LifeRole.WORKING)
            self._add("temporaries", again, until, op.saved_bytes, i)
        self._regather_buckets()
        self._add_regathered()
        self._add_recomputed()

    def _save(self, storage: int, until: int, checkpoint: int, *, in_float8: bool = False) -> None:
        """Keep a storage for a reader in backward, or the source from which it is re-gathered."""
        maker = self._memory.made_by[storage]
        if maker < 0:
            return
        made = self._memory.ops[maker]
        if checkpoint >= 0 and made.checkpoint == checkpoint:
            self._copies[storage] = max(self._copies.get(storage, 0), until)
        elif made.regather:
            first, last = self._regathered.get(storage, (until, until))
            self._regathered[storage] = (min(first, until), max(last, until))
            source = self._memory.storages[made.reads[0]]
            self._save(source, until, checkpoint, in_float8=in_float8)
        else:
            kept = self._narrow if in_float8 else self._saved
            kept[storage] = max(kept.get(storage, 0), until)

    def _regather_buckets(self) -> None:
        """The reshardings of a bucket run again when the first of them is needed."""
        for op in self._memory.ops:
            if op.regather:
                storages = {self._memory.storages[tensor] for tensor in op.targets}
                needed = [storage for storage in storages if storage in self._regathered]
                first = min((self._regathered[storage][0] for storage in needed), default=0)
                for storage in needed:
                    self._regathered[storage] = first, self._regathered[storage][1]

    def _add_regathered(self) -> None:
        running: dict[int, int] = {}  # when each resharding runs; those of a bucket run once
        for storage, (first, last) in self._regathered.items():
            maker = self._memory.made_by[storage]
            self._add("temporaries", first, last, self._nbytes[storage], maker)
            running[maker] = first
        for maker, first in running.items():
            working = self._memory.ops[maker].working
            self._add("temporaries", first, first, working, maker, role=LifeRole.WORKING)

    def _add_recomputed(self) -> None:
        """Add the tensors that checkpoints recompute."""
        if not self._schedule.recompute:
            return
        last_reads = {
            self._memory.storages[tensor]: again
            for i, again in self._schedule.recompute.items()
            for tensor in self._memory.ops[i].reads
        }
        for storage, maker in enumerate(self._memory.made_by):
            start = self._schedule.recompute.get(maker)
            if start is not None:
                ends = (start, last_reads.get(storage, 0), self._copies.get(storage, 0))
                self._add("temporaries", start, max(ends), self._nbytes[storage], maker)

    def add_gradients(self, entries: Iterable[int], stage: Stage) -> None:
        """Add gradients of activations, and of parameters from when they are complete.

        With several micro-batches, the sums of gradients of parameters are in memory throughout.
        """
        gradients = _GradientLiveness(self._memory, self._schedule.backward)
        gradients.run(entries)
        for first, last, nbytes, of, role in gradients.lives:
            self._add("temporaries", first, last, nbytes, of, role=LifeRole(role))
        full = self._full_gradients() if stage.micro_batches > 1 else {}
        for tensor, complete in gradients.complete.items():
            reduced = self._memory.tensors[tensor].nbytes
            if stage.inputs[tensor].kind == "received":
                # It is sent to the previous stage when backward ends.
                last = self._end - 1
                self._add(
                    "temporaries", complete + 1, last, reduced, ~tensor, role=LifeRole.GRADIENT
                )
                continue
            if stage.micro_batches == 1:
                self._add("gradients", complete + 1, self._end, reduced, ~tensor)
                continue
            summed = self._sum_bytes(stage, tensor, full.get(tensor))
            self._add("gradients", 0, self._end - 1, summed, ~tensor)
            self._add("gradients", self._end, self._end, reduced, ~tensor)

    def _sum_bytes(self, stage: Stage, tensor: int, full: int | None) -> int:
        """Bytes of the sum of a parameter's gradients over micro-batches.

        Args:
            stage: the stage.
            tensor: the parameter.
            full: bytes of its full value if full gradients are summed; None for their shards.
        """
        graph, name = self._memory.lowering.graph, stage.inputs[tensor].name
        if full is None:
            dtype = summed = graph.stored_dtype(name)
            full = self._memory.tensors[tensor].nbytes
        else:
            dtype, summed = graph.values[name].dtype, graph.reduced_dtype(name)
        if stage.accumulation_dtype is not None:
            summed = DType(stage.accumulation_dtype)
        return full // dtype.itemsize * summed.itemsize

    def _full_gradients(self) -> dict[int, int]:
        """Bytes of the gradients that are summed before they are reduced, by parameter."""
        bucketed: dict[Use, int] = {}  # the parameter of each use in a bucket
        for op in self._memory.ops:
            # A bucket begins with one operation per member, before the one that ends it.
            if len(op.uses) == 1:
                bucketed.setdefault(op.uses[0], op.reads[0])
        return {
            bucketed[use]: self._memory.tensors[tensor].nbytes
            for op in self._memory.ops
            if op.frequency is Frequency.STEP
            for use, tensor in zip(op.uses, op.targets, strict=True)
        }


class _GradientLiveness:
    """Lifetimes of gradients in backward.

    The gradient of a tensor is accumulated in place unless another tensor shares it.

    Args:
        memory: the operations.
        backward: the moment of each operation's backward.

    Attributes:
        lives: of each gradient and its working memory, the first moment, the last one, bytes, and
            what they are counted for, as in `Timeline.lives`.
        complete: for each input with a gradient, the moment when the gradient is complete.
    """

    def __init__(self, memory: StageMemory, backward: list[int]) -> None:
        self.lives: list[list[int]] = []
        self.complete: dict[int, int] = {}
        self._memory = memory
        self._backward = backward
        self._num_inputs = len(memory.lowering.stage.inputs)
        self._of: dict[int, int] = {}  # number of each tensor's gradient
        self._num_tensors: list[int] = []  # how many tensors share each gradient

    def run(self, entries: Iterable[int]) -> None:
        """Start at the gradients of outputs, and follow all operations backward."""
        first, last = min(self._backward, default=0), max(self._backward, default=0)
        for tensor in entries:
            if tensor not in self._of:
                # The caller of backward keeps it until the end.
                self._assign(tensor, self._new(tensor, first, last))
        for i in range(len(self._memory.ops) - 1, -1, -1):
            op = self._memory.ops[i]
            present = [tensor for tensor in op.targets if tensor in self._of]
            if present:
                self._step(i, op, present)

    def _step(self, number: int, op: MemoryOp, present: list[int]) -> None:
        source, moment = self._of[present[0]], self._backward[number]
        for tensor in present:
            self._extend(self._of[tensor], moment)
        if op.working_backward:
            self._allocate(moment, moment, op.working_backward, number, LifeRole.WORKING)
        for tensor, passes in zip(op.reads, op.passes_gradient, strict=True):
            if not self._memory.tensors[tensor].requires_grad:
                continue
            # The gradient of a sum, say, is the same tensor for all summands.
            made = source if passes else self._new(tensor, moment, moment)
            known = self._of.get(tensor)
            if known is None:
                self._assign(tensor, made)
            else:
                self._accumulate(tensor, known, moment)
            if tensor < self._num_inputs:
                self.complete[tensor] = moment
        for tensor in present:
            self._num_tensors[self._of.pop(tensor)] -= 1

    def _accumulate(self, tensor: int, known: int, moment: int) -> None:
        """Add to the gradient of a tensor, in place unless others share it."""
        self._extend(known, moment)
        # As autograd does: it adds in place only to a gradient that nothing else refers to.
        if self._num_tensors[known] > 1:
            self._num_tensors[known] -= 1
            self._assign(tensor, self._new(tensor, moment, moment))

    def _extend(self, gradient: int, moment: int) -> None:
        life = self.lives[gradient]
        life[1] = max(life[1], moment)

    def _new(self, tensor: int, first: int, last: int) -> int:
        storage = self._memory.storages[tensor]
        maker = self._memory.made_by[storage]
        # The first storages are those of the inputs.
        of = ~storage if maker < 0 else maker
        return self._allocate(
            first, last, self._memory.tensors[tensor].nbytes, of, LifeRole.GRADIENT
        )

    def _allocate(self, first: int, last: int, nbytes: int, of: int, role: LifeRole) -> int:
        self.lives.append([first, last, nbytes, of, role])
        self._num_tensors.append(0)
        return len(self.lives) - 1

    def _assign(self, tensor: int, gradient: int) -> None:
        self._of[tensor] = gradient
        self._num_tensors[gradient] += 1
