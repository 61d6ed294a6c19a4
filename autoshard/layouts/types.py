"""What one mesh axis does to a tensor, forward and backward.

| type | forward value on the axis | its gradient on the axis |
|------|---------------------------|--------------------------|
| I    | same on every rank        | same on every rank       |
| R    | same on every rank        | partial: to be summed    |
| S(d) | slice along dim d         | slice along dim d        |
| P    | partial: to be summed     | same on every rank       |

These are the types of the `spmd_types` package, which also defines the collectives that
lead from one to another.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

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
    """One type; `dim` is set exactly when the kind is a shard."""

    kind: Kind
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind is Kind.SHARD else self.kind.value

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
def S(dim: int) -> AxisType:  # noqa: N802  the type's name in every paper on the subject
    """The type that cuts dim `dim` (counted from 0) into equal slices."""
    if dim < 0:
        raise LayoutError(f"S({dim}) counts from the end; give the dim from the front")
    return AxisType(Kind.SHARD, dim)


_SHARD = re.compile(r"S\((\d+)\)")
_PLAIN = {"I": I, "R": R, "P": P}


def parse_type(text: str) -> AxisType:
    """Read a type as `str` writes it: I, R, P or S(dim)."""
    if text in _PLAIN:
        return _PLAIN[text]
    match = _SHARD.fullmatch(text)
    if match is None:
        raise LayoutError(f"{text!r} is not a type; write I, R, P or S(dim)")
    return S(int(match[1]))
