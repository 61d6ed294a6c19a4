"""`ProgramFacts`: sizes of a program that recipes must fit: batch, layers, heads, experts."""

import re
from collections import Counter
from dataclasses import dataclass

from autoshard.constraints import dim_origins
from autoshard.graph import Graph, InputKind, Node, module_paths
from autoshard.graph.experts import DISPATCH

_ATTENTION = "aten.scaled_dot_product_attention.default"
_LINEAR = ("aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default")
_NUMBERED = re.compile(r"^(.*?)(?:^|\.)(\d+)$")
_FOUR_DIMS = 4


@dataclass(frozen=True)
class ProgramFacts:
    """Sizes of a program; None where the program does not say.

    Attributes:
        batch: sequences of the program.
        sequence: tokens of a sequence.
        layers: number of numbered layers, of the longest list of modules.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        experts: experts of a layer.
        parameters: number of elements of all parameters.
        stored_bytes: bytes of all parameters.
        has_policy: True if it was exported under a mixed-precision policy, so that its parameters
            are the copies that the optimizer updates.
    """

    batch: int | None
    sequence: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    parameters: int
    stored_bytes: int
    has_policy: bool = False


def program_facts(graph: Graph) -> ProgramFacts:
    """The sizes of a program that recipes must fit."""
    user = [graph.values[i.name].shape for i in graph.inputs if i.kind is InputKind.USER]
    attention = [node for node in graph.nodes if node.operator == _ATTENTION]
    heads, kv_heads = _heads(graph, attention[0]) if attention else (None, None)
    experts = [node for node in graph.nodes if node.operator == DISPATCH]
    parameters = [i.name for i in graph.inputs if i.kind is InputKind.PARAMETER]
    return ProgramFacts(
        batch=dim_origins(graph).batch_size,
        sequence=next((shape[1] for shape in user if len(shape) > 1), None),
        layers=_layers(graph),
        heads=heads,
        kv_heads=kv_heads,
        experts=_experts(experts[0]) if experts else None,
        parameters=sum(graph.values[name].numel for name in parameters),
        stored_bytes=sum(
            graph.values[name].numel * graph.stored_dtype(name).itemsize for name in parameters
        ),
        has_policy=graph.model is not None and graph.model.mixed_precision is not None,
    )


def _layers(graph: Graph) -> int | None:
    """Number of modules of the longest list outside of other lists."""
    lists = Counter[str]()
    for path in {path for node in graph.nodes for path in module_paths(node.module)}:
        found = _NUMBERED.match(path)
        if found and not any(part.isdigit() for part in found[1].split(".")):
            lists[found[1]] += 1
    return max(lists.values(), default=None)


def _experts(dispatch: Node) -> int | None:
    return next(
        (a for name, a in dispatch.arguments if name == "num_experts" and isinstance(a, int)), None
    )


def _heads(graph: Graph, attention: Node) -> tuple[int | None, int | None]:
    """Heads of queries and of keys, from the products that make them."""
    query, key = (graph.values[name].shape for name in attention.inputs[:2])
    if len(query) != _FOUR_DIMS:
        return None, None
    heads, size = query[1], query[3]
    makers = {value: node for node in graph.nodes for value in node.outputs}
    of_query, of_key = (_product(graph, makers, name) for name in attention.inputs[:2])
    if of_query is None or of_key is None:
        return heads, key[1]
    features = graph.values[of_key.outputs[0]].shape[-1]
    if of_query is of_key:  # one fused product of queries, keys and values
        features = (features - heads * size) // 2
    if features <= 0 or features % size or heads % (features // size):
        return heads, key[1]
    return heads, features // size


def _product(graph: Graph, makers: dict[str, Node], value: str) -> Node | None:
    """The linear layer whose result a value is a view or a rotation of."""
    for _ in range(64):
        node = makers.get(value)
        if node is None or node.operator in _LINEAR:
            return node
        sizes = {name: graph.values[name].numel for name in node.inputs if name in makers}
        if not sizes:
            return None
        value = max(sizes, key=lambda name: sizes[name])
    return None
