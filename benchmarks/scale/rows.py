"""Fills the database of a service with many rows, as months of use would, but with small bodies."""

import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine, Table, delete, func, select, text

from autoshard_server.projects import DEFAULT_PROJECT, stored_namespace
from autoshard_server.settings import Settings
from autoshard_server.store import tables
from autoshard_server.store.artifacts import GRAPHS, PLANS
from autoshard_server.store.database import Stores
from autoshard_server.store.jobs import JobState
from autoshard_solver_cache.tables import entries

CALLERS = tuple(f"caller-{i}" for i in range(20))
PROJECTS = (DEFAULT_PROJECT, DEFAULT_PROJECT, DEFAULT_PROJECT, "alpha", "beta")
"""Projects of callers, in turns."""

QUEUED = 200
"""Jobs that wait; all others are finished."""

SPAN = 40_000.0
"""Seconds in which the rows were made, until now; less than any retention."""

_BODY = {
    "certificate": {"status": "optimal", "objective": 0.5, "bound": 0.5, "gap": 0.0},
    "graph": {"digest": "0" * 64, "num_nodes": 800, "num_parameters": 124_000_000},
    "memory": {"peak": 1 << 34},
    "mesh": {"axes": [{"name": "dp", "size": 8}], "topology": {"name": "h100-sxm"}},
    "options": {"mode": "training"},
}
"""The part of a plan that its index has."""

_GRAPHS = 1000
"""Different graphs that the plans are of."""

_CHUNK = 20_000
_EVENTS = ("queued", "running", "succeeded")


@dataclass(frozen=True, slots=True)
class Filled:
    """A database that was filled.

    Attributes:
        rows: plans, jobs and cached documents each.
        now: time of the newest, in seconds since 1970.
        seconds: that it took.
    """

    rows: int
    now: float
    seconds: float

    def created_at(self, number: int) -> float:
        """The time at which the row of a number was made."""
        return self.now - SPAN * (1 - number / self.rows)


def plan_id(number: int) -> str:
    """Id of a plan."""
    return hashlib.sha256(f"plan {number}".encode()).hexdigest()


def job_id(number: int) -> str:
    """Id of a job."""
    return hashlib.sha256(f"job {number}".encode()).hexdigest()[:32]


def graph_digest(number: int) -> str:
    """Digest of the program of a plan."""
    return hashlib.sha256(f"graph {number % _GRAPHS}".encode()).hexdigest()


def project(number: int) -> str:
    """The project of the row of a number."""
    return PROJECTS[number % len(PROJECTS)]


def caller(number: int) -> str:
    """The caller who made the row of a number; all of one caller's are in one project."""
    return CALLERS[number % len(CALLERS)]


def fill(settings: Settings, rows: int) -> Filled:
    """Migrate an empty database, and insert rows into it."""
    started = time.perf_counter()
    filled = Filled(rows, time.time(), 0.0)
    stores = Stores(settings)
    _insert(stores.engine, tables.plans, _plans(filled))
    _insert(stores.engine, entries, _entries(filled))
    _insert(stores.engine, tables.jobs, _jobs(filled))
    _insert(stores.engine, tables.job_events, _events(filled))
    _insert(stores.engine, tables.idempotency_keys, _keys(filled))
    _insert(stores.engine, tables.audit_events, _audit(filled))
    _settle(stores.engine)
    stores.close()
    return Filled(rows, filled.now, time.perf_counter() - started)


def _plans(filled: Filled) -> Iterator[dict[str, Any]]:
    for i in range(filled.rows):
        yield {
            "project": project(i),
            "id": plan_id(i),
            "created_at": filled.created_at(i),
            "size": 313_000,
            "status": "optimal",
            "objective": 0.5,
            "bound": 0.5,
            "gap": 0.0,
            "peak_memory": 1 << 34,
            "mode": "training",
            "mesh": '[["dp", 2], ["tp", 4]]',
            "topology": "h100-sxm",
            "graph_digest": graph_digest(i),
            "num_nodes": 800,
            "num_parameters": 124_000_000,
        }


