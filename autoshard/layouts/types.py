"""What one mesh axis does to a tensor, forward and backward.

| type | forward value on the axis | its gradient on the axis |
|------|---------------------------|--------------------------|
| I    | same on every rank        | same on every rank       |
| R    | same on every rank        | partial: to be summed    |
| S(d) | slice along dim d         | slice along dim d        |
| P    | partial: to be summed     | same on every rank       |

These are the types of the `spmd_types` package, which also defines the collectives that
lead from one to another.

A dim may hold several things one after the other, as the queries, keys and values that one
product makes. `S(d)/1+1+1` cuts each of three equal chunks of dim d: a rank holds its slice of
the first, then of the second, then of the third.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import gcd

from autoshard.errors import LayoutError


class Kind(StrEnum):
    """The four kinds of type."""

    INVARIANT = "I"
    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"

    # Types are hashed often, and an enumeration would do it in Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class AxisType:
    """One type.

    Attributes:
        kind: which of the four.
        dim: what is cut; set exactly when the kind is a shard.
        chunks: relative sizes of the chunks of the dim that are cut one by one, without a
            common divisor; empty where the dim is cut as one.
    """

    kind: Kind
    dim: int = -1
    chunks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is not Kind.SHARD:
            return self.kind.value
        return f"S({self.dim})" + ("/" + "+".join(map(str, self.chunks)) if self.chunks else "")

    @property
    def num_units(self) -> int:
        """The least size of a dim that can be made of the chunks."""
        return max(sum(self.chunks), 1)

    @property
    def is_shard(self) -> bool:
        """Whether the axis cuts a dim."""
        return self.kind is Kind.SHARD

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the axis holds the whole value."""
        return self.kind in (Kind.INVARIANT, Kind.REPLICATE)


I = AxisType(Kind.INVARIANT)
R = AxisType(Kind.REPLICATE)
P = AxisType(Kind.PARTIAL)


@cache
def S(dim: int, chunks: tuple[int, ...] = ()) -> AxisType:  # noqa: N802  its name in every paper
    """The type that cuts dim `dim` (counted from 0), or each chunk of it, into equal slices.

    Args:
        dim: what is cut.
        chunks: sizes of the chunks, up to a common factor; one chunk is the whole dim.

    Raises:
        LayoutError: the dim is negative, or a chunk is empty.
    """
    if dim < 0:
        raise LayoutError(f"S({dim}) counts from the end; give the dim from the front")
    return AxisType(Kind.SHARD, dim, reduced(chunks))


def reduced(chunks: Sequence[int]) -> tuple[int, ...]:
    """Relative sizes of chunks without a common divisor; () for a single chunk.

    Raises:
        LayoutError: a chunk is empty.
    """
    if any(size < 1 for size in chunks):
        raise LayoutError(f"chunks of the sizes {'+'.join(map(str, chunks))}: none may be empty")
    common = gcd(*chunks)
    return tuple(size // common for size in chunks) if len(chunks) > 1 else ()


_SHARD = re.compile(r"S\((\d+)\)(?:/(\d+(?:\+\d+)+))?")
_PLAIN = {"I": I, "R": R, "P": P}


def parse_type(text: str) -> AxisType:
    """Read a type as `str` writes it: I, R, P, S(dim) or S(dim)/1+1."""
    if text in _PLAIN:
        return _PLAIN[text]
    match = _SHARD.fullmatch(text)
    if match is None:
        raise LayoutError(f"{text!r} is not a type; write I, R, P, S(dim) or S(dim)/1+1")
    chunks = tuple(int(size) for size in match[2].split("+")) if match[2] else ()
    return S(int(match[1]), chunks)
