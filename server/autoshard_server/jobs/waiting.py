"""Waiting for jobs: however many wait for one, the store is asked about it once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from autoshard_server.jobs.job import Job

_SHORTEST_LOOK = 0.02
_LONGEST_LOOK = 0.25
"""Seconds between looks at a job that somebody waits for: first, and in the end."""


@dataclass(slots=True)
class _Watch:
    """One job that is looked at until it is done, or nobody waits any more."""

    job: Job
    task: "asyncio.Task[None] | None" = None
    waiters: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


class Waiting:
    """Looks at jobs for all who wait; used from one event loop.

    Args:
        look: asks the store about a job.
        is_over: whether nobody is to wait any longer.
    """

    def __init__(self, look: Callable[[str], Awaitable[Job]], is_over: Callable[[], bool]) -> None:
        self._look = look
        self._is_over = is_over
        self._watches: dict[str, _Watch] = {}

    async def wait(self, job: Job, seconds: float) -> Job:
        """The job when it is done, or as it is after so many seconds, or when all is over."""
        if job.state.done or self._is_over():
            return job
        watch = self._watches.get(job.id)
        if watch is None:
            watch = self._watches[job.id] = _Watch(job)
            watch.task = asyncio.create_task(self._watch(watch))
        watch.waiters += 1
        try:
            async with asyncio.timeout(seconds):
                await watch.over.wait()
        except TimeoutError:
            pass
        finally:
            watch.waiters -= 1
            if not watch.waiters and watch.task is not None and not watch.over.is_set():
                watch.task.cancel()
                self._forget(watch)
        if watch.error is not None:
            raise watch.error
        return watch.job

    async def _watch(self, watch: _Watch) -> None:
        pause = _SHORTEST_LOOK
        try:
            while not watch.job.state.done and not self._is_over():
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_LOOK)
                watch.job = await self._look(watch.job.id)
        except Exception as error:  # noqa: BLE001  told to everybody who waits
            watch.error = error
        finally:
            self._forget(watch)
            watch.over.set()

    def _forget(self, watch: _Watch) -> None:
        if self._watches.get(watch.job.id) is watch:
            del self._watches[watch.job.id]
