"""Typed reading of untrusted JSON.

A member that is missing or has another type is named in the error.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from autoshard.errors import GraphError, SchemaError

T = TypeVar("T")
Item = TypeVar("Item")

_JSON_NAMES = {dict: "object", list: "list", str: "string", int: "integer", bool: "boolean"}


def typed(value: object, kind: type[T], what: str) -> T:
    """The value, if it is of that JSON type; a boolean is no integer."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _mistyped(value, kind, what)


def member(owner: object, key: str, kind: type[T]) -> T:
    """A required member of a JSON object."""
    # Runs for everything in a graph, so no message is written before it is needed.
    if not isinstance(owner, dict):
        raise _mistyped(owner, dict, f"what holds {key!r}")
    if key not in owner:
        raise SchemaError(f"{key!r} is missing")
    value = owner[key]
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _mistyped(value, kind, repr(key))


def union(value: object, what: str) -> tuple[str, Any]:
    """Tag and payload of a tagged union, which JSON writes as an object of one member."""
    members = typed(value, dict, what)
    if len(members) != 1:
        raise SchemaError(f"{what} must have exactly one member, not {_excerpt(value)}")
    return next(iter(members.items()))


def read_each(
    items: Iterable[Item], read: Callable[[Item], T], where: Callable[[int, Item], str]
) -> list[T]:
    """Read items one by one; an error that comes up says where.

    Args:
        items: what to read.
        read: reads one of them.
        where: the place of one of them, by its number and itself.
    """
    done: list[T] = []
    for item in items:
        # Nothing is written down about the places of all that can be read.
        try:
            done.append(read(item))
        except GraphError as error:
            raise type(error)(f"{where(len(done), item)}: {error}") from error
    return done


class place:  # noqa: N801  a context manager reads like a function
    """Prefix a graph error raised inside with the place where it happened.

    Args:
        where: the place.
    """

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise a graph error anew, with the place in front."""
        if isinstance(error, GraphError):
            raise type(error)(f"{self._where}: {error}") from error


def _mistyped(value: object, kind: type, what: str) -> SchemaError:
    return SchemaError(f"{what} must be a JSON {_JSON_NAMES[kind]}, not {_excerpt(value)}")


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."


_EXCERPT = 60
