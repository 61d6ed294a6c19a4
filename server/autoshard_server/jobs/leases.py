"""When a worker that shows no sign of life counts as dead."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Seen:
    beat: int
    still: float


class Leases:
    """Counts for how long each running job's number has stayed as it is.

    Time counts by the observer's own monotonic clock, and between two looks at most half a
    lease: where the observer was away, or the database was, workers get the time to show that
    they live before anything is taken from them.

    Args:
        lease: seconds without a sign of life after which a worker counts as dead.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._seen: dict[str, _Seen] = {}
        self._looked: float | None = None

    def lost(self, beats: Mapping[str, int], now: float) -> dict[str, int]:
        """Jobs whose worker counts as dead, with the number to take them by.

        Args:
            beats: the number of each job that runs.
            now: seconds by a clock that never jumps.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, self._lease / 2)
        self._looked = now
        seen: dict[str, _Seen] = {}
        for job_id, beat in beats.items():
            before = self._seen.get(job_id)
            unchanged = before is not None and before.beat == beat
            still = before.still + passed if before is not None and unchanged else 0.0
            seen[job_id] = _Seen(beat, still)
        self._seen = seen
        return {job_id: s.beat for job_id, s in seen.items() if s.still >= self._lease}
