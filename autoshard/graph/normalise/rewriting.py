"""Tools that the passes share: new nodes and values, renamed references, typed arguments."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from autoshard.errors import SchemaError
from autoshard.graph.ir import Argument, Graph, Node, Ref, Tensor


class _UniqueNames:
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


class GraphBuilder:
    """The nodes and values of a graph that a pass writes, node by node, with unique new names.

    Args:
        nodes: names of the nodes that are read.
        values: the values that are read.

    Attributes:
        nodes: the nodes written so far.
        values: the values that are read, and the new ones.
    """

    def __init__(self, nodes: Iterable[str], values: Mapping[str, Tensor]) -> None:
        self.nodes: list[Node] = []
        self.values = dict(values)
        self._node_names = _UniqueNames(nodes)
        self._value_names = _UniqueNames(values)

    @classmethod
    def of(cls, graph: Graph) -> "GraphBuilder":
        """The builder of a graph that takes the place of another."""
        return cls((node.name for node in graph.nodes), graph.values)

    def node_name(self, stem: str) -> str:
        """An unused name of a node."""
        return self._node_names.fresh(stem)

    def value(self, stem: str, tensor: Tensor | None) -> str:
        """Add a value, unless it is no tensor; return its name."""
        name = self._value_names.fresh(stem)
        if tensor is not None:
            self.values[name] = tensor
        return name

    def call(self, origin: Node, operator: str, out: Tensor, /, **arguments: Argument) -> str:
        """Add a call for a node; return the name of its result.

        Args:
            origin: the node, in whose module the call is.
            operator: of the call.
            out: shape and type of the result.
            **arguments: of the call, in schema order.
        """
        stem = f"{origin.name}_{operator.split('.')[1]}"
        result, pairs = self.value(stem, out), tuple(arguments.items())
        name = self.node_name(stem)
        self.nodes.append(Node(name, operator, pairs, (result,), origin.module, origin.part))
        return result


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
