"""The entries of the cache that were read last, in the memory of the service."""

import time
from dataclasses import dataclass
from threading import Lock

from cachetools import TTLCache

_LRU_SECONDS = 1800.0
"""Seconds that an entry stays in memory, so that the cache's time of last use stays current."""

_LRU_OVERHEAD = 200
"""Approximate bytes of an entry in addition to its body."""

_LRU_FRESH = 2.0
"""Seconds for which an entry in memory is used without looking whether it was deleted meanwhile."""


class LruCache:
    """Recently read entries in this process's memory; safe to share between threads.

    Args:
        max_bytes: of all entries together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_entry = max_bytes // 4
        self._entries: TTLCache[tuple[str, str], _Recent] = TTLCache(
            max_bytes, _LRU_SECONDS, getsizeof=lambda entry: len(entry.body) + _LRU_OVERHEAD
        )
        self._lock = Lock()

    def get(self, namespace: str, key: str) -> bytes | None:
        """An entry, or None."""
        with self._lock:
            entry = self._entries.get((namespace, key))
        return None if entry is None else entry.body

    def put(self, namespace: str, key: str, body: bytes) -> None:
        """Add an entry, unless it would evict most of the others."""
        if len(body) + _LRU_OVERHEAD <= self._max_entry:
            with self._lock:
                self._entries[namespace, key] = _Recent(body, time.monotonic())

    def drop(self, namespace: str, key: str) -> None:
        """Remove an entry, if it is there."""
        with self._lock:
            self._entries.pop((namespace, key), None)

    def must_check(self, namespace: str, key: str) -> bool:
        """True for an entry that may have been deleted from the cache since it was checked."""
        with self._lock:
            entry = self._entries.get((namespace, key))
        return entry is not None and time.monotonic() - entry.checked_at > _LRU_FRESH

    def checked(self, namespace: str, key: str) -> None:
        """Record that an entry is still in the cache."""
        with self._lock:
            entry = self._entries.get((namespace, key))
            if entry is not None:
                entry.checked_at = time.monotonic()


@dataclass(slots=True)
class _Recent:
    body: bytes
    checked_at: float
