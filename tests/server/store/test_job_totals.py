"""Totals of finished jobs, and the index of plans: they follow every writer."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine, text

from autoshard_server.store.artifacts import PLANS, PlanIndex
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import JobState
from autoshard_solver_cache import SolverCache

FINISHED = "SELECT state, count(*) FROM jobs WHERE finished_at IS NOT NULL GROUP BY state"
PLAN = b"""{
    "certificate": {"status": "optimal", "objective": 1.5, "bound": 1.0, "gap": 0.1},
    "graph": {"digest": "d", "num_nodes": 3, "num_parameters": 9},
    "memory": null,
    "mesh": {"axes": [{"name": "dp", "size": 2}], "topology": {"name": "t"}},
    "options": {"mode": "training"}
}"""


def finished(engine: Engine) -> Mapping[str, int]:
    with engine.begin() as connection:
        return {row.state: row[1] for row in connection.execute(text(FINISHED))}


def totals(jobs: JobStore) -> Mapping[str, int]:
    return {s.value: number for s, number in jobs.count().items() if s.done and number}


def test_totals_of_jobs_follow_their_states(engine: Engine) -> None:
    jobs = JobStore(engine, lease=30, max_attempts=2)

    def run(number: int) -> None:
        jobs.submit(str(number), "{}", b"", max_queued=99)
        claim = jobs.claim(f"worker {number}")
        assert claim is not None
        if number % 3 == 0:
            jobs.succeed(claim, b"{}")
        elif number % 3 == 1:
            jobs.fail(claim, {"type": "x"})
        else:
            jobs.cancel(claim.id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(20)))
    jobs.submit("waits", "{}", b"", max_queued=99)
    assert totals(jobs) == finished(engine) == {"succeeded": 7, "failed": 7, "cancelled": 6}
    assert jobs.count()[JobState.QUEUED] == 1
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs WHERE state = 'cancelled'"))
        connection.execute(text("UPDATE jobs SET finished_at = 1 WHERE state = 'failed'"))
    assert totals(jobs) == finished(engine) == {"succeeded": 7, "failed": 7}
    assert jobs.purge(3600) == 7
    assert totals(jobs) == finished(engine) == {"succeeded": 7}
    with engine.begin() as connection:
        events = connection.execute(text("SELECT count(DISTINCT job_id) FROM job_events"))
        # Of those that an administrator has deleted, the events stay.
        assert events.scalar_one() == 14
    assert jobs.purge(-60, is_over=lambda: True) == 0
    assert jobs.purge(-60) == 7
    assert totals(jobs) == {}


def test_the_index_of_plans_follows_the_cache(engine: Engine) -> None:
    cache = SolverCache(engine)
    index = PlanIndex(engine, cache)
    for project, namespace in (("default", PLANS), ("ann", "ann_plans")):
        for i in range(3):
            cache.put(namespace, str(i), PLAN)
            if i:
                index.add(project, str(i), PLAN)
        # The same key in another namespace is another thing.
        cache.put("graphs", "1", b"graph")
        cache.delete("graphs", "1")
        assert {plan.id for plan in index.page(project)[0]} == {"1", "2"}
    assert (index.refresh(), index.refresh()) == (2, 0)
    assert [plan.id for plan in index.page("ann")[0]] == ["0", "2", "1"]
    # A plan that the cache has dropped before it could be indexed.
    cache.put(PLANS, "late", PLAN)
    cache.delete(PLANS, "late")
    index.add("default", "late", PLAN)
    assert index.refresh() == 0
    cache.delete("ann_plans", "0")
    assert cache.evict(max_bytes=0, namespaces=[PLANS]) == 3
    assert index.page("default")[0] == []
    assert {plan.id for plan in index.page("ann")[0]} == {"1", "2"}
    # One that cannot be read any more, and whose entry the reader deletes.
    cache.put(PLANS, "damaged", PLAN)
    with engine.begin() as connection:
        connection.execute(text("UPDATE cache_entries SET sha256 = '' WHERE key = 'damaged'"))
    assert (index.refresh(), index.refresh()) == (1, 0)
    assert index.page("default")[0] == []


def test_plans_are_indexed_and_evicted_at_once(engine: Engine) -> None:
    cache = SolverCache(engine)
    index = PlanIndex(engine, cache)

    def work(i: int) -> None:
        key = str(i % 5)
        if i % 2:
            cache.put(PLANS, key, PLAN)
            index.add("default", key, PLAN)
        elif i % 4:
            index.refresh()
        else:
            cache.delete(PLANS, key)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(120)))
    while index.refresh():
        time.sleep(0)
    listed = [plan.id for plan in index.page("default")[0]]
    assert sorted(listed) == [entry.key for entry in cache.entries(PLANS)]
