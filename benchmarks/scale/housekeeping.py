"""Times of housekeeping: with nothing to do, and with a tenth of all rows expired."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from sqlalchemy import delete, insert, select

from autoshard_server.settings import Settings
from autoshard_server.store.database import Stores
from autoshard_server.store.idempotency import IdempotencyStore
from autoshard_server.store.tables import plans, unindexed_plans
from benchmarks.scale.locks import other_writer, watch
from benchmarks.scale.rows import SPAN, Filled

_OLD = 0.9
"""Share of the rows that is kept where a tenth is expired."""

_UNINDEXED = 1000
"""Plans that were added without the index."""


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step of housekeeping.

    Attributes:
        name: what it does.
        rows: that it has handled.
        seconds: in all.
        longest: seconds of its longest transaction that may write.
        waited: longest time that another writer's small write took meanwhile, in seconds.
    """

    name: str
    rows: int
    seconds: float
    longest: float
    waited: float


def housekeeping(settings: Settings, filled: Filled) -> Iterator[Step]:
    """Run and measure each step."""
    with closing(Stores(settings)) as stores:
        for name, work in _steps(stores, settings, filled):
            transactions = watch(stores.engine)
            with other_writer(settings.store_url) as writer:
                time.sleep(0.2)
                before = len(writer.seconds)
                started = time.perf_counter()
                rows = work()
                took = time.perf_counter() - started
                time.sleep(0.05)
            waited = max(writer.seconds[before:], default=0.0)
            yield Step(name, rows, took, transactions.longest, waited)


def _steps(
    stores: Stores, settings: Settings, filled: Filled
) -> Iterator[tuple[str, Callable[[], int]]]:
    age = time.time() - filled.now + SPAN * _OLD
    yield "requeue jobs of dead workers: none", stores.jobs.recover
    yield "delete finished jobs: none is expired", lambda: stores.jobs.purge(settings.job_retention)
    yield "delete finished jobs, with events", lambda: stores.jobs.purge(age)
    keys = IdempotencyStore(stores.engine, lifetime=age)
    yield "delete Idempotency-Keys: none is expired", stores.idempotency.purge
    yield "delete Idempotency-Keys", keys.purge
    yield "delete events of the audit log", lambda: stores.audit.purge(age)
    cache = stores.cache
    yield "evict unused entries: none", lambda: cache.evict(max_age=settings.cache_max_age)
    yield "evict unused entries, with their plans in the index", lambda: cache.evict(max_age=age)
    yield "enforce the cache's budget: it is met", cache.enforce_budget
    nbytes = sum(used.nbytes for used in cache.usage().values())
    yield "enforce the cache's budget", lambda: cache.evict(max_bytes=int(nbytes * _OLD))
    yield "refresh the index of plans: it is complete", stores.plans.refresh
    _remove_from_index(stores)
    yield "refresh the index of plans", stores.plans.refresh


def _remove_from_index(stores: Stores) -> None:
    """As if another program had added some plans to the cache."""
    with stores.engine.begin() as connection:
        query = select(plans.c.project, plans.c.id).limit(_UNINDEXED)
        rows = [dict(row) for row in connection.execute(query).mappings()]
        for row in rows:
            same = (plans.c.project == row["project"]) & (plans.c.id == row["id"])
            connection.execute(delete(plans).where(same))
        connection.execute(insert(unindexed_plans), rows)
