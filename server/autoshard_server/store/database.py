"""Opening the service's database: its migrations, and all stores together."""

import logging
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

from autoshard_server.settings import Settings
from autoshard_server.store.api_keys import ApiKeyStore
from autoshard_server.store.artifacts import GraphStore, PlanIndex
from autoshard_server.store.idempotency import IdempotencyStore
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.topologies import TopologyStore
from autoshard_solver_cache import (
    Cache,
    SolverCache,
    StoreUnavailableError,
    lock,
    open_engine,
    reader,
)

_LOCK = "autoshard migrations"

_log = logging.getLogger(__name__)

# It logs every read of the revision.
logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)


class Stores:
    """The stores of one database, which is opened and migrated.

    Args:
        settings: of the service, with the URL of the database.

    Attributes:
        engine: its connections.
        cache: plans, graphs and solved blocks, which can be evicted.
        jobs: the queue.
        graphs: uploads by digest, in the cache.
        plans: an index of the plans in the cache.
        topologies: stored topologies that requests can name.
        idempotency: the Idempotency-Keys of requests.
        api_keys: the keys of callers.

    Raises:
        StoreUnavailableError: it cannot be opened or written, or a newer release migrated it.
    """

    def __init__(self, settings: Settings) -> None:
        self.engine = open_engine(settings.store_url, durable=True)
        migrate(self.engine)
        self.cache: Cache = SolverCache(self.engine, max_bytes=settings.cache_max_bytes)
        self.jobs = JobStore(self.engine, lease=settings.lease, max_attempts=settings.max_attempts)
        self.graphs = GraphStore(self.cache)
        self.plans = PlanIndex(self.engine, self.cache)
        self.topologies = TopologyStore(self.engine)
        self.idempotency = IdempotencyStore(self.engine)
        self.api_keys = ApiKeyStore(self.engine)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()


def migrate(engine: Engine) -> None:
    """Run the missing migrations in one transaction; concurrent callers wait for each other.

    Raises:
        StoreUnavailableError: the database cannot be written, or a newer release migrated it.
    """
    if is_current(engine):
        return
    with engine.begin() as connection:
        lock(connection, _LOCK)
        _refuse_newer(connection)
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    _log.info("the database was migrated to revision %s", newest_revision())


def is_current(engine: Engine) -> bool:
    """True if the database has the newest migration of this release.

    Raises:
        StoreUnavailableError: the database cannot be read.
    """
    with reader(engine).begin() as connection:
        return _heads(connection) == {newest_revision()}


@cache
def newest_revision() -> str:
    """The newest migration of this release."""
    (head,) = _scripts().get_heads()
    return head


def _refuse_newer(connection: Connection) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    unknown = sorted(_heads(connection) - known)
    if unknown:
        url = connection.engine.url.render_as_string()
        raise StoreUnavailableError(
            f"the database {url!r} has migration {', '.join(unknown)}, but this release has "
            f"only those up to {newest_revision()}: a newer release has written it; "
            "install that one, or give another database"
        )


def _heads(connection: Connection) -> set[str]:
    return set(MigrationContext.configure(connection).get_current_heads())


def _config() -> Config:
    config = Config()
    # Percent signs must be escaped: the configuration interpolates them.
    folder = str(Path(__file__).with_name("migrations")).replace("%", "%%")
    config.set_main_option("script_location", folder)
    return config


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
