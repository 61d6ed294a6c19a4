"""Type-checked access to untrusted JSON; errors name the missing or mistyped member."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from autoshard.errors import GraphError, SchemaError

T = TypeVar("T")
Item = TypeVar("Item")

_JSON_NAMES = {dict: "object", list: "list", str: "string", int: "integer", bool: "boolean"}


def typed(value: object, kind: type[T], what: str) -> T:
    """Return a value of a given JSON type; a boolean is not an integer.

    Raises:
        SchemaError: the value has another type.
    """
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _mistyped(value, kind, what)


def member(owner: object, key: str, kind: type[T]) -> T:
    """Return a required member of a JSON object.

    Raises:
        SchemaError: the member is missing or has another type.
    """
    # Runs for every member, so the message is built only on error.
    if not isinstance(owner, dict):
        raise _mistyped(owner, dict, f"the parent of {key!r}")
    if key not in owner:
        raise SchemaError(f"{key!r} is missing")
    value = owner[key]
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _mistyped(value, kind, repr(key))


def union(value: object, what: str) -> tuple[str, Any]:
    """Tag and payload of a tagged union: a JSON object with one member."""
    members = typed(value, dict, what)
    if len(members) != 1:
        raise SchemaError(f"{what} must have exactly one member, not {_excerpt(value)}")
    return next(iter(members.items()))


def read_each(
    items: Iterable[Item], read: Callable[[Item], T], where: Callable[[int, Item], str]
) -> list[T]:
    """Apply `read` to each item, and prefix errors with the item's location.

    Args:
        items: items to read.
        read: reads one item.
        where: location of an item, given its index and itself.
    """
    done: list[T] = []
    for item in items:
        # The location is built only on error.
        try:
            done.append(read(item))
        except GraphError as error:
            raise _at(where(len(done), item), error) from error
    return done


class place:  # noqa: N801  a context manager reads like a function
    """Prefix graph errors that are raised inside the context with a location.

    Args:
        where: the location.
    """

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Re-raise a graph error with the location as prefix."""
        if isinstance(error, GraphError):
            raise _at(self._where, error) from error


def _at(where: str, error: GraphError) -> GraphError:
    """An error with its location as prefix; its attributes, such as a limit, stay."""
    found = type(error)(f"{where}: {error}")
    vars(found).update(vars(error))
    return found


def _mistyped(value: object, kind: type, what: str) -> SchemaError:
    return SchemaError(f"{what} must be a JSON {_JSON_NAMES[kind]}, not {_excerpt(value)}")


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."


_EXCERPT = 60
