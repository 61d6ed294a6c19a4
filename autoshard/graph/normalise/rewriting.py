"""Helpers of the passes: unique names, renaming of references, typed access to arguments."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from autoshard.errors import SchemaError
from autoshard.graph.ir import Argument, Node, Ref


class UniqueNames:
    """Generator of unique names."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def fresh(self, stem: str) -> str:
        """Return the stem, with the first free number as suffix if the stem is taken."""
        name, number = stem, 0
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name


def replace_refs(argument: Argument, rename: Callable[[str], Argument]) -> Argument:
    """Replace every reference in an argument and its nested lists."""
    if isinstance(argument, Ref):
        return rename(argument.name)
    if isinstance(argument, tuple):
        return tuple(replace_refs(item, rename) for item in argument)
    return argument


def rewire(node: Node, rename: Callable[[str], Argument]) -> Node:
    """Replace every reference of a node; returns the same node if nothing changes."""
    # Most nodes do not change.
    for name in node.inputs:
        renamed = rename(name)
        if not isinstance(renamed, Ref) or renamed.name != name:
            break
    else:
        return node
    arguments = tuple((key, replace_refs(value, rename)) for key, value in node.arguments)
    return Node(node.name, node.operator, arguments, node.outputs, node.module, node.part)


T = TypeVar("T")


def required(node: Node, name: str, kind: type[T]) -> T:
    """Return a required argument of a given type.

    Raises:
        SchemaError: it is missing or has another type; the message has node and argument.
    """
    value: Argument = node.argument(name)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise SchemaError(
        f"node {node.name!r} ({node.operator}): argument {name!r} must be "
        f"{_KIND_NAMES.get(kind, kind.__name__)}, not {value!r}"
    )


def integer(node: Node, name: str, default: int) -> int:
    """Return an integer argument, or the default if it is absent or None."""
    return default if node.argument(name) is None else required(node, name, int)


def sizes(node: Node, name: str) -> tuple[int, ...]:
    """Return a required list of integers."""
    items = required(node, name, tuple)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}): argument {name!r} must list integers, "
                f"not {item!r}"
            )
    return items


_KIND_NAMES: dict[type, str] = {Ref: "a tensor", int: "an integer", tuple: "a list"}
