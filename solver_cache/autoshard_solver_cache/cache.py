"""What every cache can do."""

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is known of an entry without reading its bytes.

    Attributes:
        namespace: where it is.
        key: under which it is found.
        size: bytes, as they were put.
        stored_size: bytes that it takes.
        created_at: seconds since 1970.
        used_at: the same, of the last use, which may lag an hour behind.
    """

    namespace: str
    key: str
    size: int
    stored_size: int
    created_at: float
    used_at: float


class NamespaceError(ValueError):
    """A name cannot be that of a namespace."""


class Cache(Protocol):
    """Bytes under keys, in namespaces; safe to share between threads."""

    def get(self, namespace: str, key: str) -> bytes | None:
        """The bytes stored under the key, or None: nothing there, or no longer intact."""

    def read(self, namespace: str, key: str) -> bytes | None:
        """What `get` gives; does not count as a use."""

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        """Store bytes under a key; False if the key is taken, which leaves it as it is."""

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; False if there is none."""

    def info(self, namespace: str, key: str) -> EntryInfo | None:
        """What is known of an entry, or None; does not count as a use."""

    def held(self, namespace: str, keys: Sequence[str]) -> frozenset[str]:
        """Those of the keys that have an entry; does not count as a use."""

    def namespaces(self) -> list[str]:
        """Namespaces that hold something, sorted."""

    def entries(self, namespace: str) -> Iterator[EntryInfo]:
        """What a namespace holds, by key."""

    def collect(self, *, max_bytes: int | None = None, max_age: float | None = None) -> int:
        """Drop what was used longest ago until both limits hold; how many entries.

        Args:
            max_bytes: room for all entries together.
            max_age: seconds since the last use.
        """

    def stats(self, namespace: str) -> CacheStats:
        """What a namespace holds, and how it has been used."""

    def close(self) -> None:
        """Give files and connections back."""
