"""Which dims of which values come from what the caller passes in.

Steering by the batch needs to know where the batch is: in `[b*s, h]` it is the outer factor
of dim 0. A dim is a product of factors, each with an origin; the letters of the operators'
rules carry them from value to value.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from autoshard.graph import Graph, InputKind, Node
from autoshard.ops import Dims, OperatorRule, call_of, rule_for
from autoshard.plan.constraints.demands import Dim


class Origin(StrEnum):
    """Where a factor of a dim comes from."""

    BATCH = "batch"
    INPUT = "input"
    """Another dim of what the caller passes: a sequence, rows of pixels."""
    MODEL = "model"
    """A dim of a parameter, or of something made on the way."""


_Factors = tuple[tuple[int, Origin], ...]


class Origins:
    """Origins of the dims of every value.

    Args:
        graph: the program. Its batch size is the size of dim 0 of the first tensor that
            the caller passes; every such tensor with this size in dim 0 has a batch there.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.batch_size = _batch_size(graph)
        self._factors: dict[str, tuple[_Factors, ...]] = {}
        self._calls: dict[str, tuple[tuple[_Factors, ...], ...]] = {}
        for graph_input in graph.inputs:
            if graph_input.name in graph.values:
                shape = graph.values[graph_input.name].shape
                user = graph_input.kind is InputKind.USER
                self._factors[graph_input.name] = tuple(
                    ((size, self._of_input(dim, size) if user else Origin.MODEL),)
                    for dim, size in enumerate(shape)
                )
        for node in graph.nodes:
            self._through(node)

    def of_input(self, value: str, *wanted: Origin) -> frozenset[Dim]:
        """The dims of an input of the program that come from there; it is tensor 0."""
        return _dims([self._factors[value]], wanted)

    def of_call(self, node: Node, *wanted: Origin) -> frozenset[Dim]:
        """The dims of a call's tensors whose outermost factor comes from there.

        An axis cuts the outermost factor first. Dims of one letter are cut together, so
        they have one origin here: a mask that is made on the way has a batch where the
        tensor that it masks has one.
        """
        return _dims(self._calls[node.name], wanted)

    def _of_input(self, dim: int, size: int) -> Origin:
        return Origin.BATCH if dim == 0 and size == self.batch_size else Origin.INPUT

    def _through(self, node: Node) -> None:
        rule = rule_for(call_of(self._graph, node))
        letters: dict[str, _Factors] = {}
        for value, dims in zip(node.inputs, rule.inputs, strict=True):
            for factors, group in zip(self._factors[value], dims, strict=True):
                for letter, found in _deal(factors, group, rule.sizes).items():
                    if all(o is Origin.MODEL for _, o in letters.get(letter, ())):
                        letters[letter] = found
        tensors = (*rule.inputs, *rule.outputs)
        self._calls[node.name] = tuple(_factors_of(rule, dims, letters) for dims in tensors)
        made = self._calls[node.name][len(rule.inputs) :]
        self._factors.update(zip(node.outputs, made, strict=True))


def _dims(tensors: Iterable[Sequence[_Factors]], wanted: Collection[Origin]) -> frozenset[Dim]:
    return frozenset(
        (i, dim)
        for i, dims in enumerate(tensors)
        for dim, factors in enumerate(dims)
        if next((origin for size, origin in factors if size > 1), Origin.MODEL) in wanted
    )


def _batch_size(graph: Graph) -> int | None:
    shapes = (
        graph.values[i.name].shape
        for i in graph.inputs
        if i.kind is InputKind.USER and i.name in graph.values
    )
    return next((shape[0] for shape in shapes if shape), None)


def _factors_of(
    rule: OperatorRule, dims: Dims, letters: Mapping[str, _Factors]
) -> tuple[_Factors, ...]:
    return tuple(
        tuple(
            factor
            for letter in group
            for factor in letters.get(letter, ((rule.sizes[letter], Origin.MODEL),))
        )
        for group in dims
    )


def _deal(factors: _Factors, group: Sequence[str], sizes: Mapping[str, int]) -> dict[str, _Factors]:
    """The factors of each letter of a dim; all get all origins where they do not line up."""
    dealt: dict[str, _Factors] = {}
    rest = [factor for factor in factors if factor[0] != 1]
    for letter in group:
        taken: list[tuple[int, Origin]] = []
        missing = sizes[letter]
        while missing > 1 and rest:
            size, origin = rest.pop(0)
            if size > missing and size % missing == 0:
                rest.insert(0, (size // missing, origin))
                size = missing
            if missing % size:
                return _blurred(factors, group, sizes)
            taken.append((size, origin))
            missing //= size
        dealt[letter] = tuple(taken)
    return dealt


def _blurred(
    factors: _Factors, group: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, _Factors]:
    origins = [origin for _, origin in factors]
    worst = next((o for o in (Origin.BATCH, Origin.INPUT) if o in origins), Origin.MODEL)
    return {letter: ((sizes[letter], worst),) for letter in group}
