"""Kinds of a program's layers, found in its data flow: attention, MLP, experts, norms and others.

Names of modules are not used. A *linear layer* is a contraction of an activation with a parameter.

| kind           | operators                                                                   |
|----------------|-----------------------------------------------------------------------------|
| attention      | attention operators, pairs of products of activations (scores and values),  |
|                | linear layers whose results they read, and that read their results          |
| MLP            | linear layers between which there are only operators on single elements     |
| experts        | grouped products of `autoshard.graph.experts`                               |
| router         | linear layers that choose experts                                           |
| convolutions   | convolutions                                                                |
| embedding      | lookups in a parameter                                                      |
| output layer   | linear layers that no other contraction follows                             |
| linear layers  | all other linear layers                                                     |
| products       | all other contractions of activations with each other                       |
| norms          | normalisations over features                                                |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autoshard.costs import Category, categorise
from autoshard.graph import Graph, Node
from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.ops import OperatorRule, call_of, is_view, rule_for, weights_of


class ModuleKind(StrEnum):
    """Kind of a layer; the value is its name in texts."""

    ATTENTION = "attention"
    MLP = "MLP"
    EXPERTS = "experts"
    ROUTER = "router"
    CONVOLUTION = "convolutions"
    LINEAR = "linear layers"
    PRODUCT = "products of activations"
    OUTPUT = "output layer"
    EMBEDDING = "embedding"
    NORM = "norms"


_NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "rsqrt")
_LINEAR = frozenset({ModuleKind.LINEAR, ModuleKind.OUTPUT, ModuleKind.MLP})


def module_kinds(graph: Graph) -> dict[str, ModuleKind]:
    """The kind of each node that has one, by name: contractions, lookups and normalisations."""
    return _Classification(graph).kinds()


def parameter_kinds(graph: Graph, kinds: Mapping[str, ModuleKind]) -> dict[str, ModuleKind]:
    """The kind of the layer of each parameter, by its value; parameters of no layer are left out.

    A parameter that several layers read is counted for the first in the order of `ModuleKind`. A
    bias that is added by an operator of its own belongs to the layer with the same module.
    """
    modules = {node.module: kinds[node.name] for node in graph.nodes if node.name in kinds}
    weights = weights_of(graph)
    found: dict[str, set[ModuleKind]] = {}
    for node in graph.nodes:
        kind = kinds.get(node.name) or modules.get(node.module)
        if kind is not None and not all(value in weights for value in node.inputs):
            for value in weights.keys() & set(node.inputs):
                found.setdefault(weights[value], set()).add(kind)
    order = list(ModuleKind)
    return {value: min(several, key=order.index) for value, several in found.items()}


@dataclass(slots=True)
class _Flow:
    """Origin of a value, as far as only operators on single elements lie between.

    Attributes:
        linear: numbers of the linear layers that it comes from.
        attended: True if it comes from a contraction of activations.
    """

    linear: frozenset[int] = frozenset()
    attended: bool = False


class _Classification:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._weights = weights_of(graph)
        self._rules: dict[int, tuple[OperatorRule, bool]] = {}
        self._contractions = [
            number
            for number, node in enumerate(graph.nodes)
            if self._of_kind(number)[1] and any(v not in self._weights for v in node.inputs)
        ]
        self._is_contraction = frozenset(self._contractions)

    def kinds(self) -> dict[str, ModuleKind]:
        """The kind of each node that has one."""
        found = {n: kind for n in range(len(self._graph.nodes)) if (kind := self._alone(n))}
        self._find_attention(found)
        flows, uses = self._forward(found)
        attended = self._reaching(self._attention_inputs(found))
        routed = self._reaching(self._router_inputs())
        contracted = self._reaching(self._contraction_inputs())
        linear = [n for n in self._contractions if n not in found]
        for number in linear:
            node = self._graph.nodes[number]
            if self._reads(node, flows).attended or attended.intersection(node.outputs):
                found[number] = ModuleKind.ATTENTION
            elif routed.intersection(node.outputs):
                found[number] = ModuleKind.ROUTER
            elif contracted.isdisjoint(node.outputs):
                found[number] = ModuleKind.OUTPUT
            else:
                found[number] = ModuleKind.LINEAR
        _find_mlps(found, linear, uses)
        return {self._graph.nodes[number].name: found[number] for number in sorted(found)}

    def _of_kind(self, number: int) -> tuple[OperatorRule, bool]:
        """The rule of a node, and True if it is a contraction."""
        kind = self._graph.kinds[number]
        if kind not in self._rules:
            node = self._graph.nodes[number]
            call = call_of(self._graph, node)
            rule = rule_for(call)
            category = categorise(rule, call.inputs, is_view=is_view(node.operator))
            self._rules[kind] = rule, category is Category.CONTRACTION
        return self._rules[kind]

    def _alone(self, number: int) -> ModuleKind | None:
        """The kind of a node that follows from its operator and inputs."""
        node = self._graph.nodes[number]
        packet = node.operator.split(".")[1]
        weights = [value for value in node.inputs if value in self._weights]
        if node.operator in {GROUPED_MM, EXPERT_BIAS}:
            return ModuleKind.EXPERTS
        if packet.startswith("embedding") and weights:
            return ModuleKind.EMBEDDING
        if packet in _NORMS:
            return ModuleKind.NORM
        if number not in self._is_contraction:
            return None
        if packet.startswith("conv") or packet == "_convolution":
            return ModuleKind.CONVOLUTION
        return None if weights else ModuleKind.PRODUCT

    def _find_attention(self, found: dict[int, ModuleKind]) -> None:
        """Turn products of activations into attention, if they are scores or read scores."""
        nodes = self._graph.nodes
        products = [number for number, kind in found.items() if kind is ModuleKind.PRODUCT]
        read = self._reaching(v for number in products for v in nodes[number].inputs)
        scores = {number for number in products if read.intersection(nodes[number].outputs)}
        ends = [value for number in scores for value in nodes[number].outputs]
        for number in products:
            packet = nodes[number].operator.split(".")[1]
            if "attention" in packet or number in scores or self._follows(number, ends):
                found[number] = ModuleKind.ATTENTION

    def _follows(self, number: int, values: Sequence[str]) -> bool:
        """True if a node uses one of these values, with no contraction in between."""
        nodes = self._graph.nodes
        return bool(self._reaching(nodes[number].inputs).intersection(values))

    def _forward(
        self, found: Mapping[int, ModuleKind]
    ) -> tuple[dict[str, _Flow], dict[int, set[int]]]:
        """The origin of every value, and the contractions that use every linear layer's result.

        A use that is none is -1.
        """
        flows: dict[str, _Flow] = {}
        uses: dict[int, set[int]] = {number: set() for number in self._contractions}
        nothing = _Flow()
        for number, node in enumerate(self._graph.nodes):
            given = [flows.get(value, nothing) for value in self._activations(node)]
            if number in self._is_contraction:
                for origin in frozenset().union(*(flow.linear for flow in given)):
                    uses[origin].add(number)
                is_linear = number not in found
                made = _Flow(frozenset({number} if is_linear else ()), not is_linear)
                if found.get(number) not in {None, ModuleKind.ATTENTION}:
                    made = nothing
            elif self._acts_on_elements(number) and _agree(node, given):
                linear = frozenset().union(*(flow.linear for flow in given))
                made = _Flow(linear, any(flow.attended for flow in given))
            else:
                for origin in frozenset().union(*(flow.linear for flow in given)):
                    uses[origin].add(-1)
                made = nothing
            flows.update(dict.fromkeys(node.outputs, made))
        return flows, uses

    def _activations(self, node: Node) -> list[str]:
        return [value for value in dict.fromkeys(node.inputs) if value not in self._weights]

    def _reads(self, node: Node, flows: Mapping[str, _Flow]) -> _Flow:
        given = [flows[value] for value in self._activations(node) if value in flows]
        linear = frozenset().union(*(flow.linear for flow in given))
        return _Flow(linear, any(flow.attended for flow in given))

    def _acts_on_elements(self, number: int) -> bool:
        """True for views, and for operators that combine elements at the same position only."""
        node = self._graph.nodes[number]
        rule = self._of_kind(number)[0]
        if is_view(node.operator):
            return True
        if number in self._is_contraction or rule.communicates or not node.inputs:
            return False
        made = {letter for dims in rule.outputs for group in dims for letter in group}
        read = {letter for dims in rule.inputs for group in dims for letter in group}
        return read <= made

    def _reaching(self, values: Iterable[str]) -> set[str]:
        """Values that are used for some values, with no contraction in between."""
        reaching = set(values)
        for number in reversed(range(len(self._graph.nodes))):
            node = self._graph.nodes[number]
            if number not in self._is_contraction and not reaching.isdisjoint(node.outputs):
                reaching.update(node.inputs)
        return reaching

    def _attention_inputs(self, found: Mapping[int, ModuleKind]) -> Sequence[str]:
        cores = [number for number, kind in found.items() if kind is ModuleKind.ATTENTION]
        return [value for number in cores for value in self._graph.nodes[number].inputs]

    def _router_inputs(self) -> Sequence[str]:
        """The ids of dispatched tokens, and the weights with which results are combined."""
        return [
            value
            for node in self._graph.nodes
            if node.operator in {DISPATCH, COMBINE}
            for value in node.inputs[1:]
        ]

    def _contraction_inputs(self) -> list[str]:
        read = [v for n in self._contractions for v in self._activations(self._graph.nodes[n])]
        return [*read, *(o.name for o in self._graph.outputs if o.sent and o.name is not None)]


def _find_mlps(
    found: dict[int, ModuleKind], linear: Sequence[int], uses: Mapping[int, set[int]]
) -> None:
    """Turn linear layers into MLPs where only operators on single elements lie between them."""
    first = {
        number
        for number in linear
        if found[number] in _LINEAR
        and uses[number]
        and all(found.get(reader) in _LINEAR for reader in uses[number])
    }
    for number in first:
        for reader in (number, *uses[number]):
            found[reader] = ModuleKind.MLP


def _agree(node: Node, given: Sequence[_Flow]) -> bool:
    """True if inputs have one origin, or if some gate others; a residual connection does not."""
    origins = {(flow.linear, flow.attended) for flow in given}
    return len(origins) == 1 or node.operator.split(".")[1] == "mul"
