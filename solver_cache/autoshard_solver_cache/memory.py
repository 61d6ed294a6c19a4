"""A cache that lives as long as its process."""

from collections import Counter, OrderedDict
from threading import Lock

from autoshard_solver_cache.cache import CacheStats


class MemoryCache:
    """The in-memory twin of `SolverCache`, for tests and for running without a disk.

    Args:
        max_bytes: room for all entries together; the least recently used go first.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._nbytes = 0
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._lock = Lock()

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key, or None."""
        with self._lock:
            body = self._entries.get((namespace, key))
            if body is None:
                self._misses[namespace] += 1
                return None
            self._hits[namespace] += 1
            self._entries.move_to_end((namespace, key))
            return body

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is."""
        with self._lock:
            if (namespace, key) in self._entries:
                return False
            self._entries[namespace, key] = body
            self._nbytes += len(body)
            while self._max_bytes is not None and self._nbytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._nbytes -= len(dropped)
            return True

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""
        with self._lock:
            body = self._entries.pop((namespace, key), None)
            if body is None:
                return False
            self._nbytes -= len(body)
            return True

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""
        with self._lock:
            sizes = [len(body) for (owner, _), body in self._entries.items() if owner == namespace]
            return CacheStats(
                num_entries=len(sizes),
                nbytes=sum(sizes),
                hits=self._hits[namespace],
                misses=self._misses[namespace],
                corrupted=0,
            )

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0
