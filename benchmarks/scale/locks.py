"""The time that transactions hold locks, and that another writer has to wait for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from sqlalchemy import Connection, Engine, event

from autoshard_solver_cache import SolverCache, open_engine

_PROBE_PAUSE = 0.01
"""Seconds between two writes of the other writer."""


@dataclass
class Transactions:
    """Durations of the transactions of one engine that may write.

    Attributes:
        seconds: of each, from the time at which it had the lock (SQLite) or began (PostgreSQL), to
            the end of its commit.
    """

    seconds: list[float] = field(default_factory=list)

    @property
    def longest(self) -> float:
        """Seconds of the longest one; 0 if there was none."""
        return max(self.seconds, default=0.0)


def watch(engine: Engine) -> Transactions:
    """Measure the transactions of an engine from now on."""
    found = Transactions()
    started: dict[int, float] = {}

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if not connection.get_execution_options().get("store_read_only", False):
            started[id(connection.connection.dbapi_connection)] = time.perf_counter()

    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, _record: object) -> None:
        began = started.pop(id(connection), None)
        if began is not None:
            found.seconds.append(time.perf_counter() - began)

    return found


@dataclass
class OtherWriter:
    """Writes of another connection meanwhile.

    Attributes:
        seconds: of each write.
    """

    seconds: list[float] = field(default_factory=list)


@contextmanager
def other_writer(url: str) -> Iterator[OtherWriter]:
    """Write small entries in a thread, again and again, until the end of the `with` block."""
    engine = open_engine(url, durable=True)
    cache = SolverCache(engine)
    found, over = OtherWriter(), Event()

    def write() -> None:
        number = 0
        while not over.wait(_PROBE_PAUSE):
            started = time.perf_counter()
            cache.put("probe", f"{time.time()}-{number}", b"probe")
            found.seconds.append(time.perf_counter() - started)
            number += 1

    thread = Thread(target=write)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        cache.evict(max_bytes=0, namespaces=["probe"])
        engine.dispose()
