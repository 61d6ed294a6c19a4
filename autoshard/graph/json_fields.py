"""Typed reading of untrusted JSON, and arguments of operators as plain JSON.

A member that is missing or has another type is named in the error.
"""

import math
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any, TypeVar

from autoshard.errors import GraphError, SchemaError
from autoshard.graph.ir import Argument, Ref, Token, TokenKind

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


E = TypeVar("E", bound=StrEnum)


def to_json(argument: Argument) -> Any:
    """An argument; `from_json` reads it back."""
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Token):
        return {argument.kind.value: argument.value}
    if isinstance(argument, tuple):
        return [to_json(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


def from_json(value: object) -> Argument:
    """Read what `to_json` wrote.

    Raises:
        SchemaError: it is no argument.
    """
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if not isinstance(value, dict):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise SchemaError(f"{value!r} is not JSON")
    if len(value) != 1:
        raise SchemaError(f"an argument object must have exactly one member, not {len(value)}")
    tag, payload = next(iter(value.items()))
    text = typed(payload, str, repr(tag))
    if tag == "ref":
        return Ref(text)
    if tag == "float":
        if text not in _NON_FINITE:
            raise SchemaError(f"'float' must be one of {', '.join(_NON_FINITE)}, not {text!r}")
        return float(text)
    return Token(code(TokenKind, tag), text)


def pair_from_json(item: object) -> tuple[str, Argument]:
    """A name and an argument.

    Raises:
        SchemaError: it is no such pair.
    """
    pair = typed(item, list, "an argument")
    if len(pair) != _PAIR:
        raise SchemaError("an argument must be a pair of a name and a value")
    return typed(pair[0], str, "the name of an argument"), from_json(pair[1])


def each(owner: object, key: str, read: Callable[[object], T]) -> tuple[T, ...]:
    """Read the items of a list; errors say which one."""
    return tuple(read_each(member(owner, key, list), read, lambda i, _: f"{key}[{i}]"))


def check_members(value: object, known: AbstractSet[str], what: str) -> None:
    """Refuse members that nobody reads.

    Raises:
        SchemaError: there is one, or the value is no object.
    """
    if unknown := typed(value, dict, what).keys() - known:
        raise SchemaError(f"{what} has no member {min(unknown)!r}")


def code(kind: type[E], text: str) -> E:
    """The member of an enumeration.

    Raises:
        SchemaError: there is none of that value.
    """
    try:
        return kind(text)
    except ValueError:
        raise SchemaError(f"{text!r} is no {kind.__name__}") from None


_PAIR = 2
_NON_FINITE = ("inf", "-inf", "nan")
