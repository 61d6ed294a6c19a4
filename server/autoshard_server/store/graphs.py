"""Uploaded graphs, by their digests: sent once, planned many times."""

import hashlib
from dataclasses import dataclass

from autoshard_solver_cache import Cache, EntryInfo

GRAPHS = "graphs"
"""Namespace of uploaded graphs in the cache, by the digest of their bytes."""


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """What is known of an upload without reading it.

    Attributes:
        sha256: digest of the bytes, 64 hex digits.
        size: bytes.
        created_at: seconds since 1970.
        used_at: the same, of the last use, which may lag an hour behind.
    """

    sha256: str
    size: int
    created_at: float
    used_at: float


class GraphStore:
    """Graphs in the cache: they share its room, and the least recently used go first.

    Args:
        cache: where they are kept.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def put(self, body: bytes) -> tuple[GraphInfo, bool]:
        """Keep a graph; what is known of it, and whether it is new."""
        digest = hashlib.sha256(body).hexdigest()
        is_new = self._cache.put(GRAPHS, digest, body)
        if not is_new and self._cache.get(GRAPHS, digest) is None:
            # What was there was damaged, and has just been dropped.
            is_new = self._cache.put(GRAPHS, digest, body)
        found = self.info(digest)
        return found or GraphInfo(digest, len(body), 0.0, 0.0), is_new

    def get(self, digest: str) -> bytes | None:
        """The bytes, checked against their digest, or None."""
        body = self._cache.get(GRAPHS, digest)
        if body is None or hashlib.sha256(body).hexdigest() == digest:
            return body
        # Intact, and yet not what its name says: not ours.
        self._cache.delete(GRAPHS, digest)
        return None

    def info(self, digest: str) -> GraphInfo | None:
        """What is known of a graph, or None."""
        found = self._cache.info(GRAPHS, digest)
        return None if found is None else _info(found)

    def delete(self, digest: str) -> bool:
        """Forget a graph; False if there is none."""
        return self._cache.delete(GRAPHS, digest)


def _info(entry: EntryInfo) -> GraphInfo:
    return GraphInfo(entry.key, entry.size, entry.created_at, entry.used_at)
