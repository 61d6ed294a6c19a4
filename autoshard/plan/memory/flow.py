"""Gradients on their way through backward: when each is made, and until when it is there."""

from collections.abc import Iterable, Sequence

from autoshard.plan.memory.record import Instruction
from autoshard.plan.memory.tape import Tape


class Flow:
    """Follows gradients through backward.

    A tensor's gradient is added up in place where nothing else looks at it.

    Args:
        tape: what runs.
        backward: the moment of each instruction's backward.

    Attributes:
        first: the moment at which each gradient is made.
        last: the moment at which it is last looked at.
        nbytes: bytes of it.
        arrived: for each input of the program, when its gradient is complete.
    """

    def __init__(self, tape: Tape, backward: Sequence[int]) -> None:
        self.first: list[int] = []
        self.last: list[int] = []
        self.nbytes: list[int] = []
        self.arrived: dict[int, int] = {}
        self._tape = tape
        self._backward = backward
        self._of: dict[int, int] = {}  # number of each slot's gradient
        self._num_slots: list[int] = []  # how many slots have this gradient

    def run(self, entries: Iterable[int]) -> None:
        """Let gradients enter, and go through all instructions backward."""
        first, last = min(self._backward, default=0), max(self._backward, default=0)
        for slot in entries:
            if slot not in self._of:
                # Whoever calls backward holds it.
                self._assign(slot, self._new(slot, first, last))
        for i in range(len(self._tape.instructions) - 1, -1, -1):
            instruction = self._tape.instructions[i]
            present = [slot for slot in instruction.targets if slot in self._of]
            if present:
                self._step(instruction, present, self._backward[i])

    def _step(self, instruction: Instruction, present: list[int], moment: int) -> None:
        source = self._of[present[0]]
        for slot in present:
            made = self._of[slot]
            self.last[made] = max(self.last[made], moment)
        if instruction.working_backward:
            self._made(moment, moment, instruction.working_backward)
        for slot, passes in zip(instruction.reads, instruction.passes_gradient, strict=True):
            if not self._tape.forms[slot].gradient:
                continue
            made = source if passes else self._new(slot, moment, moment)
            known = self._of.get(slot)
            if known is None:
                self._assign(slot, made)
            else:
                self._add_to(slot, known, moment)
            if slot < self._tape.num_inputs:
                self.arrived[slot] = moment
        for slot in present:
            self._num_slots[self._of.pop(slot)] -= 1

    def _add_to(self, slot: int, known: int, moment: int) -> None:
        """Add to the gradient of a slot; what others look at too is not added to in place."""
        self.last[known] = max(self.last[known], moment)
        if self._num_slots[known] > 1:
            self._num_slots[known] -= 1
            self._assign(slot, self._new(slot, moment, moment))

    def _new(self, slot: int, first: int, last: int) -> int:
        return self._made(first, last, self._tape.forms[slot].nbytes)

    def _made(self, first: int, last: int, nbytes: int) -> int:
        self.first.append(first)
        self.last.append(last)
        self.nbytes.append(nbytes)
        self._num_slots.append(0)
        return len(self.first) - 1

    def _assign(self, slot: int, made: int) -> None:
        self._of[slot] = made
        self._num_slots[made] += 1
