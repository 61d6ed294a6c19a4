"""Statements of the stores: each finds its rows by an index, whatever the size of the tables."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
from sqlalchemy import Connection, event

from autoshard_server.callers import Caller, Scope
from autoshard_server.settings import Settings
from autoshard_server.store.artifacts import PLANS
from autoshard_server.store.audit import AuditAction
from autoshard_server.store.database import Stores
from autoshard_server.store.idempotency import IdempotencyStore
from autoshard_server.store.jobs import JobState
from autoshard_server.store.tables import Cursor

SMALL = frozenset({"cache_totals", "job_totals", "unindexed_plans", "topologies", "api_keys"})
"""Tables that may be read as a whole."""

ACTIVE = frozenset({"jobs_active", "jobs_active_result"})
"""Indexes of active jobs, which are few; they may be read as a whole."""

ORDERED = frozenset({"cache_entries_by_use"})
"""Indexes from which the first rows are read."""

LISTS = frozenset({"jobs_by_state", "jobs_by_caller"})
"""Indexes for lists of jobs: those of a project contain all jobs that have finished."""

KINDS = ("SELECT", "UPDATE", "DELETE", "WITH")
CALLER = Caller("ann", frozenset(Scope))
PLAN = {
    "certificate": {"status": "optimal", "objective": 1.5, "bound": 1.0, "gap": 0.1},
    "graph": {"digest": "d", "num_nodes": 3, "num_parameters": 9},
    "memory": None,
    "mesh": {"axes": [{"name": "dp", "size": 2}], "topology": {"name": "t"}},
    "options": {"mode": "training"},
}


@pytest.fixture(params=["sqlite", "postgresql"])
def stores(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Stores]:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").create_database()
    opened = Stores(Settings(store_url=url))
    yield opened
    opened.close()


@pytest.mark.thorough
def test_no_statement_reads_a_whole_table(stores: Stores) -> None:
    with explained(stores) as scans:
        use_cache_and_index(stores)
        use_jobs(stores)
        use_others(stores)
    assert scans == {}
    slow = [
        "DELETE FROM jobs WHERE attempts = 99",
        "SELECT count(*) FROM jobs WHERE finished_at IS NULL AND project = 'a' AND state = 'b'",
    ]
    for statement in slow:
        with explained(stores) as scans, stores.engine.begin() as connection:
            # So that no smaller index is used.
            connection.exec_driver_sql("DROP INDEX jobs_active")
            connection.exec_driver_sql("DROP INDEX jobs_active_result")
            connection.exec_driver_sql(statement)
            connection.rollback()
        assert [*scans] == [statement]


def use_cache_and_index(stores: Stores) -> None:
    cache, index = stores.cache, stores.plans
    document = json.dumps(PLAN).encode()
    for i in range(6):
        cache.put(PLANS, str(i), document)
        cache.put("graphs", str(i), document)
    index.add("default", "0", document)
    index.refresh()
    for after, digest in product((None, Cursor(1.0, "0")), (None, "d")):
        index.page("default", after=after, graph_digest=digest)
    assert len(list(cache.entries(PLANS))) == 6
    assert cache.existing(PLANS, ["1", "x"]) == {"1"}
    assert cache.get(PLANS, "1") == document
    assert cache.info(PLANS, "1") is not None
    assert cache.stats(PLANS).num_entries == 6
    assert cache.delete(PLANS, "1")
    nbytes = cache.stats(PLANS).nbytes
    assert cache.evict(max_bytes=nbytes - 1, namespaces=[PLANS]) == 1
    assert cache.evict(max_bytes=nbytes) > 0
    assert cache.evict(max_age=-1) > 0


def use_jobs(stores: Stores) -> None:
    jobs = stores.jobs
    for i in range(6):
        jobs.submit(str(i), "{}", b"", max_queued=9, caller="ann", max_active=9)
    cancelled = jobs.submit("c", "{}", b"", max_queued=9)
    assert jobs.cancel(cancelled.id)
    for end in (jobs.release, lambda c: jobs.fail(c, {}), lambda c: jobs.succeed(c, b"{}")):
        claim = jobs.claim("me")
        assert claim is not None
        assert jobs.renew(claim, {"phase": "solve"})
        assert jobs.is_leased(claim)
        assert end(claim)
    states: Sequence[tuple[JobState, ...]] = ((), (JobState.FAILED,), tuple(JobState))
    for after, caller, chosen in product((None, Cursor(1.0, "0")), (None, "ann"), states):
        jobs.page(after=after, caller=caller, states=chosen)
    assert jobs.get(cancelled.id) is not None
    assert jobs.events(cancelled.id, after=1)
    jobs.result(cancelled.id)
    jobs.recover()
    assert sum(jobs.count().values()) == 7
    assert jobs.purge(-1) == 3


def use_others(stores: Stores) -> None:
    stores.audit.add(CALLER, AuditAction.CREATE, "/v1/jobs/1")
    for after in (None, Cursor(1.0, "0")):
        stores.audit.page("default", after=after)
    assert stores.audit.purge(-1) > 0
    keys = IdempotencyStore(stores.engine, lifetime=-1)
    keys.reserve(CALLER, "k", "b")
    assert stores.idempotency.find(CALLER, "k") is not None
    stores.idempotency.set_job(CALLER, "k", "b", "j")
    time.sleep(0.01)
    assert keys.purge() == 1


@contextmanager
def explained(stores: Stores) -> Iterator[Mapping[str, Sequence[str]]]:
    """The statements that read a whole table or sort one, with the steps that do."""
    found: dict[str, Sequence[str]] = {}
    is_sqlite = stores.engine.dialect.name == "sqlite"

    def explain(
        connection: Connection, _cursor: object, statement: str, values: Any, *_: object
    ) -> None:
        if not statement.lstrip().startswith(KINDS) or "pg_" in statement:
            return
        steps = _sqlite_steps if is_sqlite else _postgres_steps
        slow = steps(connection.connection.driver_connection, statement, values)
        if slow:
            found[statement] = slow

    event.listen(stores.engine, "before_cursor_execute", explain)
    yield found
    event.remove(stores.engine, "before_cursor_execute", explain)


def _sqlite_steps(driver: Any, statement: str, values: Any) -> list[str]:
    rows = driver.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
    of_active = "finished_at IS NULL" in statement
    return [row[3] for row in rows if _is_slow(row[3]) or (of_active and _reads_list(row[3]))]


def _reads_list(step: str) -> bool:
    return not LISTS.isdisjoint(step.split())


def _is_slow(step: str) -> bool:
    if step == "USE TEMP B-TREE FOR ORDER BY":
        return True
    words = step.split()
    return words[0] == "SCAN" and words[1] not in SMALL and words[-1] not in ACTIVE | ORDERED


def _postgres_steps(driver: Any, statement: str, values: Any) -> list[str]:
    with driver.cursor() as cursor:
        # Small tables would be read as a whole, whatever their indexes.
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
        cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}", values)
        ((plan,),) = cursor.fetchall()
    of_active = "finished_at IS NULL" in statement
    return [*_slow_nodes(plan[0]["Plan"], of_active=of_active)]


def _slow_nodes(node: Mapping[str, Any], *, of_active: bool) -> Iterator[str]:
    kind, index = node["Node Type"], node.get("Index Name")
    if kind == "Seq Scan" and node["Relation Name"] not in SMALL:
        yield f"{kind} of {node['Relation Name']}"
    is_free = index in ACTIVE | ORDERED or node.get("Relation Name") in SMALL
    if (
        index is not None
        and not is_free
        and ("Index Cond" not in node or (of_active and index in LISTS))
    ):
        yield f"{kind} of {index}"
    if kind == "Sort" and not _reads_active_jobs(node):
        yield f"{kind} by {node['Sort Key']}"
    for below in node.get("Plans", ()):
        yield from _slow_nodes(below, of_active=of_active)


def _reads_active_jobs(node: Mapping[str, Any]) -> bool:
    return node.get("Index Name") in ACTIVE or any(
        _reads_active_jobs(below) for below in node.get("Plans", ())
    )
