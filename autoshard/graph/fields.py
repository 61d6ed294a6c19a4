"""Reading untrusted JSON: every member that is missing or of another type is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from autoshard.errors import GraphError, SchemaError

T = TypeVar("T")

_JSON_NAMES = {dict: "object", list: "list", str: "string", int: "integer", bool: "boolean"}


def typed(value: object, kind: type[T], what: str) -> T:
    """The value, if it is of that JSON type; a boolean is no integer."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise SchemaError(f"{what} must be a JSON {_JSON_NAMES[kind]}, not {_excerpt(value)}")


def member(owner: object, key: str, kind: type[T]) -> T:
    """A required member of a JSON object."""
    members = typed(owner, dict, f"what holds {key!r}")
    if key not in members:
        raise SchemaError(f"{key!r} is missing")
    return typed(members[key], kind, repr(key))


def union(value: object, what: str) -> tuple[str, Any]:
    """Tag and payload of a tagged union, which JSON writes as an object of one member."""
    members = typed(value, dict, what)
    if len(members) != 1:
        raise SchemaError(f"{what} must have exactly one member, not {_excerpt(value)}")
    return next(iter(members.items()))


@contextmanager
def place(where: str) -> Iterator[None]:
    """Prefix a graph error raised inside with the place where it happened."""
    try:
        yield
    except GraphError as error:
        raise type(error)(f"{where}: {error}") from error


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."


_EXCERPT = 60
