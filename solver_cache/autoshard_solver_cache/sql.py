"""A cache in a database: SQLite by default, or another one by its SQLAlchemy URL."""

import hashlib
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Index,
    LargeBinary,
    MetaData,
    PoolProxiedConnection,
    QueuePool,
    Row,
    String,
    Table,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    make_url,
    select,
    tuple_,
    update,
)
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from autoshard_solver_cache.cache import Cache, EntryInfo

_log = logging.getLogger(__name__)

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
            f"cannot open the database {_redacted(url)}: "
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
    where = _redacted(context.engine.url)
    if isinstance(cause, sqlite3.Error):
        # Extended codes have the plain one in their last byte.
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        is_unavailable, is_full = code in _SQLITE_CODES, code == sqlite3.SQLITE_FULL
    else:
        is_unavailable = isinstance(error, OperationalError | InterfaceError)
        is_full = getattr(cause, "sqlstate", None) == "53100"
    if is_full:
        raise StoreFullError(
            f"the disk of the database {where} is full; nothing was written: free some space"
        ) from cause
    if is_unavailable:
        raise StoreUnavailableError(
            f"cannot use the database {where}: {cause}; give the URL of one that can be read "
            "and written, or wait until it can"
        ) from cause


class _Pool(QueuePool):
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
    if url.get_backend_name() != "sqlite":
        return _create_remote(url)
    if not url.database or url.database == ":memory:":
        # A database in memory belongs to its connection, so all threads share one connection.
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
    defaults = {k: v for k, v in _POSTGRES_ARGUMENTS.items() if k not in url.query}
    return create_engine(url, pool_pre_ping=True, poolclass=_Pool, connect_args=defaults)


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


def _redacted(url: str | URL) -> str:
    try:
        return repr(make_url(url).render_as_string())
    except ArgumentError:
        return "whose URL cannot be read"


_COMPRESSION_LEVEL = 1
"""The fastest: blocks and plans are repetitive, so higher levels gain little."""

_PAGE = 1000
"""Entries that are listed by one query."""

_metadata = MetaData()

