"""Typed access to a node's arguments: what the operator's schema demands may be missing."""

from typing import TypeVar

from autoshard.errors import SchemaError
from autoshard.graph.ir import Argument, Node, Ref

T = TypeVar("T")


def required(node: Node, name: str, kind: type[T]) -> T:
    """An argument of one kind that must be there.

    Raises:
        SchemaError: it is missing or of another kind; the message names node and argument.
    """
    value: Argument = node.argument(name)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise SchemaError(
        f"node {node.name!r} ({node.operator}): argument {name!r} must be "
        f"{_KIND_NAMES.get(kind, kind.__name__)}, not {value!r}"
    )


def integer(node: Node, name: str, default: int) -> int:
    """An integer argument that may be left out or be None."""
    return default if node.argument(name) is None else required(node, name, int)


def sizes(node: Node, name: str) -> tuple[int, ...]:
    """A required list of integers."""
    items = required(node, name, tuple)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}): argument {name!r} must hold integers, "
                f"not {item!r}"
            )
    return items


_KIND_NAMES: dict[type, str] = {Ref: "a tensor", int: "an integer", tuple: "a list"}
