"""Code that no output needs, dropped; what nothing makes any more loses its shape entry."""

from autoshard.graph.ir import Graph, InputKind


def drop_dead_code(graph: Graph) -> Graph:
    """The graph without nodes that no output depends on; inputs all stay.

    Random operators go too: nothing is run for the sake of the generator's state.
    """
    needed = {output.name for output in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    nodes = tuple(reversed(kept))
    names = [i.name for i in graph.inputs if i.kind is not InputKind.LITERAL]
    names += [name for node in nodes for name in node.outputs]
    values = {name: graph.values[name] for name in names}
    return Graph(graph.inputs, nodes, graph.outputs, values, graph.in_spec, graph.out_spec)
