"""What was asked for lately, in this process's memory: no disk, no thread, no check."""

from threading import Lock

from cachetools import TTLCache

_SECONDS = 1800.0
"""How long an entry is kept: the store must now and then be told that it is still used."""

_OVERHEAD = 200
"""Bytes that an entry takes besides its body, about."""


class Hot:
    """Bytes under keys in namespaces, for entries of a cache that never change.

    Safe to share between threads.

    Args:
        max_bytes: room; the least recently used go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes // 4
        self._kept: TTLCache[tuple[str, str], bytes] = TTLCache(
            max_bytes, _SECONDS, getsizeof=lambda body: len(body) + _OVERHEAD
        )
        self._lock = Lock()

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes, or None; never waits."""
        with self._lock:
            return self._kept.get((namespace, key))

    def keep(self, namespace: str, key: str, body: bytes) -> None:
        """Keep bytes, unless they would push out most of the others."""
        if len(body) + _OVERHEAD <= self._most:
            with self._lock:
                self._kept[namespace, key] = body
