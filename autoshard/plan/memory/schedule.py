"""When each instruction of a stage runs, forward, once more and backward."""

from enum import StrEnum

from autoshard.plan.memory.recompute import taken_again
from autoshard.plan.memory.tape import Tape


class Phase(StrEnum):
    """Part of a step."""

    FORWARD = "forward"
    TURN = "turn"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


Moment = tuple[Phase, str]
"""A thing that a rank does in a step: which part of the step, and the name of the node or of
the value that is resharded; empty where it is neither."""


class Schedule:
    """When each instruction runs.

    Args:
        tape: what runs.
        training: whether there is a backward pass.

    Attributes:
        moments: all of them.
        numbers: the instruction of each moment; -1 where there is none.
        recompute: the moment at which an instruction runs once more, by instruction.
        backward: the moment of each instruction's backward; empty in inference.
    """

    def __init__(self, tape: Tape, *, training: bool) -> None:
        self.recompute: dict[int, int] = {}
        self.backward: list[int] = []
        names = [instruction.name for instruction in tape.instructions]
        self.moments = [(Phase.FORWARD, name) for name in names]
        self.numbers = list(range(len(names)))
        if not training:
            # What the caller passes is there even if nothing is done with it.
            if not self.moments:
                self._add(Phase.FORWARD)
            return
        self._add(Phase.TURN)
        self.backward = [0] * len(names)
        for part in reversed(_parts(tape)):
            for i in _runs_again(tape, part):
                self.recompute[i] = len(self.moments)
                self._add(Phase.RECOMPUTE, names[i], i)
            for i in reversed(part):
                self.backward[i] = len(self.moments)
                self._add(Phase.BACKWARD, names[i], i)
        self._add(Phase.OPTIMIZER)

    def _add(self, phase: Phase, name: str = "", number: int = -1) -> None:
        self.moments.append((phase, name))
        self.numbers.append(number)


def _parts(tape: Tape) -> list[range]:
    """Checkpoints, and single instructions outside of all."""
    parts: list[range] = []
    previous = -1
    for i, instruction in enumerate(tape.instructions):
        joins = instruction.checkpoint == previous >= 0
        parts.append(range(parts.pop().start if joins else i, i + 1))
        previous = instruction.checkpoint
    return parts


def _runs_again(tape: Tape, part: range) -> range:
    if tape.instructions[part.start].checkpoint < 0:
        return range(0)
    return taken_again(part, lambda i: tape.instructions[i].keeps)[1]
