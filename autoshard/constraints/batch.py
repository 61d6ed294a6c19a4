"""The `batch_axis` option, and the origins of tensor dims, which identify batch dims.

In `[b*s, h]` the batch is the outer factor of dim 0. A dim is therefore treated as a product of
factors, each with an origin; the index letters of operator rules propagate factors between values.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autoshard.base.memo import kept_in_argument
from autoshard.constraints.constraints import (
    ChoiceId,
    Dim,
    ShardingConstraint,
    shard_any,
)
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import DimFactors, Graph, InputKind, Node, Origin
from autoshard.layouts import can_be_sharded, largest_shard
from autoshard.ops import Dims, OperatorRule, call_of, rule_for

_MAX_KNOWN = 4096
"""Number of values with different dims whose results are kept."""


class DimOrigins:
    """Origins of the dims of every value.

    Args:
        graph: the program. Its batch size is the size of dim 0 of its first user input that has
            dims; every user input with this size in dim 0 has a batch there. The program of a
            pipeline stage says for each tensor that it receives where its dims come from.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        shapes = {i: graph.values[i.name].shape for i in graph.inputs if i.name in graph.values}
        user = [shape[0] for i, shape in shapes.items() if i.kind is InputKind.USER and shape]
        user += [n for i in shapes for dim in i.dims for n, origin in dim if origin is Origin.BATCH]
        self.batch_size = next(iter(user), None)
        self._factors: dict[str, tuple[DimFactors, ...]] = {}
        self._calls: dict[str, tuple[tuple[DimFactors, ...], ...]] = {}
        self._kinds: dict[str, int] = {}
        for graph_input, shape in shapes.items():
            self._factors[graph_input.name] = tuple(
                graph_input.dims[dim]
                if graph_input.dims
                else ((size, self._of_input(graph_input.kind, dim, size)),)
                for dim, size in enumerate(shape)
            )
        # Equal calls of tensors with equal factors, such as those of all layers, are alike.
        known: dict[Hashable, tuple[int, tuple[tuple[DimFactors, ...], ...]]] = {}
        for kind, node in zip(graph.kinds, graph.nodes, strict=True):
            key = kind, *(self._factors[value] for value in node.inputs)
            if key not in known:
                known[key] = len(known), self._propagated(node)
            self._kinds[node.name], self._calls[node.name] = known[key]
            made = self._calls[node.name][len(node.inputs) :]
            self._factors.update(zip(node.outputs, made, strict=True))

    def of_value(self, value: str) -> tuple[DimFactors, ...]:
        """Sizes and origins of the factors of each dim of a value."""
        return self._factors[value]

    def of_dims(self, node: Node) -> tuple[tuple[DimFactors, ...], ...]:
        """Sizes and origins of the factors of each dim of a call's inputs, then its outputs."""
        return self._calls[node.name]

    def kind_of(self, node: Node) -> int:
        """A number that is the same for equal calls of tensors whose dims have equal origins."""
        return self._kinds[node.name]

    def of_input(self, value: str, *wanted: Origin) -> frozenset[Dim]:
        """The dims of a graph input whose outermost factor has one of these origins.

        They are returned as dims of tensor 0.
        """
        return _dims([self._factors[value]], wanted)

    def of_call(self, node: Node, *wanted: Origin) -> frozenset[Dim]:
        """The dims of a call's tensors whose outermost factor has one of these origins.

        An axis shards the outermost factor first. Dims with the same letter are sharded together,
        so they have the same origin here: a mask created inside the model has the batch dim of the
        tensor that it masks.
        """
        return _dims(self._calls[node.name], wanted)

    def _of_input(self, kind: InputKind, dim: int, size: int) -> Origin:
        if kind is not InputKind.USER:
            return Origin.MODEL
        return Origin.BATCH if dim == 0 and size == self.batch_size else Origin.INPUT

    def _propagated(self, node: Node) -> tuple[tuple[DimFactors, ...], ...]:
        """The factors of each dim of a call's inputs, then its outputs."""
        rule = rule_for(call_of(self._graph, node))
        letters: dict[str, DimFactors] = {}
        for value, dims in zip(node.inputs, rule.inputs, strict=True):
            for factors, group in zip(self._factors[value], dims, strict=True):
                for letter, found in _split_factors(factors, group, rule.sizes).items():
                    if all(o is Origin.MODEL for _, o in letters.get(letter, ())):
                        letters[letter] = found
        tensors = (*rule.inputs, *rule.outputs)
        return tuple(_factors_of(rule, dims, letters) for dims in tensors)


@kept_in_argument
def dim_origins(graph: Graph) -> DimOrigins:
    """The origins of the dims of every value of a program."""
    return DimOrigins(graph)


