"""A cache that lives as long as its process."""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from autoshard_solver_cache.cache import CacheStats, EntryInfo


class _Held(NamedTuple):
    body: bytes
    info: EntryInfo


class MemoryCache:
    """The in-memory twin of `SolverCache`, for tests and for running without a disk.

    Args:
        max_bytes: room for all entries together; the least recently used go first.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], _Held] = OrderedDict()
        self._nbytes = 0
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._lock = Lock()

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key, or None."""
        with self._lock:
            held = self._entries.get((namespace, key))
            if held is None:
                self._misses[namespace] += 1
                return None
            self._hits[namespace] += 1
            used = replace(held.info, used_at=time.time())
            self._entries[namespace, key] = _Held(held.body, used)
            self._entries.move_to_end((namespace, key))
            return held.body

    def read(self, namespace: str, key: str) -> bytes | None:
        """What `get` gives; does not count as a use."""
        with self._lock:
            held = self._entries.get((namespace, key))
            return None if held is None else held.body

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is."""
        with self._lock:
            if (namespace, key) in self._entries:
                return False
            now = time.time()
            info = EntryInfo(namespace, key, len(body), len(body), now, now)
            self._entries[namespace, key] = _Held(body, info)
            self._nbytes += len(body)
            self._drop(self._max_bytes)
            return True

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""
        with self._lock:
            held = self._entries.pop((namespace, key), None)
            if held is None:
                return False
            self._nbytes -= len(held.body)
            return True

    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """What is known of an entry, or None; does not count as a use."""
        with self._lock:
            held = self._entries.get((namespace, key))
            return None if held is None else held.info

    def held(self, namespace: str, keys: Sequence[str]) -> frozenset[str]:
        """Those of the keys that have an entry; does not count as a use."""
        with self._lock:
            return frozenset(key for key in keys if (namespace, key) in self._entries)

    def namespaces(self) -> list[str]:
        """Namespaces that hold something, sorted."""
        with self._lock:
            return sorted({namespace for namespace, _ in self._entries})

    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """What a namespace holds, by key."""
        with self._lock:
            found = [held.info for held in self._entries.values()]
        ours = [info for info in found if info.namespace == namespace]
        return iter(sorted(ours, key=lambda info: info.key))

    def collect(self, *, max_bytes: int | None = None, max_age: float | None = None) -> int:
        """Drop what was used longest ago until both limits hold; how many entries."""
        with self._lock:
            return self._drop(max_bytes, max_age)

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""
        with self._lock:
            held = [h.body for (owner, _), h in self._entries.items() if owner == namespace]
            return CacheStats(
                num_entries=len(held),
                nbytes=sum(map(len, held)),
                hits=self._hits[namespace],
                misses=self._misses[namespace],
                corrupted=0,
            )

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def _drop(self, max_bytes: int | None, max_age: float | None = None) -> int:
        oldest = 0.0 if max_age is None else time.time() - max_age
        dropped = 0
        while self._entries:
            held = next(iter(self._entries.values()))
            is_over = max_bytes is not None and self._nbytes > max_bytes
            if not is_over and held.info.used_at >= oldest:
                break
            self._entries.popitem(last=False)
            self._nbytes -= len(held.body)
            dropped += 1
        return dropped
