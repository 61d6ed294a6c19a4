"""Merges the names of a tied parameter into one input with aliases.

A non-strict export has one input per parameter *name*. The last name of a tied tensor has all uses
and the other names have none, which does not distinguish them from unused parameters.
`export_model` records the ties. If they are unknown, only one case is assumed to be a tie: of all
parameters with the same shape and element type only the last is used, and it is used by an
embedding (which shares its weight with the output projection).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.errors import SchemaError
from autoshard.graph.ir import Graph, Input, Ref
from autoshard.graph.normalise.rewriting import rewire


def merge_ties(graph: Graph, ties: Sequence[Sequence[str]] | None) -> Graph:
    """Keep one input per parameter tensor: the one that is used.

    Args:
        graph: a graph with one input per parameter name.
        ties: groups of names of tied parameters; None if unknown. Names without an input become
            aliases too.

    Raises:
        SchemaError: tied parameters differ in shape or element type, or two groups have the same
            name.
    """
    kept: dict[str, Input] = {}
    merged: dict[str, str] = {}
    by_target = {i.target: i for i in graph.parameters}
    groups = _assumed_ties(graph) if ties is None else ties
    _check_disjoint(groups)
    for group in groups:
        present = [by_target[name] for name in group if name in by_target]
        if present:
            stays = _the_used(graph, present)
            aliases = tuple(name for name in group if name != stays.target)
            kept[stays.name] = replace(stays, aliases=aliases)
            merged.update({i.name: stays.name for i in present if i is not stays})
    if not kept:
        return graph
    return replace(
        graph,
        inputs=tuple(kept.get(i.name, i) for i in graph.inputs if i.name not in merged),
        nodes=tuple(rewire(n, lambda name: Ref(merged.get(name, name))) for n in graph.nodes),
        outputs=tuple(
            o if o.name is None else replace(o, name=merged.get(o.name, o.name))
            for o in graph.outputs
        ),
        values={name: t for name, t in graph.values.items() if name not in merged},
    )


def _check_disjoint(groups: Iterable[Sequence[str]]) -> None:
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name in seen:
            raise SchemaError(f"the parameter {name!r} is recorded as tied twice")
        seen.add(name)


def _the_used(graph: Graph, group: Sequence[Input]) -> Input:
    """The input of a group that the graph uses, or the last one."""
    first = graph.values[group[0].name]
    for other in group[1:]:
        tensor = graph.values[other.name]
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise SchemaError(
                f"parameters {group[0].target!r} and {other.target!r} are recorded as tied but "
                "have different shapes or element types"
            )
    used = [i for i in group if graph.consumers[i.name]]
    return (used or list(group))[-1]


def _assumed_ties(graph: Graph) -> list[list[str]]:
    alike: dict[object, list[Input]] = defaultdict(list)
    for i in graph.parameters:
        tensor = graph.values[i.name]
        alike[tensor.shape, tensor.dtype].append(i)
    return [[i.target for i in group] for group in alike.values() if _is_clear_tie(graph, group)]


def _is_clear_tie(graph: Graph, group: Sequence[Input]) -> bool:
    if len(group) == 1 or any(graph.consumers[i.name] for i in group[:-1]):
        return False
    users = {graph.nodes[node].operator for node, _ in graph.consumers[group[-1].name]}
    return "aten.embedding.default" in users
