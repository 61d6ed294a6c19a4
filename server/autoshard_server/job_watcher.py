"""Follows jobs for all requests of a process: one query reads all jobs that are followed."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import anyio.to_thread
import structlog

from autoshard_server.problems import ProblemType, limit_error
from autoshard_server.settings import Settings
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import Job, JobEvent, PolledJob
from autoshard_solver_cache import StoreUnavailableError

_POLL = 0.05
"""Seconds between checks of jobs that have been followed for a short time."""

_SLOW = 5
"""The other jobs are checked each time that so many checks have passed."""

_FAST_CHECKS = 40
"""Number of checks after which a job is checked less often."""

_MAX_RECENT = 256
"""Largest number of events of a job in memory; older ones are read again."""

_log = structlog.get_logger(__name__)


class JobWatcher:
    """Reads the state and the new events of followed jobs, for all of their followers at once.

    The events of a job are numbered without gaps, so one query for the last number of each job
    finds all that is new. While the database is unavailable, followers wait.

    Args:
        jobs: with the jobs.
        is_over: returns true if followers should stop, because the service shuts down.
    """

    def __init__(self, jobs: JobStore, is_over: Callable[[], bool]) -> None:
        self._jobs = jobs
        self._is_over = is_over
        self._followed: dict[str, _Followed] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, job: Job, seconds: float) -> None:
        """Wait until a job is finished, at most some seconds, or until shutdown."""
        if job.state.done or self._is_over():
            return
        with self._following(job.id) as followed:
            try:
                async with asyncio.timeout(seconds):
                    while not (followed.is_done or self._is_over()):
                        await followed.changed.wait()
            except TimeoutError:
                return

    async def events(self, job: Job, *, after: int) -> AsyncGenerator[JobEvent]:
        """Events with numbers larger than `after`, until the job is finished, or until shutdown.

        Args:
            job: as it is now.
            after: number of an event; 0 for all.
        """
        # A larger number is none of this job's, and would also count for those who follow it now.
        position = min(after, await self._last_event(job.id))
        for event in await self._read(job.id, position):
            position = event.number
            yield event
            if event.is_last:
                return
        if job.state.done:
            # All events were sent before, or the job was finished by a release without events.
            return
        with self._following(job.id, position) as followed:
            while not self._is_over():
                changed, is_done = followed.changed, followed.is_done
                found = followed.events_after(position)
                if found is None:
                    found = await self._read(job.id, position)
                for event in found:
                    position = event.number
                    yield event
                    if event.is_last:
                        return
                if is_done:
                    return
                await changed.wait()

    async def _last_event(self, job_id: str) -> int:
        found = await anyio.to_thread.run_sync(self._jobs.statuses, [job_id])
        return found[job_id].last_event if job_id in found else 0

    async def _read(self, job_id: str, after: int) -> list[JobEvent]:
        return await anyio.to_thread.run_sync(partial(self._jobs.events, job_id, after=after))

    @contextmanager
    def _following(self, job_id: str, after: int | None = None) -> "Iterator[_Followed]":
        followed = self._followed.get(job_id)
        if followed is None:
            followed = self._followed[job_id] = _Followed()
        followed.num_followers += 1
        followed.checks = 0
        if after is not None and followed.last is None:
            followed.last = followed.first = after
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield followed
        finally:
            followed.num_followers -= 1
            if not followed.num_followers:
                del self._followed[job_id]

    async def _run(self) -> None:
        is_available = True
        for check in itertools.count():
            if self._is_over():
                for followed in self._followed.values():
                    followed.wake()
            if not self._followed:
                return
            try:
                await self._check(all_jobs=check % _SLOW == 0)
                is_available = True
            except StoreUnavailableError as error:
                if is_available:
                    _log.warning("store_unavailable", reason=str(error))
                is_available = False
            except Exception:  # noqa: BLE001  the next check may succeed
                _log.exception("watching_failed")
            await asyncio.sleep(_POLL)

    async def _check(self, *, all_jobs: bool) -> None:
        followed = {
            job_id: entry
            for job_id, entry in self._followed.items()
            if all_jobs or entry.checks < _FAST_CHECKS
        }
        if not followed:
            return
        found = await anyio.to_thread.run_sync(self._jobs.statuses, list(followed))
        for job_id, entry in followed.items():
            status = found.get(job_id)
            entry.checks += 1
            if status is not None and entry.last is not None and status.last_event > entry.last:
                entry.add(await self._read(job_id, entry.last))
            entry.update(status)


class OpenRequests:
    """Counts the requests of a kind that each caller has open in this process.

    Args:
        settings: with the limits.
        of_caller: the setting with the largest number of one caller.
        of_all: the same of all callers together; None for no such limit.
        kind: of the problem beyond a limit.
    """

    def __init__(
        self, settings: Settings, of_caller: str, of_all: str | None, kind: ProblemType
    ) -> None:
        self._most = (of_caller, getattr(settings, of_caller))
        self._most_of_all = None if of_all is None else (of_all, getattr(settings, of_all))
        self._kind = kind
        self._open: Counter[tuple[str, str | None]] = Counter()

    @contextmanager
    def opened(self, project: str, caller: str | None) -> Iterator[None]:
        """Count a request within the block.

        Raises:
            ServerError: of the kind, if there are too many.
        """
        key = project, caller
        self._check(self._open[key], "for your key", self._most)
        if self._most_of_all is not None:
            self._check(self._open.total(), "for all callers", self._most_of_all)
        self._open[key] += 1
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _check(self, number: int, whose: str, limit: tuple[str, int]) -> None:
        setting, most = limit
        if number >= most:
            detail = f"{number} requests are open {whose}; end one, or poll the job"
            raise limit_error(self._kind, detail, setting, most, headers={"Retry-After": "10"})


class _Followed:
    """A job, and what is known of it.

    Attributes:
        num_followers: requests that follow it.
        checks: since the last of them came.
        first: the number of the event before the ones in memory.
        last: the number of the last event in memory; None if nobody follows events.
        is_done: true if the job is finished, or was deleted.
        changed: is set, and replaced by another one, when anything changes.
    """

    def __init__(self) -> None:
        self.num_followers = 0
        self.checks = 0
        self.first = 0
        self.last: int | None = None
        self.is_done = False
        self.changed = asyncio.Event()
        self._recent: list[JobEvent] = []

    def events_after(self, number: int) -> list[JobEvent] | None:
        """Known events with larger numbers; None if some of them are not in memory."""
        if number < self.first:
            return None
        return [event for event in self._recent if event.number > number]

    def add(self, events: list[JobEvent]) -> None:
        """Add the next events."""
        if not events:
            return
        self._recent += events
        self.last = events[-1].number
        if len(self._recent) > _MAX_RECENT:
            del self._recent[:-_MAX_RECENT]
            self.first = self._recent[0].number - 1
        self.wake()

    def update(self, status: PolledJob | None) -> None:
        """Record the state of the job; None if it was deleted."""
        if not self.is_done and (status is None or status.state.done):
            self.is_done = True
            self.wake()

    def wake(self) -> None:
        """Wake all followers."""
        self.changed.set()
        self.changed = asyncio.Event()
