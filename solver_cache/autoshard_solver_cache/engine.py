"""Opening the database behind a store."""

import hashlib
import sqlite3
import time
from pathlib import Path

import platformdirs
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    PoolProxiedConnection,
    QueuePool,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
)
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

_READ_ONLY = "store_read_only"

_LOOK = 0.02
"""Seconds between attempts to get what another connection has locked."""

_SQLITE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_READONLY,
    }
)
"""What is wrong with the file or the disk, and not with what we asked."""

_POSTGRES_ARGUMENTS: dict[str, str | int] = {
    # A host that is gone says nothing: without these, waiting for it takes a quarter of an hour.
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c statement_timeout=60000 -c idle_in_transaction_session_timeout=60000",
}


class StoreUnavailableError(RuntimeError):
    """The database of a store cannot be used now; the message says which and why."""


class StoreFullError(StoreUnavailableError):
    """The disk of a store is full; what was to be written is not there, not even in part."""


def default_url() -> str:
    """SQLite file in the user's cache folder, as a database URL."""
    path = platformdirs.user_cache_path("autoshard") / "store.sqlite3"
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def open_engine(url: str, *, busy_timeout: float = 10.0, durable: bool = False) -> Engine:
    """Open a database; SQLite is set up for many threads and processes on one host.

    A write transaction on SQLite takes the write lock when it begins: one that reads
    first and is upgraded later can fail at once instead of waiting for its turn.

    A database that is gone, locked or out of room while the engine is used raises
    `StoreUnavailableError` or `StoreFullError` as well; the next use connects anew.

    Args:
        url: SQLAlchemy database URL; `sqlite://` lives in memory, for this engine only.
        busy_timeout: seconds to wait for another writer's lock (SQLite).
        durable: what was committed outlives a loss of power, not only the end of a process
            (SQLite; PostgreSQL decides by its own `synchronous_commit`).

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
        _set_up_sqlite(engine, busy_timeout, "FULL" if durable else "NORMAL")
    event.listen(engine, "handle_error", _name_trouble)
    return engine


def reader(engine: Engine) -> Engine:
    """The same database for transactions that only read: they take no write lock."""
    return engine.execution_options(**{_READ_ONLY: True})


def lock(connection: Connection, name: str) -> None:
    """Hold a lock of the whole database until the transaction ends.

    On SQLite every transaction that may write holds the only one already.
    """
    if connection.dialect.name == "postgresql":
        digest = hashlib.sha256(name.encode()).digest()
        number = int.from_bytes(digest[:8], "big", signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(number)))


def create_tables(engine: Engine, metadata: MetaData) -> None:
    """Create the tables that are missing.

    Raises:
        StoreUnavailableError: the database cannot be read or written.
    """
    with reader(engine).begin() as connection:
        there = set(inspect(connection).get_table_names())
    if there.issuperset(metadata.tables):
        return
    try:
        with engine.begin() as connection:
            lock(connection, "autoshard tables")
            metadata.create_all(connection)
    except DBAPIError as error:
        raise StoreUnavailableError(
            f"cannot use the database {_redacted(engine.url)}: {error.orig}; "
            "give the URL of one that can be written"
        ) from error


def _name_trouble(context: ExceptionContext) -> None:
    """Raise an error that says which database is in trouble, where that is what is wrong."""
    error, cause = context.sqlalchemy_exception, context.original_exception
    if context.is_pre_ping or context.engine is None or not isinstance(error, DBAPIError):
        return
    where = _redacted(context.engine.url)
    if isinstance(cause, sqlite3.Error):
        # Extended codes have the plain one in their last byte.
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        troubled, is_full = code in _SQLITE_CODES, code == sqlite3.SQLITE_FULL
    else:
        troubled = isinstance(error, OperationalError | InterfaceError)
        is_full = getattr(cause, "sqlstate", None) == "53100"
    if is_full:
        raise StoreFullError(
            f"the disk of the database {where} is full; nothing was written: make room"
        ) from cause
    if troubled:
        raise StoreUnavailableError(
            f"cannot use the database {where}: {cause}; give the URL of one that can be read "
            "and written, or wait until it can"
        ) from cause


class _Pool(QueuePool):
    """Says that it is busy as a store that cannot be used now."""

    def connect(self) -> PoolProxiedConnection:
        try:
            return super().connect()
        except PoolTimeoutError as error:
            raise StoreUnavailableError(
                f"all connections to the database are in use; none was free in "
                f"{self.timeout():g} seconds: ask again"
            ) from error


def _create(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return _create_remote(url)
    if not url.database or url.database == ":memory:":
        # A database in memory belongs to its connection: all threads take turns on one.
        return create_engine(
            url,
            poolclass=_Pool,
            pool_size=1,
            max_overflow=0,
            connect_args={"check_same_thread": False},
        )
    path = Path(url.database).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_engine(url.set(database=str(path)), poolclass=_Pool)


def _create_remote(url: URL) -> Engine:
    if url.get_backend_name() != "postgresql":
        return create_engine(url, pool_pre_ping=True, poolclass=_Pool)
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    given = {k: v for k, v in _POSTGRES_ARGUMENTS.items() if k not in url.query}
    return create_engine(url, pool_pre_ping=True, poolclass=_Pool, connect_args=given)


def _set_up_sqlite(engine: Engine, busy_timeout: float, synchronous: str) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        # The driver's own BEGIN comes too late and is always deferred; we send ours.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout * 1000)}")
        _write_ahead(connection, busy_timeout)
        connection.execute(f"PRAGMA synchronous = {synchronous}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _write_ahead(connection: sqlite3.Connection, patience: float) -> None:
    """Keep a write-ahead log.

    Of several that open a new database at once, all but one are told at once that it is locked:
    here SQLite does not wait by itself.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)
        else:
            return


def _redacted(url: str | URL) -> str:
    try:
        return repr(make_url(url).render_as_string())
    except ArgumentError:
        return "whose URL cannot be read"
