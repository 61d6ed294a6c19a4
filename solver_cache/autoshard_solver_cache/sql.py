"""A cache in a database: SQLite by default, or PostgreSQL, by its SQLAlchemy URL."""

import hashlib
import logging
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

from sqlalchemy import ColumnElement, Engine, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoshard_solver_cache.batches import in_batches, never
from autoshard_solver_cache.cache import Cache, EntryInfo, Usage
from autoshard_solver_cache.engine import (
    StoreUnavailableError,
    default_url,
    lock,
    open_engine,
    reader,
)
from autoshard_solver_cache.tables import create_tables, totals
from autoshard_solver_cache.tables import entries as _entries

_log = logging.getLogger(__name__)

_COMPRESSION_LEVEL = 1
"""The fastest: blocks and plans are repetitive, so higher levels gain little."""

_PAGE = 1000
"""Entries that are listed by one query."""

_MAX_BATCH_BYTES = 8 << 20
"""Stored bytes that one batch of an eviction deletes."""

_INFO = tuple(_entries.c[name] for name in EntryInfo.__slots__)


class SolverCache(Cache):
    """Compressed bytes under keys, checked on every read.

    An entry whose bytes no longer match their digest is dropped and counts as a miss, so
    a damaged file costs a solve and never a wrong plan.

    Args:
        store: a database URL, or an engine of `open_engine` to share; the user's cache
            folder if left out.
        max_bytes: budget for all entries together, as stored. The least recently used are
            evicted first, of the groups that have more than a fair share (see `group_limits`).
        group_of: the group of a namespace, such as its project; all are one group if left out.
        max_group_bytes: budget for each group.

    Raises:
        StoreUnavailableError: the database cannot be opened or written.
    """

    def __init__(
        self,
        store: str | Engine | None = None,
        *,
        max_bytes: int | None = None,
        group_of: Callable[[str], str] | None = None,
        max_group_bytes: int | None = None,
    ) -> None:
        super().__init__(max_bytes, group_of=group_of, max_group_bytes=max_group_bytes)
        self._owns_engine = not isinstance(store, Engine)
        self._engine = store if isinstance(store, Engine) else open_engine(store or default_url())
        self._reader = reader(self._engine)
        create_tables(self._engine)

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
        self._wrote(len(packed))
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
        return sorted(self.usage())

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

    def usage(self) -> Mapping[str, Usage]:
        """Contents of the namespaces that have entries; counts nothing (see `tables`)."""
        query = select(totals).where(totals.c.num_entries > 0)
        with self._reader.begin() as connection:
            rows = connection.execute(query).all()
        return {row.namespace: Usage(row.num_entries, row.nbytes) for row in rows}

    def evict(
        self,
        *,
        max_bytes: int | None = None,
        max_age: float | None = None,
        namespaces: Collection[str] | None = None,
        is_over: Callable[[], bool] = never,
    ) -> int:
        """Delete the least recently used entries until both limits are met; return the number.

        They are deleted in batches, between which others can write.
        """
        deleted = 0
        if max_age is not None:
            old = partial(self._evict_older, time.time() - max_age, namespaces)
            deleted += in_batches(old, is_over=is_over)
        if max_bytes is not None:
            excess = partial(self._evict_excess, max_bytes, namespaces)
            deleted += in_batches(excess, is_over=is_over)
        return deleted

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

    def _evict_older(self, used_at: float, namespaces: Collection[str] | None, limit: int) -> int:
        oldest = self._least_recently_used(namespaces, limit)
        return self._evict([row for row in _of_size(oldest) if row.used_at < used_at])

    def _evict_excess(self, max_bytes: int, namespaces: Collection[str] | None, limit: int) -> int:
        used = self.usage()
        names = used.keys() if namespaces is None else used.keys() & set(namespaces)
        excess = sum(used[name].nbytes for name in names) - max_bytes
        if excess <= 0:
            return 0
        return self._evict(_of_size(self._least_recently_used(namespaces, limit), excess))

    def _least_recently_used(
        self, namespaces: Collection[str] | None, limit: int
    ) -> list[Row[Any]]:
        columns = (_entries.c[name] for name in ("namespace", "key", "stored_size", "used_at"))
        query = select(*columns).order_by(_entries.c.used_at).limit(limit)
        with self._reader.begin() as connection:
            if namespaces is None:
                return list(connection.execute(query))
            # One query each: for several, databases would sort all of their entries.
            found: list[Row[Any]] = []
            for name in namespaces:
                found += connection.execute(query.where(_entries.c.namespace == name))
        return sorted(found, key=lambda row: row.used_at)[:limit]

    def _evict(self, rows: Iterable[Row[Any]]) -> int:
        """Delete entries that were not used since they were read; return their number."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        used_at = 0.0
        for row in rows:
            keys[row.namespace].append(row.key)
            used_at = max(used_at, row.used_at)
        if not keys:
            return 0
        deleted = 0
        unused = delete(_entries).where(_entries.c.used_at <= used_at)
        with self._engine.begin() as connection:
            # Two processes that delete the same entries could wait for each other.
            lock(connection, "autoshard eviction")
            for namespace, some in sorted(keys.items()):
                same = (_entries.c.namespace == namespace) & _entries.c.key.in_(some)
                deleted += connection.execute(unused.where(same)).rowcount
        return deleted


def _of_size(rows: Sequence[Row[Any]], nbytes: int = _MAX_BATCH_BYTES) -> list[Row[Any]]:
    """The first entries that have a number of bytes together, but not too many for a batch."""
    most = min(nbytes, _MAX_BATCH_BYTES)
    before = accumulate((row.stored_size for row in rows), initial=0)
    return [row for row, size in zip(rows, before, strict=False) if size < most]


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
