"""Checks that every description of hardware has to pass, each naming what is wrong."""

from collections.abc import Iterable
from sys import float_info

from autoshard.errors import MeshError

MAX_NAME = 255
"""Characters of a name."""


def check_positive(value: float, what: str) -> None:
    """Raise unless a figure is a finite number above zero."""
    if not 0 < value <= float_info.max:
        raise MeshError(f"{what} is {value}; it must be a finite number above 0")


def check_not_negative(value: float, what: str) -> None:
    """Raise unless a figure is a finite number, zero or more."""
    if not 0 <= value <= float_info.max:
        raise MeshError(f"{what} is {value}; it must be a finite number, 0 or more")


def check_name(name: str, what: str) -> None:
    """Raise where a name is empty, too long, not printable or has spaces around it."""
    if len(name) > MAX_NAME:
        raise MeshError(
            f"{what} {name[:32]!r}... must have a name of at most {MAX_NAME} characters"
        )
    if not name.isprintable():
        raise MeshError(f"{what} {name!r} must have a name without control characters")
    if not name or name != name.strip():
        raise MeshError(f"{what} {name!r} must have a name without spaces around it")


def check_unique(names: Iterable[str], what: str) -> None:
    """Raise where a name comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise MeshError(f"{what} {name!r} is named twice; names must differ")
        seen.add(name)
