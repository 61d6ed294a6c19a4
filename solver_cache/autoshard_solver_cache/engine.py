"""Opening databases: SQLite for many processes of one host, PostgreSQL for several hosts."""

import hashlib
import sqlite3
import time
from pathlib import Path

import platformdirs
from sqlalchemy import (
    Connection,
    Engine,
    PoolProxiedConnection,
    QueuePool,
    create_engine,
    event,
    func,
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

_FULL_STATE = "53100"
"""SQLSTATE of PostgreSQL: disk full."""
_READ_ONLY_STATE = "25006"
"""SQLSTATE of PostgreSQL: a server that was failed over to, and is a replica still."""

_READ_ONLY = "store_read_only"

_LOCK_POLL = 0.02
"""Seconds between attempts to get a lock of another connection."""

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
"""Errors of the file or the disk, rather than of the statement."""

_POSTGRES_ARGUMENTS: dict[str, str | int] = {
    # With the defaults, detecting a lost host takes a quarter of an hour.
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c statement_timeout=60000 -c idle_in_transaction_session_timeout=60000",
}


class StoreUnavailableError(RuntimeError):
    """The database cannot be used now; the message names it and the reason."""


class StoreFullError(StoreUnavailableError):
    """The disk of the database is full; nothing was written."""


def default_url() -> str:
    """URL of the SQLite file in the user's cache folder."""
    path = platformdirs.user_cache_path("autoshard") / "store.sqlite3"
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def open_engine(url: str, *, busy_timeout: float = 10.0, durable: bool = False) -> Engine:
    """Open a database; SQLite is set up for many threads and processes on one host.

    A write transaction on SQLite takes the write lock when it begins: a transaction that reads
    first and takes the lock later can fail immediately instead of waiting for it.

    A database that becomes unavailable, locked or full while the engine is used raises
    `StoreUnavailableError` or `StoreFullError` as well; the next use connects again.

    Args:
        url: SQLAlchemy database URL; `sqlite://` is in memory, for this engine only.
        busy_timeout: seconds to wait for another writer's lock (SQLite).
        durable: true if commits must survive a power loss, not only the end of a process (SQLite;
            for PostgreSQL, see its setting `synchronous_commit`).

    Raises:
        StoreUnavailableError: no such database, driver or folder.
    """
    try:
        parsed = make_url(url)
        engine = _create(parsed)
    except (ArgumentError, NoSuchModuleError, ImportError, OSError) as error:
        raise StoreUnavailableError(
            f"cannot open the database {redacted(url)}: "
            f"{getattr(error, 'strerror', None) or error}; give a SQLAlchemy URL such as "
            f"sqlite:////var/lib/autoshard/store.sqlite3, and install its driver"
        ) from error
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine, busy_timeout, "FULL" if durable else "NORMAL")
    event.listen(engine, "handle_error", _raise_store_error)
    return engine


def reader(engine: Engine) -> Engine:
    """The same database for read-only transactions, which take no write lock."""
    return engine.execution_options(**{_READ_ONLY: True})


def lock(connection: Connection, name: str) -> None:
    """Take a lock of the whole database until the transaction ends.

    On SQLite nothing is done: every transaction that may write has the lock already.
    """
    if connection.dialect.name == "postgresql":
        digest = hashlib.sha256(name.encode()).digest()
        number = int.from_bytes(digest[:8], "big", signed=True)
        connection.execute(select(func.pg_advisory_xact_lock(number)))


def _raise_store_error(context: ExceptionContext) -> None:
    """Replace a driver's error by a `StoreUnavailableError` if the database is the cause."""
    error, cause = context.sqlalchemy_exception, context.original_exception
    if context.is_pre_ping or context.engine is None or not isinstance(error, DBAPIError):
        return
    where = redacted(context.engine.url)
    if isinstance(cause, sqlite3.Error):
        # Extended codes have the plain one in their last byte.
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        # The file was deleted, and opening it anew has made an empty one.
        is_gone = code == sqlite3.SQLITE_ERROR and "no such table" in str(cause)
        is_unavailable, is_full = is_gone or code in _SQLITE_CODES, code == sqlite3.SQLITE_FULL
    else:
        code = getattr(cause, "sqlstate", None)
        is_unreachable = isinstance(error, OperationalError | InterfaceError)
        is_unavailable = is_unreachable or code == _READ_ONLY_STATE
        is_full = code == _FULL_STATE
    if is_full:
        raise StoreFullError(
            f"the disk of the database {where} is full; nothing was written: free some space"
        ) from cause
    if is_unavailable:
        raise StoreUnavailableError(
            f"cannot use the database {where}: {cause}; give the URL of one that can be read "
            "and written, or wait until it can"
        ) from cause


class _ConnectionPool(QueuePool):
    """Raises `StoreUnavailableError` if no connection becomes free in time."""

    def connect(self) -> PoolProxiedConnection:
        try:
            return super().connect()
        except PoolTimeoutError as error:
            raise StoreUnavailableError(
                f"all connections to the database are in use; none was free in "
                f"{self.timeout():g} seconds: try again"
            ) from error


def _create(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        return _create_postgres(url)
    if url.get_backend_name() != "sqlite":
        raise ArgumentError(f"{url.get_backend_name()!r} is neither SQLite nor PostgreSQL")
    if not url.database or url.database == ":memory:":
        # A database in memory belongs to its connection, so all threads share one connection.
        return create_engine(
            url,
            poolclass=_ConnectionPool,
            pool_size=1,
            max_overflow=0,
            connect_args={"check_same_thread": False},
        )
    path = Path(url.database).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    return create_engine(url.set(database=str(path)), poolclass=_ConnectionPool)


def _create_postgres(url: URL) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    defaults = {k: v for k, v in _POSTGRES_ARGUMENTS.items() if k not in url.query}
    return create_engine(url, pool_pre_ping=True, poolclass=_ConnectionPool, connect_args=defaults)


def _set_up_sqlite(engine: Engine, busy_timeout: float, synchronous: str) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        # The driver's BEGIN is late and always deferred; it is sent explicitly instead.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout * 1000)}")
        _write_ahead(connection, busy_timeout)
        connection.execute(f"PRAGMA synchronous = {synchronous}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _write_ahead(connection: sqlite3.Connection, timeout: float) -> None:
    """Switch to a write-ahead log.

    If several connections open a new database at once, all but one fail immediately because it
    is locked: SQLite does not apply its busy timeout here.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_POLL)
        else:
            return


def redacted(url: str | URL) -> str:
    """A database URL for messages, without its password."""
    try:
        return repr(make_url(url).render_as_string())
    except ArgumentError:
        return "whose URL cannot be read"
