"""Layers of which frameworks can shard the weights: linear layers and embeddings of a program."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from autoshard.graph.ir import (
    Graph,
    InputKind,
    Node,
    Ref,
)


class LayerKind(Enum):
    """A kind of layer that frameworks can shard."""

    LINEAR = "linear"
    CONV1D = "conv1d"
    """A linear layer with a transposed weight, of transformers' `Conv1D`."""
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        nodes: its operators.
        product: the operator that reads the weight.
        result: value that it returns.
    """

    nodes: tuple[Node, ...]
    product: Node
    result: str


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """A module that is a linear layer or an embedding, however often it is called.

    Attributes:
        kind: the kind of layer.
        parameters: value of each of its parameters, by its name in the module.
        calls: its calls.
    """

    kind: LayerKind
    parameters: Mapping[str, str]
    calls: tuple[LayerCall, ...]

    @property
    def column_dim(self) -> int:
        """The dim of the weight with the features of the results."""
        return 0 if self.kind is LayerKind.LINEAR else 1

    @property
    def row_dim(self) -> int:
        """The dim of the weight with the features, or the indices, that the layer reads."""
        return 1 - self.column_dim


def parallel_layers(graph: Graph) -> dict[str, ParallelLayer]:
    """The linear layers and embeddings of a program, by the path of their module.

    A tied parameter belongs to each of its modules. A layer whose parameters are read outside of
    all these modules is not among them, since the hooks of a framework do not run there.
    """
    owned: dict[str, dict[str, str]] = defaultdict(dict)
    owners: dict[str, set[str]] = defaultdict(set)
    for given in graph.inputs:
        if given.kind is InputKind.PARAMETER:
            for name in (given.target, *given.aliases):
                module, _, attribute = name.rpartition(".")
                owned[module][attribute] = given.name
                owners[given.name].add(module)
    inside: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        inside[node.module].append(node)
    found = {}
    for module, parameters in owned.items():
        readers = {i for value in parameters.values() for i, _ in graph.consumers[value]}
        around = set().union(*(owners[value] for value in parameters.values()))
        if all(graph.nodes[i].module in around for i in readers):
            layer = _layer(graph, parameters, inside[module])
            if layer is not None:
                found[module] = layer
    return found


def _layer(
    graph: Graph, parameters: Mapping[str, str], nodes: Sequence[Node]
) -> ParallelLayer | None:
    """The layer of a module with these parameters and operators; None if it is no such layer."""
    values = set(parameters.values())
    products = [node for node in nodes if not values.isdisjoint(node.inputs)]
    if not products or "weight" not in parameters or set(parameters) - {"weight", "bias"}:
        return None
    if all(_is_linear(node, parameters) for node in products):
        kind = LayerKind.LINEAR
    elif "bias" not in parameters and all(_is_embedding(node, parameters) for node in products):
        kind = LayerKind.EMBEDDING
    elif all(_is_conv1d(node, parameters) for node in products):
        kind = LayerKind.CONV1D
    else:
        return None
    calls = [_call(graph, kind, product) for product in products]
    complete = [call for call in calls if call is not None]
    return ParallelLayer(kind, parameters, tuple(complete)) if len(complete) == len(calls) else None


def _call(graph: Graph, kind: LayerKind, product: Node) -> LayerCall | None:
    """The call with a product; None if it has other operators than such a layer."""
    if kind is not LayerKind.CONV1D:
        return LayerCall((product,), product, product.outputs[0])
    flat = product.inputs[1]
    before = [node for node in graph.nodes if node.outputs == (flat,)]
    after = [graph.nodes[i] for i, _ in graph.consumers[product.outputs[0]]]
    around = (*before, *after)
    shaped = len(before) == len(after) == 1 and all(
        node.operator == "aten.reshape.default" and node.module == product.module for node in around
    )
    if not shaped or len(graph.consumers[flat]) > 1:
        return None
    return LayerCall((before[0], product, after[0]), product, after[0].outputs[0])


def _is_linear(node: Node, parameters: Mapping[str, str]) -> bool:
    bias = Ref(parameters["bias"]) if "bias" in parameters else None
    return (
        node.operator == "aten.linear.default"
        and node.argument("weight") == Ref(parameters["weight"])
        and node.argument("bias") == bias
    )


def _is_embedding(node: Node, parameters: Mapping[str, str]) -> bool:
    weight = Ref(parameters["weight"])
    return node.operator == "aten.embedding.default" and node.argument("weight") == weight


def _is_conv1d(node: Node, parameters: Mapping[str, str]) -> bool:
    return (
        node.operator == "aten.addmm.default"
        and node.argument("self") == Ref(parameters.get("bias", ""))
        and node.argument("mat2") == Ref(parameters["weight"])
    )
