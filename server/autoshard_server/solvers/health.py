"""Whether a worker has solvers that live: several lost in a row say that it has not."""

import time
from collections.abc import Callable

MOST_LOST = 3
"""Solvers lost in a row, each before it was ready, after which a worker counts as unfit."""

_SETTLED = 10.0
"""Seconds that a solver has waited for work when it counts as ready."""

_LONGEST_PAUSE = 30.0


class Health:
    """Counts the solvers that one worker has lost in a row through no fault of their work.

    Args:
        clock: seconds by a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost = 0
        self._since = clock()

    @property
    def is_good(self) -> bool:
        """Whether the worker can have jobs done, as far as is known."""
        return self._lost < MOST_LOST

    @property
    def pause(self) -> float:
        """Seconds to wait before another solver is prepared: none after a single loss."""
        return 0.0 if self._lost <= 1 else min(2.0 ** (self._lost - 2), _LONGEST_PAUSE)

    def prepared(self) -> None:
        """A solver waits from now on."""
        self._since = self._clock()

    def waited(self) -> None:
        """It still waits."""
        if self._clock() - self._since >= _SETTLED:
            self.proved()

    def proved(self) -> None:
        """A solver was ready."""
        self._lost = 0

    def lost(self) -> None:
        """A solver could not be had, or was gone before it was ready or had work."""
        self._lost += 1