def _entries(filled: Filled) -> Iterator[dict[str, Any]]:
    body = json.dumps(_BODY).encode()
    packed = zlib.compress(body)
    stored = {
        "sha256": hashlib.sha256(body).hexdigest(),
        "size": len(body),
        "stored_size": len(packed),
        "body": packed,
    }
    others = {"questions": 5, GRAPHS: 10, "blocks": 10, "rules": 100}
    for i in range(filled.rows):
        times = {"created_at": filled.created_at(i), "used_at": filled.created_at(i)}
        kinds = [PLANS, *(name for name, every in others.items() if i % every == 0)]
        for kind in kinds:
            namespace = stored_namespace(project(i), kind)
            yield {"namespace": namespace, "key": plan_id(i), **stored, **times}


def _state(filled: Filled, number: int) -> JobState:
    if number >= filled.rows - QUEUED:
        return JobState.QUEUED
    return JobState.FAILED if number % 1000 == 0 else JobState.SUCCEEDED


def _jobs(filled: Filled) -> Iterator[dict[str, Any]]:
    request = json.dumps({"kind": "plan", "plan_id": "0" * 64, "mesh": {"shape": [2, 4]}})
    result = zlib.compress(b"{}")
    for i in range(filled.rows):
        state = _state(filled, i)
        yield {
            "id": job_id(i),
            "number": i + 1,
            "kind": "plan",
            "class": "solve",
            "plan_id": plan_id(i),
            "project": project(i),
            "caller": caller(i),
            "state": state.value,
            "attempts": int(state.done),
            "beat": 0,
            "stored_bytes": 0,
            "created_at": filled.created_at(i),
            "started_at": filled.created_at(i) + 1 if state.done else None,
            "finished_at": filled.created_at(i) + 2 if state.done else None,
            "context": "{}",
            "request": request,
            "result": result if state is JobState.SUCCEEDED else None,
        }


def _events(filled: Filled) -> Iterator[dict[str, Any]]:
    for i in range(filled.rows):
        names = _EVENTS if _state(filled, i).done else _EVENTS[:1]
        for number, state in enumerate(names, 1):
            yield {
                "job_id": job_id(i),
                "number": number,
                "kind": "state",
                "created_at": filled.created_at(i) + number - 1,
                "data": f'{{"state": "{state}"}}',
            }


def _keys(filled: Filled) -> Iterator[dict[str, Any]]:
    for i in range(0, filled.rows, 10):
        yield {
            "project": project(i),
            "caller": caller(i),
            "key_sha256": plan_id(i),
            "body_sha256": plan_id(i),
            "answer": json.dumps({"job": job_id(i)}),
            "created_at": filled.created_at(i),
        }


def _audit(filled: Filled) -> Iterator[dict[str, Any]]:
    for i in range(filled.rows):
        yield {
            "id": job_id(i),
            "project": project(i),
            "created_at": filled.created_at(i),
            "caller": caller(i),
            "action": "create",
            "resource": f"/v1/jobs/{job_id(i)}",
        }


def _insert(engine: Engine, table: Table, rows: Iterator[dict[str, Any]]) -> None:
    """Insert rows by the fastest way of each database, in transactions of moderate size."""
    first = next(rows)
    names = [name for name in first if name in table.c]
    values = ([row[name] for name in names] for row in _chain(first, rows))
    while chunk := list(islice(values, _CHUNK)):
        with engine.begin() as connection:
            _insert_chunk(connection, table, names, chunk)


def _chain(first: dict[str, Any], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rows


def _insert_chunk(
    connection: Connection, table: Table, names: Sequence[str], chunk: Sequence[Sequence[Any]]
) -> None:
    columns = ", ".join(f'"{name}"' for name in names)
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "postgresql":
        with (
            driver.cursor() as cursor,
            cursor.copy(f"COPY {table.name} ({columns}) FROM STDIN") as copy,
        ):
            for row in chunk:
                copy.write_row(row)
    else:
        places = ", ".join("?" * len(names))
        driver.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({places})", chunk)  # noqa: S608  our tables


def _settle(engine: Engine) -> None:
    """Background work of a database: statistics, and the end of its log."""
    with engine.begin() as connection:
        # The plans are in the index already.
        connection.execute(delete(tables.unindexed_plans))
        number = connection.execute(select(func.count()).select_from(tables.plans)).scalar_one()
        assert number > 0
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("VACUUM ANALYZE"))
        else:
            connection.connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[union-attr]  it is open
