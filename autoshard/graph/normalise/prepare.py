"""What depends on nothing that comes in, moved out of the step: masks, positions, index tables.

It is the same in every step, so it is made once and then held as a buffer is. Views of what is
held stay in the program, since they cost nothing and may be far larger than what they look at;
so does filling a tensor with one number, and whatever is very large, since a rank makes all that is
prepared whole, and in a step only its own part.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from autoshard.graph.checks import FILLING, may_prepare
from autoshard.graph.ir import Graph, Input, InputKind, Node, Output, Ref, Tensor
from autoshard.graph.normalise.functional import may_share, views_of
from autoshard.graph.normalise.rewriting import rewire

_MOST_BYTES = 1 << 30
"""Of a tensor that is prepared: the mask of 8 sequences of 8192 tokens takes half of this."""


def prepare(graph: Graph, *, merges: bool = True) -> Graph:
    """The graph with what is the same in every step as inputs, and the program that makes them.

    Expects a graph without writes, and known gradients. What the program returns stays in it,
    since the caller may write into that.

    Args:
        graph: the program.
        merges: whether what is made twice in one way is held once. Where sizes are open, two
            tensors may be alike by chance.
    """
    fixed = _fixed(graph)
    if not fixed:
        return graph
    making = [node for node in graph.nodes if node.outputs[0] in fixed]
    first, making = _without_repeats(making) if merges else ({}, making)
    stays, held = _divided(graph, fixed)
    kept = tuple(dict.fromkeys(first.get(name, name) for name in held))
    if not kept:
        return graph
    nodes = tuple(
        rewire(node, lambda name: Ref(first.get(name, name) if name in held else name))
        for node in stays
    )
    entering = (InputKind.USER, InputKind.LITERAL)
    inputs = (
        *(i for i in graph.inputs if i.kind not in entering),
        *(Input(name, InputKind.PREPARED, name) for name in kept),
        *(i for i in graph.inputs if i.kind in entering),
    )
    names = [i.name for i in inputs if i.kind is not InputKind.LITERAL]
    return replace(
        graph,
        inputs=inputs,
        nodes=nodes,
        values=_values(graph, names, nodes),
        preparation=_program(graph, making, kept),
    )


def _fixed(graph: Graph) -> Collection[str]:
    """The values that follow from nothing that comes in."""
    returned = {output.name for output in graph.outputs}
    fixed: set[str] = set()
    for node in graph.nodes:
        if (
            may_prepare(node)
            and fixed.issuperset(node.inputs)
            and returned.isdisjoint(node.outputs)
            and all(_may_be_held(graph.values[name]) for name in node.outputs)
        ):
            fixed.update(node.outputs)
    return fixed


def _may_be_held(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.nbytes <= _MOST_BYTES


def _without_repeats(nodes: Iterable[Node]) -> tuple[Mapping[str, str], list[Node]]:
    """Calls, each once; and by each value the first one that is made in the same way."""
    first: dict[str, str] = {}
    seen: dict[tuple[str, str], Node] = {}
    for node in nodes:
        renamed = rewire(node, lambda name: Ref(first.get(name, name)))
        # In writing 1, 1.0 and True differ.
        same = seen.setdefault((renamed.operator, repr(renamed.arguments)), renamed)
        first.update(zip(node.outputs, same.outputs, strict=True))
    return first, list(seen.values())


def _divided(graph: Graph, fixed: Collection[str]) -> tuple[list[Node], Mapping[str, None]]:
    """The calls that stay in the step, and the fixed values that they read, in order."""
    read = {output.name for output in graph.outputs}
    stays: list[Node] = []
    held: list[str] = []
    for node in reversed(graph.nodes):
        if node.outputs[0] not in fixed or (
            not read.isdisjoint(node.outputs) and _is_light(node, graph.values)
        ):
            stays.append(node)
            read.update(node.inputs)
        else:
            held += [name for name in reversed(node.outputs) if name in read]
    return stays[::-1], dict.fromkeys(reversed(held))


def _is_light(node: Node, values: Mapping[str, Tensor]) -> bool:
    """Whether a call is better made in every step than its result held."""
    if node.operator.split(".")[1] in FILLING:
        return values[node.outputs[0]].numel > 1
    return may_share(node) or bool(views_of(node, values))


def _program(graph: Graph, making: Iterable[Node], kept: tuple[str, ...]) -> Graph:
    """A program without inputs that makes these values."""
    read = set(kept)
    nodes: list[Node] = []
    for node in reversed(list(making)):
        if not read.isdisjoint(node.outputs):
            nodes.append(node)
            read.update(node.inputs)
    nodes.reverse()
    return Graph((), tuple(nodes), tuple(map(Output, kept)), _values(graph, [], nodes))


def _values(graph: Graph, names: Iterable[str], nodes: Iterable[Node]) -> Mapping[str, Tensor]:
    made = (name for node in nodes for name in node.outputs)
    return {name: graph.values[name] for name in (*names, *made)}
