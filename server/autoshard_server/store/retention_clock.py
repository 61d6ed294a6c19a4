"""Clock of deletions by age, which notices that the machine's clock has jumped."""

import sys
import time
from collections.abc import Callable

from sqlalchemy import Engine, text

from autoshard_solver_cache import reader

_DATABASE_TIME = text("SELECT extract(epoch FROM clock_timestamp())")


def _since_boot() -> float:
    """Seconds that no change of the time of day affects; those of a suspended machine count."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class RetentionClock:
    """Compares the time of day with the time since the start, and with the database's clock.

    A clock that jumps ahead by more than a retention would make everything expire at once, so
    nothing is deleted by age while it is wrong.

    Args:
        engine: of the database; the clock of PostgreSQL is compared.
        shortest: the shortest retention, in seconds.
        now: time of day, seconds since 1970.
        steady: seconds since an arbitrary time.
    """

    def __init__(
        self,
        engine: Engine,
        shortest: float,
        *,
        now: Callable[[], float] = time.time,
        steady: Callable[[], float] = _since_boot,
    ) -> None:
        self._engine = reader(engine)
        self._shortest = shortest
        self._now, self._steady = now, steady
        self._offset = now() - steady()

    def fault(self) -> str | None:
        """Why ages cannot be trusted now; None if they can."""
        jump = self._now() - self._steady() - self._offset
        if abs(jump) > self._shortest:
            return f"the clock of this machine has jumped by {jump:+,.0f} s since the start"
        if self._engine.dialect.name != "postgresql":
            return None
        with self._engine.begin() as connection:
            ahead = self._now() - float(connection.execute(_DATABASE_TIME).scalar_one())
        if abs(ahead) > self._shortest:
            return f"the clock of this machine is {ahead:+,.0f} s off the database's"
        return None
