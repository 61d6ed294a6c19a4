"""What every graph must satisfy: names are unique, and values are made before they are used."""

from collections import Counter

from autoshard.errors import SchemaError
from autoshard.graph.ir import Graph, InputKind
from autoshard.graph.preparable import may_prepare


def check_wiring(graph: Graph) -> None:
    """Check that the graph is a program.

    Raises:
        SchemaError: a name is used twice, a value is used before it is made (which is also
            what a cycle looks like) or has no shape; the message names it.
    """
    _check_unique("node", Counter(node.name for node in graph.nodes))
    made = [i.name for i in graph.inputs if i.kind is not InputKind.LITERAL]
    _check_unique("value", Counter([*made, *(o for node in graph.nodes for o in node.outputs)]))
    known = set(made)
    _check_shapes(graph, known, "the inputs")
    values = graph.values
    for node in graph.nodes:
        for name in node.inputs:
            if name not in known:
                raise SchemaError(
                    f"node {node.name!r} ({node.operator}) uses {name!r}, which no input and no "
                    "earlier node makes"
                )
        # Runs for everything in a graph, so no message is written before it is needed.
        if not all(name in values for name in node.outputs):
            _check_shapes(graph, node.outputs, f"node {node.name!r} ({node.operator})")
        known.update(node.outputs)
    for output in graph.outputs:
        if output.name is not None and output.name not in known:
            raise SchemaError(f"the graph returns {output.name!r}, which nothing makes")
    _check_contents(graph)
    _check_preparation(graph)


def _check_contents(graph: Graph) -> None:
    """Only constants have a value, and it is as long as their shape says."""
    for source in graph.inputs:
        if source.contents is None:
            continue
        tensor = graph.values[source.name] if source.kind is InputKind.CONSTANT else None
        if tensor is None or len(source.contents) != tensor.nbytes:
            raise SchemaError(
                f"{source.name!r} has a value of {len(source.contents)} bytes and is "
                f"{tensor or f'a {source.kind}'}"
            )


def _check_preparation(graph: Graph) -> None:
    """What is prepared is what the preparation makes, and it takes nothing."""
    taken = [i.name for i in graph.inputs if i.kind is InputKind.PREPARED]
    if graph.preparation is None:
        if taken:
            raise SchemaError(f"nothing makes {taken[0]!r}, which is to be prepared")
        return
    made = [output.name for output in graph.preparation.outputs]
    if graph.preparation.inputs or made != taken:
        raise SchemaError(
            f"the preparation must take nothing and make {taken}; it makes {made} of "
            f"{[i.name for i in graph.preparation.inputs]}"
        )
    for node in graph.preparation.nodes:
        if not may_prepare(node):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}) of the preparation may be another in each "
                f"step, or on each rank"
            )
    check_wiring(graph.preparation)
    for name in taken:
        if graph.values[name] != graph.preparation.values[name]:
            raise SchemaError(
                f"{name!r} is {graph.values[name]}, and prepared it is "
                f"{graph.preparation.values[name]}"
            )


def _check_unique(what: str, counts: Counter[str]) -> None:
    name, count = next(iter(counts.most_common(1)), ("", 0))
    if count > 1:
        raise SchemaError(f"the {what} name {name!r} is used {count} times")


def _check_shapes(graph: Graph, names: "set[str] | tuple[str, ...]", maker: str) -> None:
    missing = sorted(name for name in names if name not in graph.values)
    if missing:
        raise SchemaError(f"{maker}: value {missing[0]!r} has no entry among the tensor values")
