"""One namespace of a cache, for those who can do without it."""

import logging

from autoshard_solver_cache.cache import Cache

_log = logging.getLogger(__name__)


class Shelf:
    """Gets and puts that never fail: a store in trouble is logged once, then left alone.

    Args:
        cache: what holds the entries.
        namespace: the only one that is used.
    """

    def __init__(self, cache: Cache, namespace: str) -> None:
        self._cache = cache
        self._namespace = namespace
        self._usable = True

    def get(self, key: str) -> bytes | None:
        """The bytes stored under the key, or None."""
        if not self._usable:
            return None
        try:
            return self._cache.get(self._namespace, key)
        except Exception as error:  # noqa: BLE001  a disk, a lock, a network: all are the same here
            self._give_up(error)
            return None

    def put(self, key: str, body: bytes) -> None:
        """Store bytes under a key, if that is possible and it is not taken."""
        if not self._usable:
            return
        try:
            self._cache.put(self._namespace, key, body)
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # Waiting for the same lock once per entry would cost more than the cache saves.
        self._usable = False
        _log.warning("going on without the cache of %s: %s", self._namespace, error)
