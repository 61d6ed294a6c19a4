"""Everything that the service keeps, opened together."""

from dataclasses import dataclass

from sqlalchemy import Engine

from autoshard_server.jobs.job_store import JobStore
from autoshard_server.settings import Settings
from autoshard_server.store import (
    ApiKeyStore,
    GraphStore,
    IdempotencyStore,
    PlanIndex,
    TopologyStore,
    is_current,
    migrate,
)
from autoshard_solver_cache import Cache, SolverCache, open_engine


@dataclass(frozen=True, slots=True)
class Stores:
    """Views of one database.

    Attributes:
        engine: its connections.
        cache: plans, graphs, solved blocks: what can be dropped and made again.
        jobs: what was accepted, until it is done and forgotten.
        graphs: uploads by digest, in the cache.
        plans: a list of the plans in the cache.
        topologies: those that requests can name, beside the presets.
        idempotency: what was answered under which Idempotency-Key.
        api_keys: who may ask.
    """

    engine: Engine
    cache: Cache
    jobs: JobStore
    graphs: GraphStore
    plans: PlanIndex
    topologies: TopologyStore
    idempotency: IdempotencyStore
    api_keys: ApiKeyStore

    def is_current(self) -> bool:
        """Whether the database is as this release wants it."""
        return is_current(self.engine)

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()


def open_stores(settings: Settings) -> Stores:
    """Open the database of the settings, and bring it up to date.

    Raises:
        StoreUnavailableError: it cannot be opened or written, or a newer release wrote it.
    """
    engine = open_engine(settings.store_url, durable=True)
    migrate(engine)
    cache = SolverCache(engine, max_bytes=settings.cache_max_bytes)
    return Stores(
        engine=engine,
        cache=cache,
        jobs=JobStore(engine, lease=settings.lease, max_attempts=settings.max_attempts),
        graphs=GraphStore(cache),
        plans=PlanIndex(engine, cache),
        topologies=TopologyStore(engine),
        idempotency=IdempotencyStore(engine),
        api_keys=ApiKeyStore(engine),
    )