@lru_cache(_MAX_KNOWN)
def outermost_dims(dims: tuple[DimFactors, ...], origin: Origin) -> tuple[int, ...]:
    """The dims of a value whose outermost factor has an origin."""
    return tuple(sorted(dim for _, dim in _dims([dims], [origin])))


def _dims(tensors: Iterable[Sequence[DimFactors]], wanted: Collection[Origin]) -> frozenset[Dim]:
    return frozenset(
        (i, dim)
        for i, dims in enumerate(tensors)
        for dim, factors in enumerate(dims)
        if next((origin for size, origin in factors if size > 1), Origin.MODEL) in wanted
    )


def _factors_of(
    rule: OperatorRule, dims: Dims, letters: Mapping[str, DimFactors]
) -> tuple[DimFactors, ...]:
    return tuple(
        tuple(
            factor
            for letter in group
            for factor in letters.get(letter, ((rule.sizes[letter], Origin.MODEL),))
        )
        for group in dims
    )


def _split_factors(
    factors: DimFactors, group: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, DimFactors]:
    """The factors of each letter of a dim.

    If factors and letters do not divide each other, all letters have the most specific origin.
    """
    split: dict[str, DimFactors] = {}
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
                origins = [origin for _, origin in factors]
                common = next((o for o in Origin if o in origins), Origin.MODEL)
                return {x: ((sizes[x], common),) for x in group}
            taken.append((size, origin))
            missing //= size
        split[letter] = tuple(taken)
    return split


@dataclass(frozen=True)
class BatchSharding:
    """The sharding of the batch by data-parallel axes: each operator with a batch shards it.

    Attributes:
        graph: the program.
        sizes: size of each non-trivial axis.
        axes: indices of the data-parallel ones.
        origins: origins of the dims of every value.
    """

    graph: Graph
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    origins: DimOrigins
    _known: dict[int, tuple[frozenset[Dim], tuple[int, ...]]] = field(default_factory=dict)

    def of_call(self, node: Node) -> tuple[frozenset[Dim], tuple[int, ...]]:
        """The batch dims of a call's tensors, and the axes that can shard one of them."""
        kind = self.origins.kind_of(node)
        if kind not in self._known:
            self._known[kind] = self._of_call(node)
        return self._known[kind]

    def _of_call(self, node: Node) -> tuple[frozenset[Dim], tuple[int, ...]]:
        batch = self.origins.of_call(node, Origin.BATCH)
        sharding, left = [], rule_for(call_of(self.graph, node))
        for axis in self.axes:
            after = shard_any(left, self.sizes[axis], batch)
            if after is not None:
                sharding.append(axis)
                left = after
        return batch, tuple(sharding)


def batch_constraints(
    graph: Graph, axes: NontrivialAxes, axis: int | None
) -> dict[ChoiceId, ShardingConstraint]:
    """Constraints that shard the batch on one axis wherever possible, and on no other axis.

    Args:
        graph: the program.
        axes: the mesh.
        axis: index of the batch axis among the non-trivial axes; None if its size is 1, so that
            no axis shards the batch.

    Raises:
        OptionError: there is no batch, or the axis cannot shard it.
    """
    origins = dim_origins(graph)
    sizes = axes.sizes
    if origins.batch_size is None:
        raise OptionError("batch_axis is set, but no user input has dims")
    if axis is not None and not can_be_sharded(origins.batch_size, sizes[axis]):
        raise OptionError(
            f"batch_axis {axes.mesh.axis_names[axes.axes[axis]]!r} of {sizes[axis]} ranks does "
            f"not divide the batch of {origins.batch_size}, and shards of "
            f"{largest_shard(origins.batch_size, sizes[axis])} leave nothing for the last rank"
        )

    def constraint(
        batch: frozenset[Dim], dims: frozenset[Dim], *, required: bool
    ) -> ShardingConstraint:
        return ShardingConstraint(
            tuple(None if a == axis else dims - batch for a in range(len(sizes))),
            tuple(batch if a == axis and required else frozenset() for a in range(len(sizes))),
        )

    constraints: dict[ChoiceId, ShardingConstraint] = {}
    for value in (i.name for i in graph.inputs if i.kind is InputKind.USER):
        batch, dims = origins.of_input(value, Origin.BATCH), origins.of_input(value, *Origin)
        constraints["input", value] = constraint(batch, dims, required=True)
    for node in graph.nodes:
        batch, dims = origins.of_call(node, Origin.BATCH), origins.of_call(node, *Origin)
        rule = rule_for(call_of(graph, node))
        required = axis is not None and shard_any(rule, sizes[axis], batch) is not None
        constraints["operator", node.name] = constraint(batch, dims, required=required)
    return constraints
