"""Totals of the cache: equal to a count after everything that can change the entries."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, Row, text

from autoshard_solver_cache import SolverCache, StoreUnavailableError, Usage, reader

OpenEngine = Callable[[], Engine]

COUNTED = "SELECT namespace, count(*), sum(stored_size) FROM cache_entries GROUP BY namespace"
OLD_TABLE = """
CREATE TABLE cache_entries (
    namespace VARCHAR(64) NOT NULL, key VARCHAR(255) NOT NULL, sha256 VARCHAR(64) NOT NULL,
    size BIGINT NOT NULL, stored_size BIGINT NOT NULL, created_at {real} NOT NULL,
    used_at {real} NOT NULL, body {bytes} NOT NULL, PRIMARY KEY (namespace, key)
)
"""
INSERT = """
INSERT INTO cache_entries VALUES (:namespace, :key, '', 9, :size, 0, :used_at, :body)
"""


def counted(engine: Engine) -> Mapping[str, Usage]:
    with reader(engine).begin() as connection:
        rows = connection.execute(text(COUNTED)).all()
    return {name: Usage(int(number), int(nbytes)) for name, number, nbytes in rows}


def row(namespace: str, key: str, size: int = 5, used_at: float = 0.0) -> dict[str, object]:
    return {"namespace": namespace, "key": key, "size": size, "used_at": used_at, "body": b"x"}


def test_totals_follow_every_writer(engine: Engine) -> None:
    cache = SolverCache(engine)
    assert cache.usage() == {}
    for i in range(5):
        cache.put("plans", str(i), b"body" * i)
    cache.put("graphs", "a", b"graph")
    assert not cache.put("graphs", "a", b"another")
    assert cache.usage() == counted(engine)
    assert cache.usage()["plans"].num_entries == 5
    # A release without totals, and an administrator.
    with engine.begin() as connection:
        connection.execute(text(INSERT), [row("blocks", str(i)) for i in range(7)])
        connection.execute(text("DELETE FROM cache_entries WHERE key IN ('0', '1')"))
    assert cache.usage() == counted(engine)
    # A transaction that is not committed, as after a crash.
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text(INSERT), [row("rules", str(i)) for i in range(7)])
        connection.execute(text("DELETE FROM cache_entries WHERE namespace = 'plans'"))
        transaction.rollback()
    assert cache.usage() == counted(engine)
    assert cache.namespaces() == ["blocks", "graphs", "plans"]
    assert cache.delete("graphs", "a")
    assert cache.stats("graphs").num_entries == 0
    assert cache.namespaces() == ["blocks", "plans"]
    assert cache.evict(max_age=60) == 5
    assert cache.evict(max_bytes=0) == 3
    assert cache.usage() == counted(engine) == {}


def test_totals_are_exact_with_many_writers_and_evictions(engine: Engine) -> None:
    caches = [SolverCache(engine, max_bytes=3000) for _ in range(2)]
    noise = [bytes((i * 31 + j * j * 17 + j // 7) % 251 for j in range(500)) for i in range(8)]

    def work(i: int) -> None:
        cache = caches[i % 2]
        cache.put(("plans", "graphs", "blocks")[i % 3], str(i), noise[i % 8])
        if i % 4 == 0:
            cache.delete("plans", str(i - 3))
        if i % 10 == 0:
            cache.evict(max_bytes=2000)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(60)))
    assert caches[0].usage() == counted(engine)
    caches[0].enforce_budget()
    assert sum(used.nbytes for used in caches[0].usage().values()) <= 3000


def test_entries_of_an_older_release_are_counted_when_it_is_opened(open_one: OpenEngine) -> None:
    engine = open_one()
    is_sqlite = engine.dialect.name == "sqlite"
    types = {"real": "FLOAT", "bytes": "BLOB" if is_sqlite else "BYTEA"}
    with engine.begin() as connection:
        connection.execute(text(OLD_TABLE.format(**types)))
        connection.execute(text(INSERT), [row("plans", str(i), i) for i in range(10)])
    engines = [open_one() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(SolverCache, engines))
    assert caches[0].usage() == counted(engine) == {"plans": Usage(10, 45)}
    caches[1].put("plans", "new", b"body")
    assert caches[0].usage() == counted(engine)


def test_groups_of_namespaces_have_budgets(engine: Engine) -> None:
    cache = SolverCache(
        engine,
        max_bytes=1_000_000,
        group_of=lambda namespace: namespace.partition("-")[0],
        max_group_bytes=100,
    )
    with engine.begin() as connection:
        for name in ("a-plans", "a-graphs", "b-plans"):
            rows = [row(name, str(i), 10, time.time() + i) for i in range(9)]
            connection.execute(text(INSERT), rows)
    assert cache.enforce_budget() == 8
    kept = {name: [e.key for e in cache.entries(name)] for name in cache.namespaces()}
    assert kept["a-plans"] == kept["a-graphs"] == ["4", "5", "6", "7", "8"]
    assert len(kept["b-plans"]) == 9
    assert cache.enforce_budget() == 0


def test_an_entry_that_was_used_meanwhile_is_not_evicted(engine: Engine) -> None:
    class Used(SolverCache):
        """A cache whose oldest entry is used by somebody else at the last moment."""

        def _evict(self, rows: Iterable[Row[Any]]) -> int:
            self._touch("plans", "0")
            return super()._evict(rows)

    cache = Used(engine)
    with engine.begin() as connection:
        connection.execute(text(INSERT), [row("plans", str(i), 10, i) for i in range(4)])
    cache.evict(max_bytes=20)
    assert "0" in [entry.key for entry in cache.entries("plans")]


def test_other_databases_are_refused() -> None:
    with pytest.raises(StoreUnavailableError, match="neither SQLite nor PostgreSQL"):
        SolverCache("mysql://host/name")
