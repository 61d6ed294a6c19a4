"""Memory of one rank over one step of a stage, from the plan document alone.

Time is counted in moments: every operator and every resharding forward, the turn, the same
backward, and the optimizer's step. A checkpoint runs forward once more before its own backward.

| kind        | alive                                                                          |
|-------------|--------------------------------------------------------------------------------|
| parameters, buffers, inputs, optimizer | always                                              |
| gradients   | of parameters: from the last backward that adds to one until the optimizer's   |
|             | step, which frees them                                                         |
| activations | what autograd keeps (`autoshard.ops.saved_by`), from forward until the       |
|             | backward of the first operator that keeps it; what the program returns, until  |
|             | the end; in inference all that operators make, until its last use              |
| temporaries | all else: outputs until their last use, resharded tensors, whole parameters    |
|             | and whole gradients, gradients of activations, what backward makes once more   |

Views count as the memory that they look at, once. Working memory of reshardings is counted,
of operators only what `autoshard.ops.backward_working` names. The optimizer is taken to be a
fused one, which needs none.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.collection import collection_paused
from autoshard.costs import OptimizerSpec, parameter_bytes
from autoshard.graph import DType, Graph
from autoshard.plan.document import Stage, Use
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.memory.flow import Flow
from autoshard.plan.memory.schedule import Moment, Phase, Schedule
from autoshard.plan.memory.tape import Tape

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "inputs",
    "activations",
    "temporaries",
)


@dataclass(frozen=True)
class Timeline:
    """Bytes that are alive at each of M moments.

    Attributes:
        moments: what happens, in order.
        nbytes: bytes by kind, each of shape [M].
        idle: reshardings that are `regather` though backward needs nothing that they make, so
            that none of them would run.
        regathered: the moment at which each of the others runs once more.
    """

    moments: tuple[Moment, ...]
    nbytes: Mapping[str, NDArray[np.int64]]
    idle: frozenset[Use] = frozenset()
    regathered: Mapping[Use, int] = field(default_factory=dict)

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes of all kinds together, shape [M]."""
        total: NDArray[np.int64] = np.add.reduce(list(self.nbytes.values()))
        return total

    @property
    def peak_moment(self) -> int:
        """The first moment at which most is alive."""
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


@collection_paused()
def timeline(
    stage: Stage, graph: Graph, *, training: bool, optimizer: OptimizerSpec | None = None
) -> Timeline:
    """Memory of one rank over one step.

    Args:
        stage: of a plan.
        graph: the stage's program, `graph_from_json(stage.program)`.
        training: whether there is a backward pass.
        optimizer: what trains the parameters; None for AdamW.
    """
    gradients = Gradients(graph, training=training)
    tape = Tape(stage, graph, gradients)
    lives = _Lives(tape, Schedule(tape, training=training))
    lives.add_inputs(stage, (optimizer or OptimizerSpec()) if training else None)
    if training:
        lives.add_gradients(_entries(tape, graph, gradients))
        lives.hold()
    lives.add_forward()
    return lives.timeline()


def _entries(tape: Tape, graph: Graph, gradients: Gradients) -> list[int]:
    """The slots at which gradients enter."""
    positions = [i for i, output in enumerate(graph.outputs) if output.name is not None]
    return [
        slot
        for position, slot in zip(positions, tape.outputs, strict=True)
        if gradients.of_output(position) is Gradient.FLOWS
    ]


