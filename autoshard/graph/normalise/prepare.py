"""Moves values that do not depend on inputs out of the step: masks, positions, index tables.

They are the same in every step, so they are computed once and kept in memory, like buffers. Three
kinds of values stay in the step: views, which are free and may be far larger than their base;
tensors filled with one number; and very large values, since every rank prepares the global tensor,
but computes only its shard in a step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autoshard.graph.checks import FILL_PACKETS, may_prepare
from autoshard.graph.dependencies import nodes_making
from autoshard.graph.ir import Graph, Input, InputKind, Node, Output, Ref, Tensor
from autoshard.graph.normalise.functional import may_share, views_of
from autoshard.graph.normalise.rewriting import rewire

_MAX_BYTES = 1 << 30
"""Maximum bytes of a prepared tensor; the mask of 8 sequences of 8192 tokens has half of it."""


def prepare(graph: Graph, *, merges: bool = True) -> Graph:
    """Make values that are the same in every step prepared inputs, computed by `preparation`.

    The graph must be functional and have propagated gradients. Outputs of the program are not
    prepared, since the caller may modify them.

    Args:
        graph: the program.
        merges: True to merge values that are computed in the same way. With dynamic sizes, two
            values may be equal by coincidence.
    """
    fixed = _fixed(graph)
    if not fixed:
        return graph
    making = [node for node in graph.nodes if node.outputs[0] in fixed]
    first, making = _without_repeats(making) if merges else ({}, making)
    stays, prepared = _divided(graph, fixed)
    kept = tuple(dict.fromkeys(first.get(name, name) for name in prepared))
    if not kept:
        return graph
    nodes = tuple(
        rewire(node, lambda name: Ref(first.get(name, name) if name in prepared else name))
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
    """Values that do not depend on inputs."""
    returned = {output.name for output in graph.outputs}
    fixed: set[str] = set()
    for node in graph.nodes:
        if (
            may_prepare(node)
            and fixed.issuperset(node.inputs)
            and returned.isdisjoint(node.outputs)
            and all(_may_be_kept(graph.values[name]) for name in node.outputs)
        ):
            fixed.update(node.outputs)
    return fixed


def _may_be_kept(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.nbytes <= _MAX_BYTES


def _without_repeats(nodes: Iterable[Node]) -> tuple[Mapping[str, str], list[Node]]:
    """Unique calls, and for each value the first value that is computed in the same way."""
    first: dict[str, str] = {}
    seen: dict[tuple[str, str], Node] = {}
    for node in nodes:
        renamed = rewire(node, lambda name: Ref(first.get(name, name)))
        # The text distinguishes 1, 1.0 and True.
        same = seen.setdefault((renamed.operator, repr(renamed.arguments)), renamed)
        first.update(zip(node.outputs, same.outputs, strict=True))
    return first, list(seen.values())


def _divided(graph: Graph, fixed: Collection[str]) -> tuple[list[Node], Mapping[str, None]]:
    """Calls that stay in the step, and the fixed values that they use, in order."""
    read = {output.name for output in graph.outputs}
    stays: list[Node] = []
    prepared: list[str] = []
    for node in reversed(graph.nodes):
        if node.outputs[0] not in fixed or (
            not read.isdisjoint(node.outputs) and _is_light(node, graph.values)
        ):
            stays.append(node)
            read.update(node.inputs)
        else:
            prepared += [name for name in reversed(node.outputs) if name in read]
    return stays[::-1], dict.fromkeys(reversed(prepared))


def _is_light(node: Node, values: Mapping[str, Tensor]) -> bool:
    """True if recomputing a call in every step is better than keeping its result."""
    if node.operator.split(".")[1] in FILL_PACKETS:
        return values[node.outputs[0]].numel > 1
    return may_share(node) or bool(views_of(node, values))


def _program(graph: Graph, making: Sequence[Node], kept: tuple[str, ...]) -> Graph:
    """A program without inputs that returns the values."""
    nodes = nodes_making(making, kept)
    return Graph((), nodes, tuple(map(Output, kept)), _values(graph, [], nodes))


def _values(graph: Graph, names: Iterable[str], nodes: Iterable[Node]) -> Mapping[str, Tensor]:
    made = (name for node in nodes for name in node.outputs)
    return {name: graph.values[name] for name in (*names, *made)}
