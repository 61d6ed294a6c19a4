"""Arguments and lists as plain JSON, written and read."""

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any, TypeVar

from autoshard.errors import SchemaError
from autoshard.graph.fields import member, read_each, typed
from autoshard.graph.ir import Argument, Ref, Token, TokenKind

T = TypeVar("T")
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