_entries = Table(
    "cache_entries",
    _metadata,
    Column("namespace", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("stored_size", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
    Column("body", LargeBinary, nullable=False),
    # Includes the sizes, so that the budget is checked without reading the entries.
    Index("cache_entries_by_use", "used_at", "stored_size"),
)

_INFO = tuple(_entries.c[name] for name in EntryInfo.__slots__)


class SolverCache(Cache):
    """Compressed bytes under keys, checked on every read.

    An entry whose bytes no longer match their digest is dropped and counts as a miss, so
    a damaged file costs a solve and never a wrong plan.

    Args:
        store: a database URL, or an engine of `open_engine` to share; the user's cache
            folder if left out.
        max_bytes: budget for all entries together, as stored; the least recently used are
            evicted first.

    Raises:
        StoreUnavailableError: the database cannot be opened or written.
    """

    def __init__(self, store: str | Engine | None = None, *, max_bytes: int | None = None) -> None:
        super().__init__(max_bytes)
        self._owns_engine = not isinstance(store, Engine)
        self._engine = store if isinstance(store, Engine) else open_engine(store or default_url())
        self._reader = reader(self._engine)
        _create_table(self._engine)

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key exists, which leaves its entry unchanged."""
        packed = zlib.compress(body, _COMPRESSION_LEVEL)
        now = time.time()
        statement = insert(_entries).values(
            namespace=namespace,
            key=key,
            sha256=hashlib.sha256(body).hexdigest(),
            size=len(body),
            stored_size=len(packed),
            created_at=now,
            used_at=now,
            body=packed,
        )
        try:
            with self._engine.begin() as connection:
                connection.execute(statement)
        except IntegrityError:
            return False
        self._enforce_budget(len(packed))
        return True

    def delete(self, namespace: str, key: str) -> bool:
        """Delete an entry; False if there is none."""
        with self._engine.begin() as connection:
            return connection.execute(delete(_entries).where(_is(namespace, key))).rowcount > 0

    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """Metadata of an entry, or None; does not count as a use."""
        with self._reader.begin() as connection:
            row = connection.execute(select(*_INFO).where(_is(namespace, key))).one_or_none()
        return None if row is None else EntryInfo(*row)

    def existing(self, namespace: str, keys: Sequence[str]) -> frozenset[str]:
        """The keys that have an entry; does not count as a use."""
        wanted = (_entries.c.namespace == namespace) & _entries.c.key.in_(keys)
        with self._reader.begin() as connection:
            return frozenset(connection.execute(select(_entries.c.key).where(wanted)).scalars())

    def namespaces(self) -> list[str]:
        """Namespaces that have entries, sorted."""
        with self._reader.begin() as connection:
            found = connection.execute(select(_entries.c.namespace).distinct()).scalars()
            return sorted(found)

    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """Entries of a namespace, ordered by key; ones added meanwhile may be left out."""
        query = select(*_INFO).where(_entries.c.namespace == namespace)
        last = ""
        while True:
            page = query.where(_entries.c.key > last).order_by(_entries.c.key).limit(_PAGE)
            with self._reader.begin() as connection:
                rows = connection.execute(page).all()
            yield from (EntryInfo(*row) for row in rows)
            if len(rows) < _PAGE:
                return
            last = rows[-1].key

    def evict(self, *, max_bytes: int | None = None, max_age: float | None = None) -> int:
        """Delete the least recently used entries until both limits are met; return the number."""
        deleted = 0
        if max_age is not None:
            old = _entries.c.used_at < time.time() - max_age
            with self._engine.begin() as connection:
                deleted = connection.execute(delete(_entries).where(old)).rowcount
        return deleted if max_bytes is None else deleted + self._evict_excess(max_bytes)

    def close(self) -> None:
        """Close the connections, unless the engine is shared."""
        if self._owns_engine:
            self._engine.dispose()

    def _load(self, namespace: str, key: str) -> tuple[bytes, float] | None:
        query = select(_entries).where(_is(namespace, key))
        with self._reader.begin() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        body = _decompress(row)
        if body is not None:
            return body, row.used_at
        self._count(namespace, "corrupted")
        _log.warning("dropped the corrupted cache entry %s/%s", namespace, key)
        # Another process may have replaced it meanwhile: delete only the entry that was read.
        same = _entries.c.created_at == row.created_at
        with self._engine.begin() as connection:
            connection.execute(delete(_entries).where(_is(namespace, key) & same))
        return None

    def _touch(self, namespace: str, key: str) -> None:
        statement = update(_entries).where(_is(namespace, key)).values(used_at=time.time())
        # The read has succeeded, even if the disk is full.
        with suppress(StoreUnavailableError), self._engine.begin() as connection:
            connection.execute(statement)

    def _usage(self, namespace: str) -> tuple[int, int]:
        query = select(func.count(), func.coalesce(func.sum(_entries.c.stored_size), 0))
        with self._reader.begin() as connection:
            row = connection.execute(query.where(_entries.c.namespace == namespace)).one()
        return int(row[0]), int(row[1])

    def _evict_excess(self, max_bytes: int) -> int:
        with self._reader.begin() as connection:
            total = connection.execute(select(func.sum(_entries.c.stored_size))).scalar_one()
        if (total or 0) <= max_bytes:
            return 0
        newest_first = (_entries.c.used_at.desc(), _entries.c.namespace, _entries.c.key)
        running = func.sum(_entries.c.stored_size).over(order_by=newest_first)
        ranked = select(_entries.c.namespace, _entries.c.key, running.label("total")).subquery()
        excess = select(ranked.c.namespace, ranked.c.key).where(ranked.c.total > max_bytes)
        with self._engine.begin() as connection:
            key = tuple_(_entries.c.namespace, _entries.c.key)
            return connection.execute(delete(_entries).where(key.in_(excess))).rowcount


def _create_table(engine: Engine) -> None:
    """Create the table of entries if it is missing.

    Raises:
        StoreUnavailableError: the database cannot be read or written.
    """
    with reader(engine).begin() as connection:
        if inspect(connection).has_table(_entries.name):
            return
    try:
        with engine.begin() as connection:
            lock(connection, "autoshard tables")
            _metadata.create_all(connection)
    except DBAPIError as error:
        raise StoreUnavailableError(
            f"cannot use the database {_redacted(engine.url)}: {error.orig}; "
            "give the URL of one that can be written"
        ) from error


def _is(namespace: str, key: str) -> ColumnElement[bool]:
    return (_entries.c.namespace == namespace) & (_entries.c.key == key)


def _decompress(row: Row[Any]) -> bytes | None:
    """The bytes of an intact entry, else None; never produces more than the stated size."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(row.body, max(row.size, 0) + 1)
    except (zlib.error, TypeError):
        # In a damaged SQLite file, the column may be text.
        return None
    intact = len(body) == row.size and hashlib.sha256(body).hexdigest() == row.sha256
    return body if intact else None
