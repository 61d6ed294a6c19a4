"""The part of a program that some of its values depend on."""

from collections.abc import Iterable, Sequence

from autoshard.graph.ir import Node


def nodes_making(nodes: Sequence[Node], values: Iterable[str]) -> tuple[Node, ...]:
    """The nodes on which some values depend, in order."""
    needed, found = set(values), list[Node]()
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            found.append(node)
            needed.update(node.inputs)
    return tuple(reversed(found))
