"""Followers of jobs: events without gaps, and queries that do not depend on their number."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text

from autoshard_server.job_watcher import JobWatcher
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import Claim, Job, JobEvent, PolledJob
from autoshard_solver_cache import StoreUnavailableError


class Counting(JobStore):
    """A store that counts what is read, and is unavailable if told so."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, lease=30, max_attempts=2)
        self.checks = 0
        self.reads = 0
        self.unavailable = False

    def statuses(self, job_ids: Sequence[str]) -> dict[str, PolledJob]:
        self.checks += 1
        if self.unavailable:
            raise StoreUnavailableError("gone for a while")
        return super().statuses(job_ids)

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        self.reads += 1
        return super().events(job_id, after=after, limit=limit)


@pytest.fixture
def store(engine: Engine) -> Counting:
    return Counting(engine)


def submit(store: JobStore, name: str) -> Job:
    return store.submit(name, "{}", b"", max_queued=99)


def claim(store: JobStore) -> Claim:
    found = store.claim("me")
    assert found is not None
    return found


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


@asynccontextmanager
async def watching(
    store: JobStore, is_over: Callable[[], bool] = lambda: False
) -> AsyncIterator[JobWatcher]:
    """A watcher, whose last read has ended afterwards."""
    watcher = JobWatcher(store, is_over)
    yield watcher
    await until(lambda: watcher._task is None or watcher._task.done())


class Followers:
    """Requests that follow a job and record its events."""

    def __init__(self, watcher: JobWatcher, job: Job, count: int, after: int = 0) -> None:
        self.told: list[list[int]] = [[] for _ in range(count)]
        self._tasks = [
            asyncio.create_task(self._follow(watcher, job, after, told)) for told in self.told
        ]

    async def _follow(self, watcher: JobWatcher, job: Job, after: int, told: list[int]) -> None:
        async for event in watcher.events(job, after=after):
            told += [event.number]

    async def all_told(self, numbers: list[int]) -> None:
        await until(lambda: all(told == numbers for told in self.told))

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)


def test_all_followers_are_told_everything_by_one_read(store: Counting) -> None:
    job = submit(store, "p")

    async def follow() -> None:
        async with watching(store) as watcher:
            followers = Followers(watcher, job, 100)
            await followers.all_told([1])
            held = claim(store)
            await followers.all_told([1, 2])
            before = store.reads
            for i in range(3):
                store.renew(held, {"phase": str(i)})
                await followers.all_told([*range(1, 4 + i)])
            assert store.reads - before == 3
            late = Followers(watcher, job, 1, after=3)
            await late.all_told([4, 5])
            store.succeed(held, b"plan")
            await asyncio.gather(followers.end(), late.end())
            assert followers.told == [[1, 2, 3, 4, 5, 6]] * 100
            assert late.told == [[4, 5, 6]]
        # Nobody follows, so nothing is read any more.
        before = store.checks
        await asyncio.sleep(0.5)
        assert store.checks == before

    asyncio.run(follow())


def test_more_events_than_are_kept_in_memory_reach_a_slow_follower(store: Counting) -> None:
    job = submit(store, "p")
    held = claim(store)

    async def follow() -> None:
        async with watching(store) as watcher:
            quick = Followers(watcher, job, 1)
            await quick.all_told([1, 2])
            slow = watcher.events(job, after=0)
            told = [(await anext(slow)).number, (await anext(slow)).number]
            waiting = asyncio.create_task(anext(slow))
            await asyncio.sleep(0)
            for _ in range(600):
                store.renew(held, {"phase": "x"})
            told.append((await waiting).number)
            await quick.all_told([*range(1, 603)])
            store.succeed(held, b"plan")
            await quick.end()
            told += [event.number async for event in slow]
            assert told == [*range(1, 604)]

    asyncio.run(follow())


def test_followers_of_deleted_and_finished_jobs_and_of_a_service_that_stops_are_let_go(
    store: Counting, engine: Engine
) -> None:
    deleted, cancelled, followed = (submit(store, name) for name in "abc")
    is_over = False

    async def follow() -> None:
        nonlocal is_over
        async with watching(store, lambda: is_over) as watcher:
            groups = [Followers(watcher, job, 2) for job in (deleted, cancelled, followed)]
            waits = [asyncio.create_task(watcher.wait(job, 3600)) for job in (deleted, cancelled)]
            for group in groups:
                await group.all_told([1])
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": deleted.id})
            store.cancel(cancelled.id)
            await asyncio.gather(groups[0].end(), groups[1].end(), *waits)
            assert groups[1].told == [[1, 2]] * 2
            is_over = True
            await groups[2].end()
            assert groups[2].told == [[1]] * 2

    asyncio.run(follow())


def test_followers_wait_while_the_database_is_unavailable(store: Counting) -> None:
    job = submit(store, "p")

    async def follow() -> None:
        async with watching(store) as watcher:
            followers = Followers(watcher, job, 3)
            await followers.all_told([1])
            store.unavailable = True
            checks = store.checks
            await until(lambda: store.checks > checks + 3)
            store.cancel(job.id)
            store.unavailable = False
            await followers.end()
            assert followers.told == [[1, 2]] * 3

    asyncio.run(follow())


def test_a_wait_ends_in_time(store: Counting) -> None:
    job = submit(store, "p")

    async def wait() -> None:
        async with watching(store) as watcher:
            await watcher.wait(job, 0.2)

    asyncio.run(wait())
    found: Any = store.get(job.id)
    assert not found.state.done
