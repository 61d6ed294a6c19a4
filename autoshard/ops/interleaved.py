"""Search for useful interleaved shards: concatenated dims, such as fused projections.

A fused projection computes queries, keys and values, or the two halves of a gated layer, in one
matrix product, and a split, slices, or a view with a dim of size three separates its output. With
the weight in interleaved shards, every rank has its heads of each, without communication. The
interleavings (relative sizes of the sub-shards) come from the operators that split or concatenate,
and from views that split a dim into factors or merge them; elementwise operators and products
propagate them to the weights, and to inputs of the program, of which the data loader gives every
rank its slice of each thing. Interleavings that reach neither are useless, and not offered.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, pairwise
from operator import mul
from types import MappingProxyType

from autoshard.graph import Graph, InputKind, Node
from autoshard.layouts import AxisType, S, relative_sizes
from autoshard.ops.registry import rule_for
from autoshard.ops.rules.rule import OperatorRule
from autoshard.ops.rules.spec import call_of
from autoshard.ops.views import SELECTING

MAX_SECTIONS = 16
"""Most sub-shards of a dim that a view suggests. A view of many heads suggests as many, and they
would add as many layouts to every activation for a shard that is hardly of use."""

_Dim = tuple[str, int]
"""A value and one of its dims."""

NOTHING_PINNED: Mapping[_Dim, Collection[tuple[int, ...]]] = MappingProxyType({})


def interleaved_types(
    graph: Graph, pinned: Mapping[tuple[str, int], Collection[tuple[int, ...]]] = NOTHING_PINNED
) -> Mapping[tuple[int, ...], tuple[AxisType, ...]]:
    """Return the interleaved types to consider, by tensor shape.

    They depend on the shape and not on the name, so that tensors of equal shape have equal layouts.

    Args:
        graph: the program.
        pinned: sub-shards to consider also if no operator requires them, by value and dim.
    """
    return {shape: tuple(types) for shape, types in _Propagation(graph).run(pinned).items()}


def weights_of(graph: Graph) -> dict[str, str]:
    """Find parameters and the values computed from a single parameter (transposed, cast).

    Returns:
        The parameter of each of these values.
    """
    found = {i.name: i.name for i in graph.parameters}
    for node in graph.nodes:
        if len(node.inputs) == 1 and node.inputs[0] in found:
            found.update(dict.fromkeys(node.outputs, found[node.inputs[0]]))
    return found


class _Propagation:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._rules: dict[int, OperatorRule] = {}
        self._weights = weights_of(graph)
        self._user_inputs = {i.name for i in graph.inputs if i.kind is InputKind.USER}
        self._seen: set[tuple[_Dim, tuple[int, ...]]] = set()

    def run(
        self, pinned: Mapping[_Dim, Collection[tuple[int, ...]]]
    ) -> dict[tuple[int, ...], dict[AxisType, None]]:
        """Propagate the sub-shards of all operators that split or concatenate, and of pins."""
        found: dict[tuple[int, ...], dict[AxisType, None]] = {}
        sources = [(*source, False) for source in self._sources()]
        sources += [(x, sub_shards, True) for x, all_of in pinned.items() for sub_shards in all_of]
        for place, sub_shards, is_pinned in sources:
            if is_pinned or (place, sub_shards) not in self._seen:
                for value, dim in self._reached(place, sub_shards, is_pinned=is_pinned):
                    types = found.setdefault(self._graph.values[value].shape, {})
                    types[S(dim, sub_shards)] = None
        return found

    def _sources(self) -> Iterator[tuple[_Dim, tuple[int, ...]]]:
        ends: dict[_Dim, set[int]] = {}
        for number, node in enumerate(self._graph.nodes):
            packet = node.operator.rpartition(".")[0]
            for place, sizes in self._pieces(number):
                ends.setdefault(place, {0}).update(accumulate(sizes))
            if packet in SELECTING:
                source = self._outer_factor(node)
                if source is not None:
                    yield source
            else:
                yield from self._factored(number)
        for place, bounds in ends.items():
            sizes = [last - first for first, last in pairwise(sorted(bounds))]
            yield place, relative_sizes(sizes)

    def _rule(self, number: int) -> OperatorRule:
        kind = self._graph.kinds[number]
        if kind not in self._rules:
            self._rules[kind] = rule_for(call_of(self._graph, self._graph.nodes[number]))
        return self._rules[kind]

    def _pieces(self, number: int) -> Iterator[tuple[_Dim, list[int]]]:
        """Each dim that an operator splits or concatenates, with the sizes of its pieces."""
        node, rule = self._graph.nodes[number], self._rule(number)
        if not rule.pieces:
            return
        tensors = zip((*node.inputs, *node.outputs), (*rule.inputs, *rule.outputs), strict=True)
        for value, dims in tensors:
            for dim, letters in enumerate(dims):
                if letters and letters[0] in rule.pieces:
                    relative = [size for size, _ in rule.pieces[letters[0]]]
                    unit = rule.sizes[letters[0]] // sum(relative)
                    yield (value, dim), [size * unit for size in relative]

    def _factored(self, number: int) -> Iterator[tuple[_Dim, tuple[int, ...]]]:
        """Each dim that a view splits into factors, or merges of them, with sub-shards.

        A shard of a factor that is not the outermost is interleaved in the dim with all of them:
        one sub-shard for each index of the factors outside of it.
        """
        node, rule = self._graph.nodes[number], self._rule(number)
        tensors = (*rule.inputs, *rule.outputs)
        if all(len(factors) <= 1 for tensor in tensors for factors in tensor):
            return
        outermost = {dims[0] for tensor in tensors for dims in tensor if dims}
        for value, dims in zip((*node.inputs, *node.outputs), tensors, strict=True):
            for dim, factors in enumerate(dims):
                sections = accumulate((rule.sizes[factor] for factor in factors), mul)
                for inner, outside in zip(factors[1:], sections, strict=False):
                    if inner in outermost and 1 < outside <= MAX_SECTIONS:
                        yield (value, dim), (1,) * outside

    def _outer_factor(self, node: Node) -> tuple[_Dim, tuple[int, ...]] | None:
        """The dim that a view split into (selected dim, rest), with its sub-shards, or None."""
        value = node.inputs[0]
        rule = rule_for(call_of(self._graph, node))
        dims = rule.inputs[0]
        selected = [dim for dim, x in enumerate(dims) if x and x not in rule.outputs[0]]
        while len(selected) == 1 and value in self._graph.makers:
            number = self._graph.makers[value]
            maker, rule = self._graph.nodes[number], self._rule(number)
            letters = rule.outputs[0][selected[0]]
            if len(maker.inputs) != 1 or len(letters) != 1:
                return None
            value = maker.inputs[0]
            selected = [dim for dim, x in enumerate(rule.inputs[0]) if x[:1] == letters]
            if selected and len(rule.inputs[0][selected[0]]) > 1:
                return (value, selected[0]), (1,) * rule.sizes[letters[0]]
        return None

    def _reached(self, start: _Dim, sub_shards: tuple[int, ...], *, is_pinned: bool) -> list[_Dim]:
        """Dims that must be interleaved together with one.

        None, unless it is pinned or of a weight, if no weight or user input is among them.
        """
        found, waiting = {start: None}, [start]
        is_useful = is_pinned or start[0] in self._weights
        while waiting:
            value, _ = place = waiting.pop()
            self._seen.add((place, sub_shards))
            is_useful = is_useful or value in self._user_inputs
            for number in self._neighbours(value):
                for other, is_weight in self._sharded_with(number, place, sub_shards):
                    is_useful = is_useful or is_weight
                    if other not in found:
                        found[other] = None
                        waiting.append(other)
        return list(found) if is_useful else []

    def _neighbours(self, value: str) -> Iterator[int]:
        """Indices of the producer and the consumers of a value."""
        if value in self._graph.makers:
            yield self._graph.makers[value]
        yield from dict.fromkeys(number for number, _ in self._graph.consumers[value])

    def _sharded_with(
        self, number: int, place: _Dim, sub_shards: tuple[int, ...]
    ) -> Iterator[tuple[_Dim, bool]]:
        """Yield dims that an operator shards together with one, and True if it is of a weight."""
        node, rule = self._graph.nodes[number], self._rule(number)
        values, tensors = (*node.inputs, *node.outputs), (*rule.inputs, *rule.outputs)
        letters = {
            tensors[i][place[1]][:1] for i, value in enumerate(values) if value == place[0]
        } - {()}
        free = [x for (x,) in letters if x not in rule.whole and x not in rule.ordered]
        factors = [i for i in range(len(node.inputs)) if i not in rule.addends]
        product = bool(rule.contracted) and any(values[i] not in self._weights for i in factors)
        for i, dims in enumerate(tensors):
            shape = self._graph.values[values[i]].shape
            for dim, factor in enumerate(dims):
                if factor[:1] and factor[0] in free and shape[dim] % (2 * sum(sub_shards)) == 0:
                    is_weight = product and i in factors and values[i] in self._weights
                    yield (values[i], dim), is_weight
