"""Opening the service's database: its migrations, and all stores together."""

import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, delete, insert, inspect, select, update

from autoshard_server.settings import Settings
from autoshard_server.store.api_keys import ApiKeyStore
from autoshard_server.store.artifacts import GraphStore, PlanIndex
from autoshard_server.store.audit import AuditLog
from autoshard_server.store.caches import open_cache
from autoshard_server.store.idempotency import IdempotencyStore
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.tables import compatibility
from autoshard_server.store.topologies import TopologyStore
from autoshard_solver_cache import (
    Cache,
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
        audit: who changed what.

    Raises:
        StoreUnavailableError: it cannot be opened or written, or a newer release has migrated it so
            that this one does not work on it.
    """

    def __init__(self, settings: Settings) -> None:
        self.engine = open_engine(settings.store_url, durable=True)
        migrate(self.engine)
        self.cache: Cache = open_cache(self.engine, settings)
        self.jobs = JobStore(
            self.engine,
            lease=settings.lease,
            max_attempts=settings.max_attempts,
            weights=settings.project_weights,
        )
        self.graphs = GraphStore(self.cache)
        self.plans = PlanIndex(self.engine, self.cache)
        self.topologies = TopologyStore(self.engine)
        self.idempotency = IdempotencyStore(self.engine, most=settings.max_project_records)
        self.api_keys = ApiKeyStore(self.engine)
        self.audit = AuditLog(self.engine)

    def close(self) -> None:
        """Write what is still in memory, and close the connections."""
        try:
            self.api_keys.write_uses()
        except StoreUnavailableError as error:
            _log.warning("the last uses of keys are lost: %s", error)
        self.engine.dispose()


def migrate(engine: Engine) -> None:
    """Run the missing migrations in one transaction; concurrent callers wait for each other.

    A database that a newer release has migrated stays as it is, if this release works on it.

    Raises:
        StoreUnavailableError: the database cannot be written, or a newer release has migrated it
            so that this release does not work on it.
    """
    if not _needs_migration(engine):
        return
    with engine.begin() as connection:
        lock(connection, _LOCK)
        if not _is_of_newer_release(connection):
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.execute(delete(compatibility))
            row = {"min_compatible": min_compatible(), "release": version("autoshard")}
            connection.execute(insert(compatibility).values(row))
    _log.info("the database was migrated to revision %s", newest_revision())


def check_schema(engine: Engine) -> None:
    """Check that this release works on the tables of a database.

    Raises:
        StoreUnavailableError: it does not, or the database cannot be read.
    """
    if _needs_migration(engine):
        url = engine.url.render_as_string()
        raise StoreUnavailableError(
            f"the database {url!r} lacks migrations up to {newest_revision()}, as if an older one "
            "had been restored; restart the service, which runs them"
        )


def check_writable(engine: Engine) -> None:
    """Check that a database can be written: it may be a replica, locked, or on a full disk.

    Raises:
        StoreUnavailableError: it cannot.
    """
    same = update(compatibility).values(release=compatibility.c.release)
    with engine.begin() as connection:
        connection.execute(same)


@cache
def newest_revision() -> str:
    """The newest migration of this release."""
    (head,) = _scripts().get_heads()
    return head


@cache
def min_compatible() -> str:
    """The oldest migration whose releases work on a database with the newest one.

    It is that of the last migration that has an attribute `min_compatible`.
    """
    newest_first = (script.module for script in _scripts().walk_revisions())
    declared = (getattr(module, "min_compatible", None) for module in newest_first)
    return str(next(revision for revision in declared if revision is not None))


def _needs_migration(engine: Engine) -> bool:
    """True if the database has fewer migrations than this release.

    Raises:
        StoreUnavailableError: this release does not work on it, or it cannot be read.
    """
    with reader(engine).begin() as connection:
        return _heads(connection) != {newest_revision()} and not _is_of_newer_release(connection)


def _is_of_newer_release(connection: Connection) -> bool:
    """True if a newer release has migrated the database, and this one works on it.

    Raises:
        StoreUnavailableError: a newer release has migrated it, and this one does not work on it.
    """
    known = {script.revision for script in _scripts().walk_revisions()}
    unknown = sorted(_heads(connection) - known)
    if not unknown:
        return False
    # A database of another program may have a table of migrations too.
    is_ours = inspect(connection).has_table(compatibility.name)
    row = connection.execute(select(compatibility)).one_or_none() if is_ours else None
    if row is not None and row.min_compatible in known:
        return True
    needed = f", which needs migration {row.min_compatible}" if row is not None else ""
    release = f"autoshard {row.release}" if row is not None else "a newer release"
    url = connection.engine.url.render_as_string()
    raise StoreUnavailableError(
        f"the database {url!r} has migration {', '.join(unknown)} of {release}{needed}, but this "
        f"release, {version('autoshard')}, has only those up to {newest_revision()}: install a "
        "newer release, or give another database"
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
