"""Limits of the time and of the amount of a computation, which its innermost loops look at.

A caller sets them for a block of code (`limited`). Loops that can become long, such as those over
all strategies of an operator, report what they make (`count_made`). The limits are a context
variable, so that the rules, layouts and tables in between need no argument for them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Protocol

from autoshard.base.outcome import SolveStatus

MAX_MADE = 2_000_000
"""Default of the maximum number of strategies and layouts, which take about 1 KB each."""

_MAX_ENTRIES = 100_000_000
"""Maximum number of pairs of layouts of a tensor, of which tables have about 50 bytes each."""


class CancelToken(Protocol):
    """A flag that stops a computation, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """True if the computation should stop."""


class LimitReached(Exception):  # noqa: N818 - a signal inside the package, not an error
    """A computation has reached one of its limits.

    Attributes:
        status: cancelled, or timed out; None if it made too much.
        made: number of strategies and layouts that it had made.
    """

    def __init__(self, status: SolveStatus | None, made: int) -> None:
        super().__init__(f"{status or 'too many'}: {made}")
        self.status = status
        self.made = made


@dataclass(eq=False)
class Limits:
    """Limits of a computation.

    Attributes:
        deadline: value of `time.perf_counter` at which it must stop.
        cancel: set it to stop.
        least: number of strategies and layouts that it may make even after the deadline.
        most: maximum number of strategies and layouts that it may make.
        made: number that it has made so far.
    """

    deadline: float = inf
    cancel: CancelToken | None = None
    least: int = 0
    most: int = MAX_MADE
    made: int = 0

    def check(self) -> None:
        """Raise if the computation must stop.

        Raises:
            LimitReached: it must.
        """
        if self.cancel is not None and self.cancel.is_set():
            raise LimitReached(SolveStatus.CANCELLED, self.made)
        if self.made >= self.least and time.perf_counter() > self.deadline:
            raise LimitReached(SolveStatus.TIMED_OUT, self.made)
        if self.made > self.most:
            raise LimitReached(None, self.made)


_CURRENT: ContextVar[tuple[Limits, ...]] = ContextVar("limits", default=())
"""The limits of the block of code that runs, and then those of the blocks around it."""


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Set the limits of a block of code, in addition to those around it.

    Raises:
        LimitReached: from inside the block.
    """
    before = _CURRENT.set((limits, *_CURRENT.get()))
    try:
        yield
    finally:
        _CURRENT.reset(before)


@contextmanager
def unlimited() -> Iterator[None]:
    """Lift all limits for a block of code, such as one that makes a result of what was found."""
    before = _CURRENT.set(())
    try:
        yield
    finally:
        _CURRENT.reset(before)


def seconds_left() -> float:
    """Seconds until the first deadline of the block of code that runs; inf without limits."""
    deadlines = (limits.deadline for limits in _CURRENT.get())
    return min(deadlines, default=inf) - time.perf_counter()


def count_made(number: int = 1) -> None:
    """Report that strategies or layouts were made, or (0) that a loop goes on.

    Raises:
        LimitReached: the computation must stop.
    """
    current = _CURRENT.get()
    if current:
        current[0].made += number
        for limits in current:
            limits.check()


def count_entries(number: int) -> None:
    """Report that a table of so many entries is going to be made.

    Raises:
        LimitReached: it is too large for the memory, or the computation must stop.
    """
    current = _CURRENT.get()
    if current and number > _MAX_ENTRIES:
        raise LimitReached(None, current[0].made)
    for limits in current:
        limits.check()