class _Lives:
    """Collects what is alive from when to when."""

    def __init__(self, tape: Tape, schedule: Schedule) -> None:
        self._tape = tape
        self._schedule = schedule
        self._end = len(schedule.moments) - 1
        self._spans = array("q")  # kind, first and last moment, bytes; kind, ...
        self._nbytes = _storage_bytes(tape)
        self._held: dict[int, int] = {}  # last moment of each storage that backward needs
        self._again: dict[int, tuple[int, int]] = {}  # of each storage that is resharded again
        self._copies: dict[int, int] = {}  # last moment of what a checkpoint makes once more

    def timeline(self) -> Timeline:
        """All lives added up."""
        spans = np.frombuffer(self._spans, dtype=np.int64).reshape(-1, 4)
        changes = np.zeros((len(KINDS), self._end + 2), dtype=np.int64)
        np.add.at(changes, (spans[:, 0], spans[:, 1]), spans[:, 3])
        np.subtract.at(changes, (spans[:, 0], spans[:, 2] + 1), spans[:, 3])
        alive = changes.cumsum(axis=1)[:, :-1]
        by_kind = dict(zip(KINDS, alive, strict=True))
        again = {use: self._again.get(storage) for use, storage in self._resharded_again()}
        return Timeline(
            tuple(self._schedule.moments),
            by_kind,
            frozenset(use for use, span in again.items() if span is None),
            {use: span[0] for use, span in again.items() if span is not None},
        )

    def _resharded_again(self) -> Iterator[tuple[Use, int]]:
        """What reshardings that are `regather` are for, and the storage of what they make."""
        for instruction in self._tape.instructions:
            if instruction.regather:
                for use, slot in zip(instruction.uses, instruction.targets, strict=False):
                    yield use, self._tape.storages[slot]

    def _add(self, kind: str, first: int, last: int, nbytes: int) -> None:
        if nbytes:
            self._spans.extend((_NUMBER[kind], first, last, nbytes))

    def add_inputs(self, stage: Stage, optimizer: OptimizerSpec | None) -> None:
        """What is there before the step, and the optimizer's state."""
        for placed, form in zip(stage.inputs, self._tape.forms, strict=False):
            self._add(_HELD_AS[placed.kind], 0, self._end, form.nbytes)
            if optimizer and placed.kind == "parameter" and form.gradient:
                held = parameter_bytes(form.shape, DType(placed.dtype), optimizer)
                self._add("optimizer", 0, self._end, held.optimizer)

    def add_forward(self) -> None:
        """What the instructions make, until its last use or as long as it is held."""
        instructions, made_by = self._tape.instructions, self._tape.made_by
        last = list(made_by)
        for i, instruction in enumerate(instructions):
            for slot in instruction.reads:
                last[self._tape.storages[slot]] = i
            self._add("temporaries", i, i, instruction.working)
        returned = {self._tape.storages[slot] for slot in self._tape.outputs}
        inference = not self._schedule.backward
        for storage, maker in enumerate(made_by):
            if maker < 0:
                continue
            held = self._held.get(storage)
            if storage in returned:
                self._add("activations", maker, self._end, self._nbytes[storage])
            elif held is not None or (inference and not instructions[maker].is_resharding):
                until = max(last[storage], held or 0)
                self._add("activations", maker, until, self._nbytes[storage])
            else:
                self._add("temporaries", maker, last[storage], self._nbytes[storage])

    def hold(self) -> None:
        """What autograd keeps, and what is made once more in its place."""
        for i, instruction in enumerate(self._tape.instructions):
            until, again = self._schedule.backward[i], self._schedule.recompute.get(i)
            for slot in instruction.kept:
                self._hold(self._tape.storages[slot], until, instruction.checkpoint)
            if again is None:
                kept_from = i
            else:
                kept_from = again
                for slot in instruction.reads:
                    self._hold(self._tape.storages[slot], again, instruction.checkpoint)
                self._add("temporaries", again, again, instruction.working)
            kind = "activations" if again is None else "temporaries"
            self._add(kind, kept_from, until, instruction.kept_bytes)
        self._gather_together()
        self._add_made_once_more()

    def _gather_together(self) -> None:
        """The reshardings of a bucket run once more when the first of them is needed."""
        for instruction in self._tape.instructions:
            if instruction.regather and instruction.bucket >= 0:
                storages = {self._tape.storages[slot] for slot in instruction.targets}
                needed = [storage for storage in storages if storage in self._again]
                first = min((self._again[storage][0] for storage in needed), default=0)
                for storage in needed:
                    self._again[storage] = first, self._again[storage][1]

    def _hold(self, storage: int, until: int, checkpoint: int) -> None:
        """Keep a storage for a reader in backward, or what it is made of once more."""
        maker = self._tape.made_by[storage]
        if maker < 0:
            return
        made = self._tape.instructions[maker]
        if checkpoint >= 0 and made.checkpoint == checkpoint:
            self._copies[storage] = max(self._copies.get(storage, 0), until)
        elif made.regather:
            first, last = self._again.get(storage, (until, until))
            self._again[storage] = (min(first, until), max(last, until))
            self._hold(self._tape.storages[made.reads[0]], until, checkpoint)
        else:
            self._held[storage] = max(self._held.get(storage, 0), until)

    def _add_made_once_more(self) -> None:
        made_by = self._tape.made_by
        at_work: dict[int, int] = {}  # when each resharding runs; those of a bucket do once
        for storage, (first, last) in self._again.items():
            self._add("temporaries", first, last, self._nbytes[storage])
            at_work[made_by[storage]] = first
        for maker, first in at_work.items():
            self._add("temporaries", first, first, self._tape.instructions[maker].working)
        if not self._schedule.recompute:
            return
        last_reads = {
            self._tape.storages[slot]: again
            for i, again in self._schedule.recompute.items()
            for slot in self._tape.instructions[i].reads
        }
        for storage, maker in enumerate(made_by):
            start = self._schedule.recompute.get(maker)
            if start is not None:
                ends = (start, last_reads.get(storage, 0), self._copies.get(storage, 0))
                self._add("temporaries", start, max(ends), self._nbytes[storage])

    def add_gradients(self, entries: Iterable[int]) -> None:
        """Gradients on their way, and those of parameters when they have arrived."""
        flow = Flow(self._tape, self._schedule.backward)
        flow.run(entries)
        for first, last, nbytes in zip(flow.first, flow.last, flow.nbytes, strict=True):
            self._add("temporaries", first, last, nbytes)
        for slot, arrived in flow.arrived.items():
            self._add("gradients", arrived + 1, self._end, self._tape.forms[slot].nbytes)


def _storage_bytes(tape: Tape) -> list[int]:
    """Bytes of each storage, which are those of the first tensor in it."""
    nbytes = [0] * len(tape.made_by)
    for storage, form in zip(reversed(tape.storages), reversed(tape.forms), strict=True):
        nbytes[storage] = form.nbytes
    return nbytes


_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_HELD_AS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "constant": "buffers",
    "prepared": "buffers",
    "user": "inputs",
}
