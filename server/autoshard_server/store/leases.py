"""Leases: how long the number that shows that a worker is alive has not changed."""

from collections.abc import Mapping


class Leases:
    """Measures for how long the number of each name has not changed.

    The number is that of a running job's heartbeats, or of the oldest job of a release that waits.
    Time is measured by the observer's monotonic clock, and between two observations at most half a
    lease counts: if the observer or the database was not available, workers have time to change
    the number before they are considered dead.

    Args:
        lease: seconds after which a number that has not changed is expired.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._idle: dict[str, tuple[int, float]] = {}
        self._observed_at: float | None = None

    def expired(self, numbers: Mapping[str, int], now: float) -> dict[str, int]:
        """The names whose number has not changed for the length of a lease, with the number.

        Args:
            numbers: by name, as they are now.
            now: seconds by a monotonic clock.
        """
        passed = 0.0
        if self._observed_at is not None:
            passed = min(now - self._observed_at, self._lease / 2)
        self._observed_at = now
        idle: dict[str, tuple[int, float]] = {}
        for name, number in numbers.items():
            before, seconds = self._idle.get(name, (None, 0.0))
            idle[name] = number, seconds + passed if number == before else 0.0
        self._idle = idle
        return {name: number for name, (number, s) in idle.items() if s >= self._lease}
