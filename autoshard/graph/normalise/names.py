"""New names, and old names replaced."""

from collections.abc import Callable, Iterable

from autoshard.graph.ir import Argument, Node, Ref


class Names:
    """Makes names that nothing in a graph has yet."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def fresh(self, stem: str) -> str:
        """The stem itself if it is free, else the stem with the first free number."""
        name, number = stem, 0
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name


def replace_refs(argument: Argument, rename: Callable[[str], Argument]) -> Argument:
    """The argument with every reference replaced, through nested lists."""
    if isinstance(argument, Ref):
        return rename(argument.name)
    if isinstance(argument, tuple):
        return tuple(replace_refs(item, rename) for item in argument)
    return argument


def rewire(node: Node, rename: Callable[[str], Argument]) -> Node:
    """The node with every reference replaced; the node itself where nothing changes."""
    # Most nodes stay as they are, and looking is quicker than building them anew.
    if all(_stays(name, rename(name)) for name in node.inputs):
        return node
    arguments = tuple((key, replace_refs(value, rename)) for key, value in node.arguments)
    return Node(node.name, node.operator, arguments, node.outputs, node.module)


def _stays(name: str, argument: Argument) -> bool:
    return isinstance(argument, Ref) and argument.name == name
