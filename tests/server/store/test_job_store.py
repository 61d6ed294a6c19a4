"""The state machine of jobs, in the database."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.store.database import migrate
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import TRANSITIONS, Claim, EventKind, JobClass, JobState
from autoshard_server.store.quotas import JobUsage
from autoshard_solver_cache import open_engine

PROBLEM = {"type": "x", "title": "x", "status": 500, "detail": "x"}


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_store(url: str = "sqlite://", *, attempts: int = 2, **options: Any) -> JobStore:
    engine = open_engine(url)
    migrate(engine)
    return JobStore(engine, lease=30.0, max_attempts=attempts, **options)


MakeStore = Callable[..., JobStore]


@pytest.fixture(params=["sqlite", "postgresql"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Makes stores of one empty database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'jobs.sqlite3'}"
    else:
        url = request.getfixturevalue("postgres").create_database()
    made: list[JobStore] = []

    def make(**options: Any) -> JobStore:
        made.append(make_store(url, **options))
        return made[-1]

    yield make
    for one in made:
        one._engine.dispose()


@pytest.fixture
def store(make: MakeStore) -> JobStore:
    return make()


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
    assert claim == Claim(job_id, "plan", "p", "default", "me", "{}", b"graph", {})
    assert state(store, job_id) is JobState.RUNNING
    assert store.renew(claim, {"phase": "x"})
    assert store.succeed(claim, b"plan")
    job = store.get(job_id)
    assert job is not None
    assert (job.state, job.progress, job.error) == (JobState.SUCCEEDED, {"phase": "x"}, None)
    assert store.result(job_id) == b"plan"


def test_a_damaged_result_is_none(store: JobStore) -> None:
    job_id = submit(store)
    claim = store.claim("me")
    assert claim is not None
    store.succeed(claim, b"plan" * 100)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET result = :junk"), {"junk": b"junk"})
    assert store.result(job_id) is None


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


def test_projects_do_not_share_jobs(store: JobStore) -> None:
    first, other = (
        store.submit("p", "{}", b"", max_queued=9, project=project).id for project in ("a", "b")
    )
    assert first != other
    assert store.submit("p", "{}", b"", max_queued=9, project="a").id == first
    assert [job.id for job in store.page(project="b")[0]] == [other]
    found = store.get(other)
    assert found is not None
    assert found.project == "b"
    claims = [store.claim("me") for _ in range(2)]
    assert [claim.project for claim in claims if claim] == ["a", "b"]


def test_projects_and_their_callers_take_turns(store: JobStore) -> None:
    def ask(name: str, project: str, caller: str | None) -> None:
        store.submit(name, "{}", b"", max_queued=999, project=project, caller=caller)

    for i in range(20):
        ask(f"x{i}", "a", "x")
    ask("y", "a", "y")
    ask("anonymous", "b", None)
    claims = [store.claim("me") for _ in range(4)]
    assert [claim.plan_id for claim in claims if claim] == ["x0", "anonymous", "y", "x1"]
    # Fewer of its jobs run than of the other project.
    ask("late", "b", None)
    late = store.claim("me")
    assert late is not None
    assert late.plan_id == "late"


def test_a_worker_claims_the_classes_and_projects_that_it_serves(store: JobStore) -> None:
    def ask(name: str, project: str, kind: str) -> None:
        store.submit(name, "{}", b"", max_queued=99, project=project, kind=kind)

    def claim(*classes: JobClass, idle: bool = False) -> str | None:
        found = store.claim("me", classes, idle_projects_only=idle)
        return None if found is None else found.plan_id

    for name, kind in (("p", "plan"), ("q", "search"), ("v", "validation"), ("w", "coverage")):
        ask(name, "a", kind)
    assert claim(JobClass.QUICK) == "v"
    assert claim(JobClass.SOLVE, idle=True) is None
    ask("other", "b", "plan")
    assert claim(JobClass.QUICK, JobClass.SOLVE, idle=True) == "other"
    assert claim(JobClass.SOLVE, JobClass.QUICK) == "p"
    assert claim(JobClass.QUICK, JobClass.SOLVE) == "w"
    assert claim(JobClass.QUICK) is None


def test_a_full_queue_refuses_new_jobs_only(store: JobStore) -> None:
    store.submit("a", "{}", b"", max_queued=1)
    store.submit("a", "{}", b"", max_queued=1)
    with pytest.raises(ServerError) as caught:
        store.submit("b", "{}", b"", max_queued=1)
    assert caught.value.kind is ProblemType.TOO_MANY_JOBS


ACTIONS = ("claim", "renew", "succeed", "fail", "cancel", "release")


@pytest.fixture(scope="module")
def in_memory() -> Iterator[JobStore]:
    """One store for many histories, one after the other."""
    made = make_store()
    yield made
    made._engine.dispose()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_every_history_follows_the_table(in_memory: JobStore, actions: list[str]) -> None:
    store = in_memory
    job_id = submit(store)
    held = Claim(job_id, "plan", "p", "default", "me", "{}", b"graph", {})
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
    store.cancel(job_id)


def test_the_workers_of_a_release_run_its_jobs_until_they_are_gone(make: MakeStore) -> None:
    clock = Clock()
    old, new = make(release="1.0"), make(release="2.0", clock=clock)
    first, second, third = (submit(old, plan_id) for plan_id in "abc")
    mine = submit(new, "d")
    assert [claimed(new), claimed(new)] == [mine, None]
    assert claimed(old) == first

    def pass_time(seconds: float) -> int:
        count = 0
        for _ in range(int(seconds)):
            clock.now += 1.0
            count += new.recover()
            for job_id in (first, mine):
                held = Claim(job_id, "plan", "", "default", "me", "{}", b"", {})
                new.renew(held)
        return count

    # A worker of the old release is busy, then idle, then gone.
    assert (pass_time(60), claimed(new)) == (0, None)
    assert old.succeed(Claim(first, "plan", "a", "default", "me", "{}", b"", {}), b"{}")
    assert (pass_time(20), claimed(new)) == (0, None)
    assert claimed(old) == second
    assert old.cancel(second)
    assert (pass_time(20), claimed(new)) == (0, None)
    assert (pass_time(20), claimed(new)) == (1, third)


def claimed(store: JobStore) -> str | None:
    claim = store.claim("me")
    return None if claim is None else claim.id


def test_a_worker_that_lost_its_job_cannot_touch_it(store: JobStore) -> None:
    job_id = submit(store)
    lost = store.claim("first")
    assert lost is not None
    store.release(lost)
    held = store.claim("second")
    assert held is not None
    assert not store.is_leased(lost)
    assert not store.renew(lost)
    assert not store.succeed(lost, b"stale")
    assert not store.fail(lost, PROBLEM)
    assert not store.release(lost)
    assert store.is_leased(held)
    assert store.succeed(held, b"fresh")
    assert store.result(job_id) == b"fresh"


def look(store: JobStore, clock: Clock, seconds: float, *, step: float = 7.5) -> int:
    """Look for dead workers as often as the service does, for so long."""
    found = 0
    for _ in range(round(seconds / step)):
        clock.now += step
        found += store.recover()
    return found


def test_a_dead_workers_job_is_run_again_and_then_fails(make: MakeStore) -> None:
    clock = Clock()
    store = make(clock=clock)
    job_id = submit(store)
    for expected in (JobState.QUEUED, JobState.FAILED):
        assert store.claim("dies") is not None
        assert store.recover() == 0
        assert look(store, clock, 22.5) == 0
        assert look(store, clock, 7.5) == 1
        assert state(store, job_id) is expected
    job = store.get(job_id)
    assert job is not None
    assert job.error is not None
    assert "died 2 times" in job.error["detail"]


def test_a_living_workers_job_is_left_alone(make: MakeStore) -> None:
    clock = Clock()
    store = make(clock=clock)
    job_id = submit(store)
    claim = store.claim("lives")
    assert claim is not None
    for _ in range(4):
        assert store.renew(claim)
        assert look(store, clock, 22.5) == 0
    assert state(store, job_id) is JobState.RUNNING


def test_an_observer_that_was_away_gives_workers_time_to_show_that_they_live() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    submit(store)
    claim = store.claim("lives")
    assert claim is not None
    assert store.recover() == 0
    # Nobody could look or show anything for an hour, as when the database was gone.
    assert look(store, clock, 3600, step=3600) == 0
    assert store.renew(claim)
    assert look(store, clock, 22.5) == 0
    store._engine.dispose()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_no_wall_clock_takes_a_job_away_or_changes_the_order(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    store = make_store()
    first = submit(store, "a")
    claim = store.claim("lives")
    assert claim is not None
    second = submit(store, "b")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    third = submit(store, "c")
    assert store.recover() == 0
    assert store.is_leased(claim)
    assert store.renew(claim)
    assert store.succeed(claim, b"plan")
    claims = [store.claim("me") for _ in range(2)]
    assert [c.id if c else None for c in claims] == [second, third]
    assert state(store, first) is JobState.SUCCEEDED
    store._engine.dispose()


def test_a_job_whose_solver_died_is_started_again_and_then_fails(make: MakeStore) -> None:
    store = make(attempts=2)
    job_id = submit(store)
    for expected in (JobState.QUEUED, JobState.FAILED):
        claim = store.claim("me")
        assert claim is not None
        assert store.retry(claim, PROBLEM)
        assert state(store, job_id) is expected
        assert not store.retry(claim, PROBLEM)
    job = store.get(job_id)
    assert job is not None
    assert job.error == PROBLEM


def test_a_released_job_does_not_lose_an_attempt(make: MakeStore) -> None:
    store = make(attempts=1)
    job_id = submit(store)
    for _ in range(3):
        claim = store.claim("me")
        assert claim is not None
        assert store.release(claim)
    assert state(store, job_id) is JobState.QUEUED


def test_events_tell_all_that_happened_in_order(store: JobStore) -> None:
    job_id = submit(store)
    claim = store.claim("me")
    assert claim is not None
    store.renew(claim)
    store.renew(claim, {"phase": "x"})
    store.release(claim)
    again = store.claim("me")
    assert again is not None
    store.fail(again, PROBLEM)
    told = store.events(job_id)
    assert [event.number for event in told] == [1, 2, 3, 4, 5, 6]
    assert [(event.kind, dict(event.data)) for event in told] == [
        (EventKind.STATE, {"state": "queued"}),
        (EventKind.STATE, {"state": "running", "attempt": 1}),
        (EventKind.PROGRESS, {"phase": "x"}),
        (EventKind.STATE, {"state": "queued"}),
        (EventKind.STATE, {"state": "running", "attempt": 1}),
        (EventKind.STATE, {"state": "failed", "error": PROBLEM}),
    ]
    assert [event.number for event in store.events(job_id, after=4)] == [5, 6]
    assert [event.number for event in store.events(job_id, after=1, limit=2)] == [2, 3]
    assert store.events("0" * 32) == []


def test_what_travels_with_a_job_reaches_its_worker(store: JobStore) -> None:
    context = {"request_id": "r", "traceparent": "00-1-2-01"}
    store.submit("p", "{}", b"", max_queued=9, kind="search", caller="c", context=context)
    claim = store.claim("me")
    assert claim is not None
    assert (claim.kind, claim.context) == ("search", context)


def test_jobs_are_listed_from_new_to_old_in_pages(store: JobStore) -> None:
    made = [
        store.submit(str(i), "{}", b"", max_queued=100, caller="ab"[i % 2]).id for i in range(7)
    ]
    page, after = store.page(limit=3)
    pages = [[job.id for job in page]]
    while after is not None:
        submit(store, f"late {len(pages)}")
        page, after = store.page(after=after, limit=3)
        pages.append([job.id for job in page])
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [job for page in pages for job in page] == made[::-1]
    assert [job.id for job in store.page(caller="b")[0]] == made[5::-2]
    store.cancel(made[0])
    assert [job.id for job in store.page(states=(JobState.CANCELLED,))[0]] == [made[0]]
    assert store.count()[JobState.CANCELLED] == 1
    assert store.count()[JobState.RUNNING] == 0


def test_a_caller_may_have_so_many_jobs_under_way(store: JobStore) -> None:
    def ask(plan: str, caller: str) -> str:
        return store.submit(plan, "{}", b"", max_queued=99, caller=caller, max_active=2).id

    first = ask("a", "x")
    ask("b", "x")
    with pytest.raises(ServerError, match="limit is 2"):
        ask("c", "x")
    assert ask("a", "x") == first
    ask("c", "y")
    store.cancel(first)
    ask("d", "x")


def test_a_project_may_have_so_many_jobs_and_a_caller_so_many_bytes(store: JobStore) -> None:
    def ask(plan: str, project: str, caller: str | None, size: int = 0) -> str:
        # Random bytes, which do not become fewer when they are compressed.
        graph = random.Random(plan).randbytes(size)
        return store.submit(
            plan,
            "{}",
            graph,
            max_queued=99,
            project=project,
            caller=caller,
            max_project=3,
            max_bytes=5000,
        ).id

    large = ask("a", "p", "x", 4000)
    with pytest.raises(ServerError, match=r"contain 4,0.*limit is 5,000.*MAX_CALLER_JOB_BYTES"):
        ask("b", "p", "x", 2000)
    ask("b", "p", "y", 2000)
    ask("c", "p", None, 2000)
    with pytest.raises(ServerError, match=r"your project.*limit is 3.*MAX_PROJECT_JOBS"):
        ask("d", "p", "z")
    ask("d", "q", "z")
    claim = store.claim("me")
    assert claim is not None
    assert claim.id == large
    assert store.usage("p", "x").jobs == 1
    # A result that is not in the cache is in the job, and counts.
    store.succeed(claim, random.Random(1).randbytes(4500))
    usage = store.usage("p", "x")
    assert usage.jobs == 0
    assert 4500 <= usage.nbytes < 5000
    with pytest.raises(ServerError, match="delete finished jobs"):
        ask("e", "p", "x", 600)
    assert store.delete(large)
    assert store.usage("p", "x") == JobUsage(0, 0)
    ask("e", "p", "x", 600)


def test_the_age_of_the_oldest_queued_job_is_known(store: JobStore) -> None:
    assert store.oldest_queued() == {}
    jobs = [
        store.submit(name, "{}", b"", max_queued=9, kind=kind)
        for name, kind in (("a", "plan"), ("b", "plan"), ("c", "coverage"))
    ]
    expected = {JobClass.SOLVE: jobs[0].created_at, JobClass.QUICK: jobs[2].created_at}
    assert store.oldest_queued() == expected
    store.claim("me", (JobClass.SOLVE,))
    assert store.oldest_queued() == {**expected, JobClass.SOLVE: jobs[1].created_at}


def test_finished_jobs_are_forgotten_in_time(store: JobStore) -> None:
    done, waiting = submit(store, "a"), submit(store, "b")
    store.cancel(done)
    assert store.purge(older_than=60) == 0
    assert store.purge(older_than=-1) == 1
    assert store.get(done) is None
    assert store.events(done) == []
    assert len(store.events(waiting)) == 1
    assert store.get(waiting) is not None


def test_elapsed_runs_from_the_start_to_the_end(store: JobStore) -> None:
    job_id = submit(store)
    assert store.get(job_id).elapsed == 0.0  # type: ignore[union-attr]  it was just made
    store.claim("me")
    time.sleep(0.01)
    assert store.get(job_id).elapsed > 0.0  # type: ignore[union-attr]  it was just made
    store.cancel(job_id)
    assert store.get(job_id).elapsed == store.get(job_id).elapsed  # type: ignore[union-attr]  as above


def test_no_two_workers_get_the_same_job(store: JobStore) -> None:
    ids = {submit(store, str(i)) for i in range(40)}

    def work(name: str) -> list[str]:
        claims = iter(lambda: store.claim(name), None)
        return [claim.id for claim in claims]

    with ThreadPoolExecutor(8) as pool:
        claimed = [job for jobs in pool.map(work, map(str, range(8))) for job in jobs]
    assert len(claimed) == 40
    assert set(claimed) == ids


def test_equal_requests_from_many_threads_make_one_job(store: JobStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: submit(store), range(16)))
    assert len(ids) == 1


def test_what_is_done_stays_done() -> None:
    done = [s for s in JobState if s.done]
    assert done == [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED]
    assert not any(b in TRANSITIONS[a] for a, b in product(done, JobState))
