"""What every cache can do."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a namespace holds, and how this cache object has been used.

    Attributes:
        num_entries: entries held, by whoever wrote them.
        nbytes: room that they take, as stored.
        hits: reads that found an entry, since this object was made.
        misses: reads that found none, since this object was made.
        corrupted: entries dropped because their bytes had changed; each is a miss too.
    """

    num_entries: int
    nbytes: int
    hits: int
    misses: int
    corrupted: int


class Cache(Protocol):
    """Bytes under keys, in namespaces; safe to share between threads."""

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key, or None: nothing there, or no longer intact."""

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is."""

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""

    def close(self) -> None:
        """Give files and connections back."""
