"""Which tensors of a program hold several things one after the other, worth cutting one by one.

One product often makes queries, keys and values, or the two halves of a gated layer. What
comes out is taken apart again, by a split, by slices, or by a view with a dim of three. Cut in
chunks, the weight gives every rank its heads of each, and nothing has to move. The chunks are
those of the operators that take apart or join; pointwise operators and products carry them to
the weights. Where they reach none, a cut in chunks is of no use, and is not offered.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

from autoshard.graph import Graph, InputKind, Node
from autoshard.layouts import AxisType, S, reduced
from autoshard.ops.call import call_of
from autoshard.ops.registry import rule_for
from autoshard.ops.rule import OperatorRule
from autoshard.ops.views import JOINING, SELECTING

_Place = tuple[str, int]
"""A value and one of its dims."""


def chunked_types(graph: Graph) -> Mapping[tuple[int, ...], tuple[AxisType, ...]]:
    """The types with chunks that are worth offering, by the shape of a tensor.

    By shape and not by name, so that all that looks alike has the same layouts to choose from.
    """
    return {shape: tuple(types) for shape, types in _Search(graph).run().items()}


def weights_of(graph: Graph) -> dict[str, str]:
    """Parameters, and what operators of one input make of them: transposed or cast weights.

    Returns:
        The parameter that each of these values is made of.
    """
    found = {i.name: i.name for i in graph.parameters}
    for node in graph.nodes:
        if len(node.inputs) == 1 and node.inputs[0] in found:
            found.update(dict.fromkeys(node.outputs, found[node.inputs[0]]))
    return found


class _Search:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._rules: dict[int, OperatorRule] = {}
        self._weights = weights_of(graph)
        self._given = {i.name for i in graph.inputs if i.kind is InputKind.USER}
        self._seen: set[tuple[_Place, tuple[int, ...]]] = set()

    def run(self) -> dict[tuple[int, ...], dict[AxisType, None]]:
        """Follow the chunks of everything that takes apart or joins."""
        found: dict[tuple[int, ...], dict[AxisType, None]] = {}
        for place, chunks in self._asked():
            if (place, chunks) not in self._seen:
                for value, dim in self._carried(place, chunks):
                    types = found.setdefault(self._graph.values[value].shape, {})
                    types[S(dim, chunks)] = None
        return found

    def _asked(self) -> Iterator[tuple[_Place, tuple[int, ...]]]:
        ends: dict[_Place, set[int]] = {}
        for number, node in enumerate(self._graph.nodes):
            packet = node.operator.rpartition(".")[0]
            if packet in JOINING:
                for place, sizes in self._pieces(number):
                    ends.setdefault(place, {0}).update(accumulate(sizes))
            elif packet in SELECTING:
                asked = self._outer_factor(node)
                if asked is not None:
                    yield asked
        for place, bounds in ends.items():
            sizes = [last - first for first, last in pairwise(sorted(bounds))]
            yield place, reduced(sizes)

    def _rule(self, number: int) -> OperatorRule:
        kind = self._graph.kinds[number]
        if kind not in self._rules:
            self._rules[kind] = rule_for(call_of(self._graph, self._graph.nodes[number]))
        return self._rules[kind]

    def _pieces(self, number: int) -> Iterator[tuple[_Place, list[int]]]:
        """Each dim that an operator takes apart or joins, with the sizes of its pieces."""
        node, rule = self._graph.nodes[number], self._rule(number)
        tensors = zip((*node.inputs, *node.outputs), (*rule.inputs, *rule.outputs), strict=True)
        for value, dims in tensors:
            for dim, letters in enumerate(dims):
                if letters and letters[0] in rule.pieces:
                    relative = [size for size, _ in rule.pieces[letters[0]]]
                    unit = rule.sizes[letters[0]] // sum(relative)
                    yield (value, dim), [size * unit for size in relative]

    def _outer_factor(self, node: Node) -> tuple[_Place, tuple[int, ...]] | None:
        """Where a dim that is selected from was the outer factor of another, in a view before."""
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

    def _carried(self, start: _Place, chunks: tuple[int, ...]) -> list[_Place]:
        """The dims that are cut with one in chunks; none if no weight of a product is."""
        found, waiting, is_fused = {start: None}, [start], False
        while waiting:
            value, _ = place = waiting.pop()
            self._seen.add((place, chunks))
            if value in self._given:
                return []
            for number in self._around(value):
                for other, is_weight in self._cut_with(number, place, chunks):
                    is_fused = is_fused or is_weight
                    if other not in found:
                        found[other] = None
                        waiting.append(other)
        return list(found) if is_fused else []

    def _around(self, value: str) -> Iterator[int]:
        """The nodes that make and take a value."""
        if value in self._graph.makers:
            yield self._graph.makers[value]
        yield from dict.fromkeys(number for number, _ in self._graph.consumers[value])

    def _cut_with(
        self, number: int, place: _Place, chunks: tuple[int, ...]
    ) -> Iterator[tuple[_Place, bool]]:
        """The dims of an operator that are cut with one of them, and whether of a weight."""
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
                if factor[:1] and factor[0] in free and shape[dim] % (2 * sum(chunks)) == 0:
                    is_weight = product and i in factors and values[i] in self._weights
                    yield (values[i], dim), is_weight
