"""The fair order in which waiting callers get workers: by project, then by caller within it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from threading import Lock


@dataclass(frozen=True, slots=True)
class QueuedJobs:
    """The queued jobs of one caller, in one class.

    Attributes:
        project: of the caller.
        caller: name of the key; None without keys.
        first: number of the oldest of the jobs, in their order of arrival.
    """

    project: str
    caller: str | None
    first: int


class FairOrder:
    """Orders callers with queued jobs, the next one first; safe to share between threads.

    The project with the fewest running jobs, divided by its weight, is first. Equal ones take turns
    (start-time fair queueing): each has a virtual time, which grows by 1 / weight with each turn,
    and the smallest is first. Within a project, its callers are ordered in the same way, with equal
    weights. The virtual times are those of this process: other processes that serve the same
    queue order it fairly by their own.

    Args:
        weights: of projects; 1 for those without one.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._projects = _VirtualTimes()
        self._callers: dict[str, _VirtualTimes] = {}
        self._lock = Lock()

    def order(
        self, queued: Sequence[QueuedJobs], running: Mapping[tuple[str, str | None], int]
    ) -> list[QueuedJobs]:
        """The callers in the order in which to serve them.

        Args:
            queued: one entry for each caller with queued jobs.
            running: number of running jobs of each project and caller that has some.
        """
        of_project: dict[str, int] = {}
        for (project, _), number in running.items():
            of_project[project] = of_project.get(project, 0) + number

        def caller_rank(entry: QueuedJobs) -> tuple[float, float, int]:
            times = self._callers.get(entry.project)
            time = 0.0 if times is None else times.start(entry.caller)
            return running.get((entry.project, entry.caller), 0), time, entry.first

        def project_rank(entries: Sequence[QueuedJobs]) -> tuple[float, float, int]:
            name = entries[0].project
            share = of_project.get(name, 0) / self._weights.get(name, 1.0)
            return share, self._projects.start(name), min(entry.first for entry in entries)

        by_project = sorted(queued, key=lambda entry: entry.project)
        with self._lock:
            groups = [
                sorted(group, key=caller_rank)
                for _, group in groupby(by_project, key=lambda entry: entry.project)
            ]
            return [entry for group in sorted(groups, key=project_rank) for entry in group]

    def served(self, project: str, caller: str | None) -> None:
        """Record that a job of a caller has started."""
        with self._lock:
            self._projects.advance(project, 1 / self._weights.get(project, 1.0))
            self._callers.setdefault(project, _VirtualTimes()).advance(caller, 1.0)


class _VirtualTimes:
    """Virtual times of names: who returns after a pause has not saved up turns."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str | None, float] = {}

    def start(self, name: str | None) -> float:
        """Start of the next turn of a name."""
        return max(self._ends.get(name, 0.0), self._now)

    def advance(self, name: str | None, length: float) -> None:
        """Record a turn of a name."""
        self._now = self.start(name)
        self._ends[name] = self._now + length
        # Those that ended before start now, as unknown names do.
        self._ends = {key: end for key, end in self._ends.items() if end > self._now}
