"""How a tensor can be there for backward, and what may follow what.

Every end of a use of a value has a state. Along a use, states decide what the resharding
between the two ends costs: nothing where the tensor only stays what it is, the resharding,
the resharding and its forward part once more, or infinity.
"""

from dataclasses import dataclass
from enum import StrEnum

from autoshard.plan.options import Recomputing


class State(StrEnum):
    """What becomes of a tensor after forward."""

    REST = "rest"
    """An input of the program: always there."""
    MADE = "made"
    """By an operator; not there in backward unless somebody holds it."""
    SAVED = "saved"
    """By an operator that holds it itself."""
    SEEN = "seen"
    """A view of what is there in backward."""
    LOST = "lost"
    """A view of what need not be there."""
    REDONE = "redone"
    """Of a checkpoint: made once more."""
    KEEP = "keep"
    """A copy of its own is held."""
    HOLD = "hold"
    """What an operator made is held as it was made, and resharded again for backward."""
    AGAIN = "again"
    """Resharded again from a source that is there."""
    DROP = "drop"
    """Not there in backward."""


class Price(StrEnum):
    """What passing from one end to the other costs."""

    NEVER = "never"
    SAME = "same"
    """Nothing; the layouts are the same."""
    ONCE = "once"
    """The resharding."""
    TWICE = "twice"
    """The resharding, and its forward part once more."""
    STILL = "still"
    """The resharding, where its forward part does nothing."""


_THERE = frozenset({State.REST, State.SAVED, State.SEEN, State.KEEP, State.AGAIN})


@dataclass(frozen=True, slots=True)
class Use:
    """What matters about the use of a value.

    Attributes:
        needed: whether backward needs what the reader takes.
        inside: whether the value is made in the span that its reader is in.
        redone: whether the reader takes it once more if it is checkpointed.
        leaves: of a resharding that readers share, whether some are outside of the span.
        is_output: whether it leaves the program.
        again: "auto", "never" or "always", whether resharded tensors are resharded again.
    """

    needed: bool = False
    inside: bool = False
    redone: bool = False
    leaves: bool = False
    is_output: bool = False
    again: Recomputing = "auto"

    @property
    def _redo(self) -> Price:
        return Price.TWICE if self.redone else Price.ONCE

    @property
    def _once_more(self) -> Price:
        return Price.STILL if self.is_output or self.again == "never" else Price.TWICE

    def directly(self, source: State, target: State) -> Price:
        """From what makes a value to a reader of whom backward needs nothing."""
        if target is State.REDONE:
            if self.inside or source in _THERE:
                return self._redo
            return Price.NEVER if self.redone else Price.ONCE
        return Price.NEVER if source is State.REDONE and self.inside else Price.ONCE

    def into(self, source: State, target: State) -> Price:
        """From what makes a value to the choice of what becomes of it, resharded."""
        if source is State.REDONE and self.inside:
            leaving = target is State.KEEP and self.leaves
            return self._redo if leaving or target in _FORGOTTEN else Price.NEVER
        if target is State.REDONE:
            return self._redo if self.inside or source in _THERE else Price.NEVER
        if target is State.AGAIN:
            return self._once_more if source in _THERE else Price.NEVER
        if target is State.HOLD:
            return Price.SAME if source in _BARE else Price.NEVER
        keeps = target is State.KEEP and source is State.REST and self.again == "always"
        return Price.STILL if keeps else Price.ONCE

    def out_of(self, source: State, target: State) -> Price:
        """From that choice to the reader."""
        if target is State.REDONE:
            if source is State.HOLD:
                return Price.NEVER if self.inside else self._redo
            fits = source is State.REDONE or (source is State.DROP and not self.redone)
            return Price.SAME if fits else Price.NEVER
        if target is State.LOST or not self.needed:
            return Price.SAME if source is State.DROP else Price.NEVER
        if source is State.HOLD:
            return self._once_more
        return Price.SAME if source in _THERE else Price.NEVER

    def shared(self, source: State, target: State) -> Price:
        """From that choice to the layout that several readers share."""
        if target is State.DROP:
            return Price.SAME if source is State.DROP else Price.NEVER
        if source is State.HOLD:
            return self._once_more
        return Price.SAME if source in _THERE else Price.NEVER


_FORGOTTEN = (State.DROP, State.REDONE)
_BARE = (State.MADE, State.REDONE)
