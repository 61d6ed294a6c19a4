"""The fixed sharding pattern of Megatron-LM as a constraint, for use as a baseline.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: the last axis shards weights by columns
or by rows, attention by heads and embeddings by vocabulary; the residual stream is replicated on
it. The other axes shard the batch and replicate parameters. A weight is row-parallel if its
operand is sharded by an earlier weight, and column-parallel otherwise.

With sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2) the last axis also
shards, by sequence, what is between a row-parallel and the next column-parallel weight: residual
stream, norms, dropout.
"""

from collections.abc import Collection

from autoshard.graph import Graph, InputKind, Node, Origin
from autoshard.layouts import Action
from autoshard.ops import OperatorRule, call_of, rule_for, weights_of
from autoshard.plan.constraints.batch import BatchSharding, DimOrigins
from autoshard.plan.constraints.constraints import (
    ChoiceId,
    Dim,
    ShardingConstraint,
    StrategyConstraint,
    shard_any,
)
from autoshard.plan.constraints.letters import outermost_letters, propagated_letters
from autoshard.plan.nontrivial_axes import NontrivialAxes

_EMBEDDING = "aten.embedding.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
_NONE: frozenset[Dim] = frozenset()


def megatron_forbids(axes: NontrivialAxes, *, by_sequence: bool) -> frozenset[tuple[str, int]]:
    """Collectives that the pattern does not use, each with the index of a non-trivial axis.

    It has no ZeRO, and reduce-scatter only with sequence parallelism.
    """
    kinds = [Action.ALL_TO_ALL, *([] if by_sequence else [Action.REDUCE_SCATTER])]
    return frozenset((kind, axis) for kind in kinds for axis in range(len(axes.sizes)))


def megatron_constraints(
    graph: Graph, axes: NontrivialAxes, *, batch_axis: str | None, by_sequence: bool = False
) -> dict[ChoiceId, StrategyConstraint]:
    """The pattern as constraints on inputs and operators.

    Args:
        graph: the program.
        axes: the mesh. Its last axis that is not the batch axis shards weights.
        batch_axis: name of the only axis that may shard the batch; if None, all other axes do
            that divide it.
        by_sequence: True for sequence parallelism.
    """
    origins = DimOrigins(graph)
    names = [axes.name(axis) for axis in range(len(axes.sizes))]
    others = [axis for axis, name in enumerate(names) if name != batch_axis]
    weight_axis = others[-1] if others else None
    batch_axes: list[int] = []
    left = origins.batch_size or 1
    for axis, name in enumerate(names):
        may_shard = axis != weight_axis and batch_axis in (None, name)
        if may_shard and left % axes.sizes[axis] == 0:
            batch_axes.append(axis)
            left //= axes.sizes[axis]
    return megatron_pattern(graph, axes.sizes, weight_axis, batch_axes, by_sequence=by_sequence)


def megatron_pattern(
    graph: Graph,
    sizes: tuple[int, ...],
    weight_axis: int | None,
    batch_axes: Collection[int],
    *,
    by_sequence: bool = False,
) -> dict[ChoiceId, StrategyConstraint]:
    """The pattern with given purposes of axes, as constraints on inputs and operators.

    Args:
        graph: the program.
        sizes: size of each axis.
        weight_axis: the axis that shards weights; None if none does.
        batch_axes: the axes that shard the batch.
        by_sequence: True for sequence parallelism on the weight axis.
    """
    pattern = _Pattern(graph, sizes, weight_axis, tuple(batch_axes), by_sequence=by_sequence)
    # Operators first, since they determine the parameters that are factors of products.
    operators = {("operator", node.name): pattern.node(node) for node in graph.nodes}
    # What a stage receives has the layout in which the stage before sends it.
    free = (InputKind.LITERAL, InputKind.RECEIVED)
    names = [i.name for i in graph.inputs if i.kind not in free]
    return {**operators, **{("input", name): pattern.input(name) for name in names}}


def sequence_parallel_pattern(
    graph: Graph, sizes: tuple[int, ...], weight_axis: int, batch_axes: Collection[int]
) -> dict[str, ShardingConstraint]:
    """The pattern with sequence parallelism, as constraints on operators by name.

    Korthikanti et al., "Reducing Activation Recomputation", arXiv:2205.05198: between the layers
    that shard weights, activations are sharded along the sequence.

    Args:
        graph: the program.
        sizes: size of each axis.
        weight_axis: the axis that shards weights and sequences.
        batch_axes: the axes that shard the batch.
    """
    pattern = _Pattern(graph, sizes, weight_axis, tuple(batch_axes), by_sequence=False)
    return {node.name: pattern.sequence_parallel_node(node) for node in graph.nodes}


