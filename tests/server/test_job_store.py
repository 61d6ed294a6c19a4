"""The state machine of jobs, in the database."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard_server.jobs import TRANSITIONS, Claim, JobState, JobStore
from autoshard_server.problems import TOO_MANY, ServerError
from autoshard_solver_cache import open_engine

PROBLEM = {"type": "x", "title": "x", "status": 500, "detail": "x"}


def make_store(url: str = "sqlite://", *, lease: float = 30.0, attempts: int = 2) -> JobStore:
    return JobStore(open_engine(url), lease=lease, max_attempts=attempts)


@pytest.fixture
def store() -> Iterator[JobStore]:
    made = make_store()
    yield made
    made._engine.dispose()


def submit(store: JobStore, plan: str = "p") -> str:
    return store.submit(plan, "{}", b"graph", max_queued=100).id


def state(store: JobStore, job_id: str) -> JobState:
    job = store.get(job_id)
    assert job is not None
    return job.state


def test_a_job_goes_its_way(store: JobStore) -> None:
    job_id = submit(store)
    assert state(store, job_id) is JobState.QUEUED
    claim = store.claim("me")
    assert claim == Claim(job_id, "p", "me", "{}", b"graph")
    assert state(store, job_id) is JobState.RUNNING
    assert store.renew(claim, {"phase": "x"})
    assert store.succeed(claim, b"plan")
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.progress, job.error) == (JobState.SUCCEEDED, {"phase": "x"}, None)
    assert store.result(job_id) == b"plan"


def test_the_oldest_job_is_claimed_first_and_each_once(store: JobStore) -> None:
    ids = [submit(store, str(i)) for i in range(3)]
    claims = [store.claim("me") for _ in range(4)]
    assert [claim.id if claim else None for claim in claims] == [*ids, None]


def test_equal_plans_share_a_job_until_it_is_done(store: JobStore) -> None:
    first = submit(store)
    assert submit(store) == first
    claim = store.claim("me")
    assert claim is not None
    assert submit(store) == first
    store.fail(claim, PROBLEM)
    assert submit(store) != first


def test_a_full_queue_refuses_new_jobs_only(store: JobStore) -> None:
    store.submit("a", "{}", b"", max_queued=1)
    store.submit("a", "{}", b"", max_queued=1)
    with pytest.raises(ServerError) as caught:
        store.submit("b", "{}", b"", max_queued=1)
    assert caught.value.kind is TOO_MANY


ACTIONS = ("claim", "renew", "succeed", "fail", "cancel", "release")


@settings(max_examples=100, derandomize=True, deadline=None)
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_every_history_follows_the_table(actions: list[str]) -> None:
    store = make_store()
    job_id = submit(store)
    held = Claim(job_id, "p", "me", "{}", b"graph")
    before = JobState.QUEUED
    for action in actions:
        answer: Any = {
            "claim": lambda: store.claim("me") is not None,
            "renew": lambda: store.renew(held),
            "succeed": lambda: store.succeed(held, b"plan"),
            "fail": lambda: store.fail(held, PROBLEM),
            "cancel": lambda: store.cancel(job_id),
            "release": lambda: store.release(held),
        }[action]()
        after = state(store, job_id)
        moved = after is not before
        assert not moved or after in TRANSITIONS[before]
        assert answer == (moved or (action == "renew" and before is JobState.RUNNING))
        before = after
    job = store.get(job_id)
    assert job is not None
    outcomes = (store.result(job_id) is not None) + (job.error is not None)
    assert outcomes == int(job.state.done)
    store._engine.dispose()


def test_a_worker_that_lost_its_job_cannot_touch_it(store: JobStore) -> None:
    job_id = submit(store)
    lost = store.claim("first")
    assert lost is not None
    store.release(lost)
    held = store.claim("second")
    assert held is not None
    assert not store.holds(lost)
    assert not store.renew(lost)
    assert not store.succeed(lost, b"stale")
    assert not store.fail(lost, PROBLEM)
    assert not store.release(lost)
    assert store.holds(held)
    assert store.succeed(held, b"fresh")
    assert store.result(job_id) == b"fresh"


def test_a_dead_workers_job_is_run_again_and_then_fails() -> None:
    store = make_store(lease=-1.0)
    job_id = submit(store)
    for expected in (JobState.QUEUED, JobState.FAILED):
        assert store.claim("dies") is not None
        assert store.recover() == 1
        assert state(store, job_id) is expected
    job = store.get(job_id)
    assert job is not None
    assert job.error is not None
    assert "died 2 times" in job.error["detail"]
    store._engine.dispose()


def test_a_living_workers_job_is_left_alone(store: JobStore) -> None:
    job_id = submit(store)
    store.claim("lives")
    assert store.recover() == 0
    assert state(store, job_id) is JobState.RUNNING


def test_a_released_job_does_not_lose_an_attempt() -> None:
    store = make_store(attempts=1)
    job_id = submit(store)
    for _ in range(3):
        claim = store.claim("me")
        assert claim is not None
        assert store.release(claim)
    assert state(store, job_id) is JobState.QUEUED
    store._engine.dispose()


def test_finished_jobs_are_forgotten_in_time(store: JobStore) -> None:
    done, waiting = submit(store, "a"), submit(store, "b")
    store.cancel(done)
    assert store.purge(older_than=60) == 0
    assert store.purge(older_than=-1) == 1
    assert store.get(done) is None
    assert store.get(waiting) is not None


def test_elapsed_runs_from_the_start_to_the_end(store: JobStore) -> None:
    job_id = submit(store)
    assert store.get(job_id).elapsed == 0.0  # type: ignore[union-attr]  it was just made
    store.claim("me")
    time.sleep(0.01)
    assert store.get(job_id).elapsed > 0.0  # type: ignore[union-attr]  it was just made
    store.cancel(job_id)
    assert store.get(job_id).elapsed == store.get(job_id).elapsed  # type: ignore[union-attr]  as above


def test_no_two_workers_get_the_same_job(tmp_path: Path) -> None:
    store = make_store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    ids = {submit(store, str(i)) for i in range(40)}

    def work(name: str) -> list[str]:
        claims = iter(lambda: store.claim(name), None)
        return [claim.id for claim in claims]

    with ThreadPoolExecutor(8) as pool:
        claimed = [job for jobs in pool.map(work, map(str, range(8))) for job in jobs]
    assert len(claimed) == 40
    assert set(claimed) == ids
    store._engine.dispose()


def test_equal_requests_from_many_threads_make_one_job(tmp_path: Path) -> None:
    store = make_store(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: submit(store), range(16)))
    assert len(ids) == 1
    store._engine.dispose()


def test_what_is_done_stays_done() -> None:
    done = [s for s in JobState if s.done]
    assert done == [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED]
    assert not any(b in TRANSITIONS[a] for a, b in product(done, JobState))
