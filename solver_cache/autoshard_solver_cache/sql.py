"""A cache in a database: SQLite by default, any other by its SQLAlchemy URL."""

import hashlib
import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Engine,
    Float,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import IntegrityError

from autoshard_solver_cache.cache import CacheStats, EntryInfo
from autoshard_solver_cache.engine import (
    StoreUnavailableError,
    create_tables,
    default_url,
    open_engine,
    reader,
)
from autoshard_solver_cache.room import Room

_log = logging.getLogger(__name__)

_TOUCH_INTERVAL = 3600.0
"""Seconds by which `used_at` may lag, so that a read is rarely also a write."""

_COMPRESSION_LEVEL = 1
"""The fastest: tables and plans are full of repetition, which it finds as well."""

_PAGE = 1000
"""Entries that are listed at once."""

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
    # With the sizes in it, room is checked without reading the entries.
    Index("cache_entries_by_use", "used_at", "stored_size"),
)


_INFO = (
    _entries.c.namespace,
    _entries.c.key,
    _entries.c.size,
    _entries.c.stored_size,
    _entries.c.created_at,
    _entries.c.used_at,
)


class _Entry(NamedTuple):
    sha256: str
    size: int
    created_at: float
    used_at: float
    body: bytes


class SolverCache:
    """Compressed bytes under keys, checked on every read.

    An entry whose bytes no longer match their digest is dropped and counts as a miss, so
    a damaged file costs a solve and never a wrong plan.

    Args:
        store: a database URL, or an engine of `open_engine` to share; the user's cache
            folder if left out.
        max_bytes: room for all entries together, as stored; the least recently used go
            first.

    Raises:
        StoreUnavailableError: the database cannot be opened or written.
    """

    def __init__(self, store: str | Engine | None = None, *, max_bytes: int | None = None) -> None:
        self._owns_engine = not isinstance(store, Engine)
        self._engine = store if isinstance(store, Engine) else open_engine(store or default_url())
        self._reader = reader(self._engine)
        self._room = None if max_bytes is None else Room(max_bytes)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()
        create_tables(self._engine, _metadata)

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key, or None: nothing there, or no longer intact."""
        entry = self._find(namespace, key)
        body = None if entry is None else self._checked(namespace, key, entry)
        if entry is None or body is None:
            self._count(namespace, "misses")
            return None
        self._count(namespace, "hits")
        self._touch(namespace, key, entry)
        return body

    def read(self, namespace: str, key: str) -> bytes | None:
        """What `get` gives; does not count as a use."""
        entry = self._find(namespace, key)
        return None if entry is None else self._checked(namespace, key, entry)

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is."""
        packed = zlib.compress(body, _COMPRESSION_LEVEL)
        now = time.time()
        values = {
            "namespace": namespace,
            "key": key,
            "sha256": hashlib.sha256(body).hexdigest(),
            "size": len(body),
            "stored_size": len(packed),
            "created_at": now,
            "used_at": now,
            "body": packed,
        }
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(_entries).values(values))
        except IntegrityError:
            return False
        if self._room is not None and self._room.is_due(len(packed)):
            self.collect(max_bytes=self._room.max_bytes)
        return True

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""
        with self._engine.begin() as connection:
            return connection.execute(delete(_entries).where(_is(namespace, key))).rowcount > 0

    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """What is known of an entry, or None; does not count as a use."""
        with self._reader.begin() as connection:
            row = connection.execute(select(*_INFO).where(_is(namespace, key))).one_or_none()
        return None if row is None else EntryInfo(*row)

    def held(self, namespace: str, keys: Sequence[str]) -> frozenset[str]:
        """Those of the keys that have an entry; does not count as a use."""
        asked = (_entries.c.namespace == namespace) & _entries.c.key.in_(keys)
        with self._reader.begin() as connection:
            return frozenset(connection.execute(select(_entries.c.key).where(asked)).scalars())

    def namespaces(self) -> list[str]:
        """Namespaces that hold something, sorted."""
        with self._reader.begin() as connection:
            found = connection.execute(select(_entries.c.namespace).distinct()).scalars()
            return sorted(found)

    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """What a namespace holds, by key; entries that come meanwhile may be left out."""
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

    def collect(self, *, max_bytes: int | None = None, max_age: float | None = None) -> int:
        """Drop what was used longest ago until both limits hold; how many entries."""
        dropped = 0
        if max_age is not None:
            old = _entries.c.used_at < time.time() - max_age
            with self._engine.begin() as connection:
                dropped = connection.execute(delete(_entries).where(old)).rowcount
        return dropped if max_bytes is None else dropped + self._make_room(max_bytes)

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""
        query = select(func.count(), func.coalesce(func.sum(_entries.c.stored_size), 0))
        with self._reader.begin() as connection:
            row = connection.execute(query.where(_entries.c.namespace == namespace)).one()
        with self._lock:
            return CacheStats(
                num_entries=int(row[0]),
                nbytes=int(row[1]),
                hits=self._counts[namespace, "hits"],
                misses=self._counts[namespace, "misses"],
                corrupted=self._counts[namespace, "corrupted"],
            )

    def close(self) -> None:
        """Close the connections, unless the engine was handed in."""
        if self._owns_engine:
            self._engine.dispose()

    def _count(self, namespace: str, event: str) -> None:
        with self._lock:
            self._counts[namespace, event] += 1

    def _find(self, namespace: str, key: str) -> _Entry | None:
        columns = [_entries.c[name] for name in _Entry._fields]
        with self._reader.begin() as connection:
            row = connection.execute(select(*columns).where(_is(namespace, key))).one_or_none()
        return None if row is None else _Entry(*row)

    def _checked(self, namespace: str, key: str, entry: _Entry) -> bytes | None:
        body = _unpack(entry)
        if body is None:
            self._drop_corrupted(namespace, key, entry)
        return body

    def _drop_corrupted(self, namespace: str, key: str, entry: _Entry) -> None:
        self._count(namespace, "corrupted")
        _log.warning("dropped the corrupted cache entry %s/%s", namespace, key)
        # Another process may have dropped and rewritten it meanwhile: drop only what we saw.
        seen = _entries.c.created_at == entry.created_at
        with self._engine.begin() as connection:
            connection.execute(delete(_entries).where(_is(namespace, key) & seen))

    def _touch(self, namespace: str, key: str, entry: _Entry) -> None:
        now = time.time()
        if now - entry.used_at < _TOUCH_INTERVAL:
            return
        # Whoever reads has what was asked for, also where the disk is full.
        with suppress(StoreUnavailableError), self._engine.begin() as connection:
            connection.execute(update(_entries).where(_is(namespace, key)).values(used_at=now))

    def _make_room(self, max_bytes: int) -> int:
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


def _is(namespace: str, key: str) -> ColumnElement[bool]:
    return (_entries.c.namespace == namespace) & (_entries.c.key == key)


def _unpack(entry: _Entry) -> bytes | None:
    """The bytes of an intact entry, else None; never makes more than the stated size."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(entry.body, max(entry.size, 0) + 1)
    except (zlib.error, TypeError):
        # SQLite does not mind where damage has turned bytes into text.
        return None
    intact = len(body) == entry.size and hashlib.sha256(body).hexdigest() == entry.sha256
    return body if intact else None