class _Pattern:
    """The pattern, applied to the calls of a graph in program order."""

    def __init__(
        self,
        graph: Graph,
        sizes: tuple[int, ...],
        weight_axis: int | None,
        batch_axes: tuple[int, ...],
        *,
        by_sequence: bool,
    ) -> None:
        self._graph = graph
        self._by_sequence = by_sequence
        self._sizes = sizes
        self._weight_axis = weight_axis
        self._batch_axes = batch_axes
        self._origins = DimOrigins(graph)
        self._batch = BatchSharding(graph, sizes, batch_axes, self._origins)
        self._parameters = weights_of(graph)
        # Parameters that are factors of products or looked up; others are replicated.
        self._products: set[str] = set()
        # Values and dims that are sharded because a column-parallel weight came before.
        self._sharded: set[tuple[str, int]] = set()

    def input(self, value: str) -> ShardingConstraint:
        batch = self._origins.of_input(value, Origin.BATCH)
        of_model = self._origins.of_input(value, Origin.MODEL)
        weights = of_model if value in self._products else _NONE
        return self._constraint(batch, self._batch_axes, weights, _NONE)

    def node(self, node: Node) -> ShardingConstraint:
        rule = rule_for(call_of(self._graph, node))
        batch, sharding = self._batch.of_call(node)
        allowed = self._origins.of_call(node, Origin.MODEL)
        if node.operator == _EMBEDDING:
            allowed = frozenset({(0, 0)})
        if node.operator == _EMBEDDING or self._weight_dims(node, rule):
            self._products.update(self._parameters.get(value, "") for value in node.inputs)
        required = self._weight_sharding(node, rule)
        if self._by_sequence and not required and not self._is_sharded(node):
            sequence = self._sequence(node, rule)
            allowed, required = allowed | sequence, sequence
        return self._constraint(batch, sharding, allowed, required)

    def _is_sharded(self, node: Node) -> bool:
        """True if a weight, or a tensor that a weight sharded, is an operand of a node."""
        tensors = {*node.inputs, *node.outputs}
        return node.operator == _EMBEDDING or any(value in tensors for value, _ in self._sharded)

    def _sequence(self, node: Node, rule: OperatorRule) -> frozenset[Dim]:
        """The sequence dims of a node, if the weight axis can shard one of them."""
        dims = self._origins.of_call(node, Origin.INPUT)
        if self._weight_axis is None or not dims:
            return _NONE
        can_shard = shard_any(rule, self._sizes[self._weight_axis], dims) is not None
        return dims if can_shard else _NONE

    def sequence_parallel_node(self, node: Node) -> ShardingConstraint:
        """The constraint of a call, whose sequence is sharded if it is between sharded layers."""
        found = self.node(node)
        axis = self._weight_axis
        assert axis is not None
        required, allowed = list(found.required), list(found.allowed)
        if node.operator == _EMBEDDING:
            required[axis] = frozenset({(0, 0)})
            return ShardingConstraint(found.allowed, tuple(required))
        sequence = self._origins.of_call(node, Origin.INPUT)
        results = {(i, dim) for i, dim in sequence if i >= len(node.inputs)}
        values = {value for value, _ in self._sharded}
        has_gradient = any(self._graph.values[value].requires_grad for value in node.outputs)
        if found.required[axis] or not results or not has_gradient or values & {*node.outputs}:
            return found
        allowed[axis] = required[axis] = sequence
        return ShardingConstraint(tuple(allowed), tuple(required))

    def _weight_sharding(self, node: Node, rule: OperatorRule) -> frozenset[Dim]:
        """Dims of a product's weights of which one must be sharded.

        Records the dims of the results that are sharded then.
        """
        if self._weight_axis is None:
            return _NONE
        num_ranks = self._sizes[self._weight_axis]
        letters = {
            letter
            for value, dims in zip(node.inputs, rule.inputs, strict=True)
            for dim, letter in outermost_letters(rule, dims).items()
            if (value, dim) in self._sharded
        }
        if node.operator == _ATTENTION:
            heads = outermost_letters(rule, rule.inputs[0]).get(len(rule.inputs[0]) - 3)
            letters = {heads} if heads is not None else set()
        required = _NONE
        weights = self._weight_dims(node, rule)
        if weights:
            weights &= self._origins.of_call(node, Origin.MODEL)
            rows = frozenset(d for d in weights if not rule.contracted.isdisjoint(_at(rule, d)))
            is_row_parallel = any(not letters.isdisjoint(_at(rule, d)) for d in rows)
            required = rows if is_row_parallel else weights - rows
            if shard_any(rule, num_ranks, required) is None:
                return _NONE
            letters = set()
            if not is_row_parallel:
                letters = {_at(rule, d)[0] for d in required if _at(rule, d)}
        letters = propagated_letters(rule, letters)
        for value, dims in zip(node.outputs, rule.outputs, strict=True):
            for dim, letter in outermost_letters(rule, dims).items():
                divides = rule.sizes[letter] % num_ranks == 0
                if letter in letters and (divides or rule.can_shard(letter, num_ranks)):
                    self._sharded.add((value, dim))
        return required

    def _weight_dims(self, node: Node, rule: OperatorRule) -> frozenset[Dim]:
        """Dims of the weights in a product of weights and activations."""
        if not rule.contracted or node.operator == _EMBEDDING:
            return _NONE
        factors = [i for i in range(len(rule.inputs)) if i not in rule.addends]
        weights = [i for i in factors if node.inputs[i] in self._parameters]
        if len(weights) == len(factors):
            return _NONE
        return frozenset((i, dim) for i in weights for dim in range(len(rule.inputs[i])))

    def _constraint(
        self,
        batch: frozenset[Dim],
        sharding: Collection[int],
        allowed: frozenset[Dim],
        required: frozenset[Dim],
    ) -> ShardingConstraint:
        """A constraint on the weight axis, and on the axes that may and must shard the batch."""
        num_axes = len(self._sizes)
        may = [batch if axis in self._batch_axes else _NONE for axis in range(num_axes)]
        must = [batch if axis in sharding else _NONE for axis in range(num_axes)]
        if self._weight_axis is not None:
            may[self._weight_axis], must[self._weight_axis] = allowed, required
        return ShardingConstraint(tuple(may), tuple(must))


def _at(rule: OperatorRule, dim: Dim) -> tuple[str, ...]:
    """The letters of a dim of an input."""
    return rule.inputs[dim[0]][dim[1]]
