"""The interface of all caches, with their statistics and budget."""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from autoshard_solver_cache.batches import never
from autoshard_solver_cache.budgets import group_limits

_log = logging.getLogger(__name__)

_TOUCH_INTERVAL = 3600.0
"""Seconds by which `used_at` may lag, so that a read is rarely also a write."""

_CHECKS_PER_BUDGET = 50
"""Number of checks of the budget while the bytes of one budget are written."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Contents of a namespace.

    Attributes:
        num_entries: number of entries, of all writers.
        nbytes: stored bytes of the entries.
    """

    num_entries: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Contents of a namespace, and reads through this cache object.

    Attributes:
        num_entries: number of entries, of all writers.
        nbytes: stored bytes of the entries.
        hits: reads that found an entry, since this object was made.
        misses: reads that found none, since this object was made.
        corrupted: entries dropped because their bytes had changed; each is a miss too.
    """

    num_entries: int
    nbytes: int
    hits: int
    misses: int
    corrupted: int


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """Metadata of an entry.

    Attributes:
        namespace: of the entry.
        key: of the entry within its namespace.
        size: bytes of the value.
        stored_size: stored bytes, which may be compressed.
        created_at: seconds since 1970.
        used_at: time of the last use, in seconds since 1970; may lag by an hour.
    """

    namespace: str
    key: str
    size: int
    stored_size: int
    created_at: float
    used_at: float


class NamespaceError(ValueError):
    """The name of a namespace is invalid."""


class Cache(ABC):
    """Bytes under keys, in namespaces; safe to share between threads.

    Args:
        max_bytes: budget for all entries together, as stored. The least recently used are
            evicted first, of the groups that have more than a fair share (see `group_limits`).
        group_of: the group of a namespace, such as its project; all are one group if left out.
        max_group_bytes: budget for each group.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        group_of: Callable[[str], str] | None = None,
        max_group_bytes: int | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._group_of = group_of or _one_group
        self._max_group_bytes = max_group_bytes
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()
        budgets = [budget for budget in (max_bytes, max_group_bytes) if budget is not None]
        self._check_every = min(budgets) / _CHECKS_PER_BUDGET if budgets else None
        # The size of existing entries is unknown, so the first write checks the budget.
        self._unchecked = self._check_every or 0.0

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key; None for a missing or corrupted entry."""
        found = self._load(namespace, key)
        self._count(namespace, "misses" if found is None else "hits")
        if found is None:
            return None
        body, used_at = found
        if time.time() - used_at >= _TOUCH_INTERVAL:
            self._touch(namespace, key)
        return body

    def read(self, namespace: str, key: str) -> bytes | None:
        """As `get`, but does not count as a use."""
        found = self._load(namespace, key)
        return None if found is None else found[0]

    @abstractmethod
    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key exists, which leaves its entry unchanged."""

    @abstractmethod
    def delete(self, namespace: str, key: str) -> bool:
        """Delete an entry; False if there is none."""

    @abstractmethod
    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """Metadata of an entry, or None; does not count as a use."""

    def existing(self, namespace: str, keys: Sequence[str]) -> frozenset[str]:
        """The keys that have an entry; does not count as a use."""
        return frozenset(key for key in keys if self.info(namespace, key) is not None)

    @abstractmethod
    def namespaces(self) -> list[str]:
        """Namespaces that have entries, sorted."""

    @abstractmethod
    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """Entries of a namespace, ordered by key."""

    @abstractmethod
    def usage(self) -> Mapping[str, Usage]:
        """Contents of the namespaces that have entries."""

    @abstractmethod
    def evict(
        self,
        *,
        max_bytes: int | None = None,
        max_age: float | None = None,
        namespaces: Collection[str] | None = None,
        is_over: Callable[[], bool] = never,
    ) -> int:
        """Delete the least recently used entries until both limits are met.

        Args:
            max_bytes: budget for the entries together.
            max_age: seconds since the last use.
            namespaces: only entries of these; all if left out.
            is_over: returns true to end early.

        Returns:
            number of entries deleted.
        """

    def enforce_budget(self, *, is_over: Callable[[], bool] = never) -> int:
        """Evict until all budgets are met; return the number of entries deleted.

        Args:
            is_over: returns true to end early.
        """
        used = self.usage()
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for namespace in used:
            groups[self._group_of(namespace)].append(namespace)
        sizes = {group: sum(used[name].nbytes for name in names) for group, names in groups.items()}
        limits = group_limits(sizes, self._max_bytes, self._max_group_bytes)
        return sum(
            self.evict(max_bytes=limit, namespaces=groups[group], is_over=is_over)
            for group, limit in limits.items()
        )

    def stats(self, namespace: str) -> CacheStats:
        """Contents of a namespace, and number of reads."""
        used = self.usage().get(namespace, Usage())
        with self._lock:
            return CacheStats(
                num_entries=used.num_entries,
                nbytes=used.nbytes,
                hits=self._counts[namespace, "hits"],
                misses=self._counts[namespace, "misses"],
                corrupted=self._counts[namespace, "corrupted"],
            )

    def close(self) -> None:  # noqa: B027  most caches have nothing to release
        """Release files and connections."""

    @abstractmethod
    def _load(self, namespace: str, key: str) -> tuple[bytes, float] | None:
        """The bytes of an intact entry and the time of its last use."""

    @abstractmethod
    def _touch(self, namespace: str, key: str) -> None:
        """Record a use of an entry."""

    def _count(self, namespace: str, event: str) -> None:
        with self._lock:
            self._counts[namespace, event] += 1

    def _wrote(self, nbytes: int) -> None:
        """Enforce the budgets after a write, if enough was written since the last check."""
        if self._check_every is None:
            return
        with self._lock:
            self._unchecked += nbytes
            if self._unchecked < self._check_every:
                return
            self._unchecked = 0.0
        self.enforce_budget()


def _one_group(_namespace: str) -> str:
    return ""


class NamespacedCache:
    """One namespace of a cache, for callers that can work without it.

    `get` and `put` never raise: the first error is logged, and the cache is not used again.

    Args:
        cache: with the entries.
        namespace: the only one that is used.
    """

    def __init__(self, cache: Cache, namespace: str) -> None:
        self._cache = cache
        self._namespace = namespace
        self._is_usable = True

    def get(self, key: str) -> bytes | None:
        """The bytes stored under the key, or None."""
        if not self._is_usable:
            return None
        try:
            return self._cache.get(self._namespace, key)
        except Exception as error:  # noqa: BLE001  errors of disks, locks and networks are equal
            self._disable(error)
            return None

    def put(self, key: str, body: bytes) -> None:
        """Store bytes under a key, if that is possible and the key does not exist."""
        if not self._is_usable:
            return
        try:
            self._cache.put(self._namespace, key, body)
        except Exception as error:  # noqa: BLE001  as above
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        # Waiting for a lock for each entry would take longer than the cache saves.
        self._is_usable = False
        _log.warning("continuing without the cache of %s: %s", self._namespace, error)
