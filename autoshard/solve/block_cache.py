"""A cache of block tables that outlives the process.

An entry is a digest followed by plain numbers. An entry that does not match its digest counts as
missing, so a damaged one costs time but never gives a wrong solution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.solve.network import fingerprint

_FORMAT = b"autoshard table 3"
"""Part of every digest; changes with the meaning of keys and entries."""

_Number = TypeVar("_Number", np.float64, np.int32)


class KeyValueStore(Protocol):
    """Bytes under keys, shared with other solves.

    A store that cannot be reached finds nothing: it must not raise.
    """

    def get(self, key: str) -> bytes | None:
        """The bytes under a key, or None."""

    def put(self, key: str, body: bytes) -> None:
        """Store bytes under a key; an existing entry may stay."""


@dataclass(frozen=True, slots=True)
class SolvedBlock:
    """A run of equal groups of nodes that were solved as one block.

    Attributes:
        nodes: nodes of the first group.
        num_groups: number of groups of the run.
        key: digest of the content of a group, 64 hex digits.
        num_reused: number of its tables that were found in the store.
        num_solved: number of its tables that were computed.
    """

    nodes: tuple[int, ...]
    num_groups: int
    key: str
    num_reused: int
    num_solved: int


def content_key(*parts: bytes) -> str:
    """Cache key of a sequence of byte strings, 64 hex digits."""
    return fingerprint(_FORMAT, *parts).hex()


class CachedTable:
    """One table of a block in a store, with the strategies inside the block that attain it.

    Args:
        store: of tables.
        key: digest of everything that determines the table.
    """

    def __init__(self, store: KeyValueStore, key: str) -> None:
        self._store = store
        self._key = key

    def find(self, shape: Sequence[int]) -> NDArray[np.float64] | None:
        """The table, empty if it is too large; None unless it is stored and intact."""
        numbers = self._read(self._key, np.float64)
        if numbers is None or np.isnan(numbers).any():
            return None
        if len(numbers) == 0:
            return numbers
        return numbers.reshape(shape) if len(numbers) == prod(shape) else None

    def keep(self, values: NDArray[np.float64]) -> None:
        """Store the table; an empty one if it is too large to compute."""
        self._write(self._key, values.ravel())

    def find_interior(self, seen: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Strategies of the nodes of a group, if they are stored and intact; else None.

        Args:
            seen: an index of the table.
            sizes: number of strategies of each node of the group.
        """
        numbers = self._read(self._key_of(seen), np.int32)
        if numbers is None or len(numbers) != len(sizes):
            return None
        if (numbers < 0).any() or (numbers >= np.array(sizes)).any():
            return None
        return tuple(numbers.tolist())

    def keep_interior(self, seen: Sequence[int], strategies: Sequence[int]) -> None:
        """Store the strategies of the nodes of a group."""
        self._write(self._key_of(seen), np.array(strategies, np.int32))

    def _key_of(self, seen: Sequence[int]) -> str:
        return content_key(self._key.encode(), repr(tuple(seen)).encode())

    def _read(self, key: str, dtype: type[_Number]) -> NDArray[_Number] | None:
        numbers = read_sealed(self._store, key)
        if numbers is None:
            return None
        return np.frombuffer(numbers, np.dtype(dtype).newbyteorder("<")).astype(dtype)

    def _write(self, key: str, numbers: NDArray[np.float64] | NDArray[np.int32]) -> None:
        little = numbers.dtype.newbyteorder("<")
        write_sealed(self._store, key, np.ascontiguousarray(numbers, little).tobytes())


def read_sealed(store: KeyValueStore, key: str) -> bytes | None:
    """The bytes under a key; None if there are none, or they do not match their digest."""
    stored = store.get(key)
    if stored is None:
        return None
    seal, body = stored[:_SEAL_SIZE], stored[_SEAL_SIZE:]
    return body if seal == _seal(key, body) else None


def write_sealed(store: KeyValueStore, key: str, body: bytes) -> None:
    """Store bytes with a digest of them and of the key."""
    store.put(key, _seal(key, body) + body)


def _seal(key: str, body: bytes) -> bytes:
    """Digest of an entry and its key, so that the entry of another key does not match."""
    return bytes.fromhex(content_key(key.encode(), body))


_SEAL_SIZE = len(_seal("", b""))
