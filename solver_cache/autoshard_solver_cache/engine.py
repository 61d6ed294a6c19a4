"""Opening the database behind a store."""

import sqlite3
from pathlib import Path

import platformdirs
from sqlalchemy import Connection, Engine, MetaData, QueuePool, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

_READ_ONLY = "store_read_only"


class StoreUnavailableError(RuntimeError):
    """The database of a store cannot be opened; the message says which and why."""


def default_url() -> str:
    """SQLite file in the user's cache folder, as a database URL."""
    path = platformdirs.user_cache_path("autoshard") / "store.sqlite3"
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def open_engine(url: str, *, busy_timeout: float = 10.0) -> Engine:
    """Open a database; SQLite is set up for many threads and processes on one host.

    A write transaction on SQLite takes the write lock when it begins: one that reads
    first and is upgraded later can fail at once instead of waiting for its turn.

    Args:
        url: SQLAlchemy database URL; `sqlite://` lives in memory, for this engine only.
        busy_timeout: seconds to wait for another writer's lock (SQLite).

    Raises:
        StoreUnavailableError: no such database, driver or folder.
    """
    try:
        parsed = make_url(url)
        engine = _create(parsed)
    except (ArgumentError, NoSuchModuleError, ImportError, OSError) as error:
        raise StoreUnavailableError(
            f"cannot open the database {_redacted(url)}: {error}; give a SQLAlchemy URL such as "
            f"sqlite:////var/lib/autoshard/store.sqlite3, and install its driver"
        ) from error
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, busy_timeout)
    return engine


def reader(engine: Engine) -> Engine:
    """The same database for transactions that only read: they take no write lock."""
    return engine.execution_options(**{_READ_ONLY: True})


def create_tables(engine: Engine, metadata: MetaData) -> None:
    """Create the tables that are missing.

    Raises:
        StoreUnavailableError: the database cannot be read or written.
    """
    try:
        with engine.begin() as connection:
            metadata.create_all(connection)
    except DBAPIError as error:
        raise StoreUnavailableError(
            f"cannot use the database {_redacted(engine.url)}: {error.orig}; "
            "give the URL of one that can be written"
        ) from error


def _create(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    if not url.database or url.database == ":memory:":
        # A database in memory belongs to its connection: all threads take turns on one.
        return create_engine(
            url,
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            connect_args={"check_same_thread": False},
        )
    path = Path(url.database).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_engine(url.set(database=str(path)))


def _set_up_sqlite(engine: Engine, busy_timeout: float) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        # The driver's own BEGIN comes too late and is always deferred; we send ours.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout * 1000)}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _redacted(url: str | URL) -> str:
    try:
        return repr(make_url(url).render_as_string())
    except ArgumentError:
        return "whose URL cannot be read"
