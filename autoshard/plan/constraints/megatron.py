"""The fixed sharding pattern of Megatron-LM as a constraint, for use as a baseline.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: the last axis shards weights by columns
or by rows, attention by heads and embeddings by vocabulary; the residual stream is replicated on
it. The other axes shard the batch and replicate parameters. A weight is row-parallel if its
operand is sharded by an earlier weight, and column-parallel otherwise.
"""

from collections.abc import Collection

from autoshard.graph import Graph, InputKind, Node, Origin
from autoshard.layouts import Action
from autoshard.ops import Dims, OperatorRule, call_of, rule_for, weights_of
from autoshard.plan.constraints.batch import DimOrigins
from autoshard.plan.constraints.constraints import (
    ChoiceId,
    Dim,
    ShardingConstraint,
    StrategyConstraint,
    shard_any,
)
from autoshard.plan.nontrivial_axes import NontrivialAxes

MEGATRON_FORBIDS = (Action.REDUCE_SCATTER, Action.ALL_TO_ALL)
"""Collectives that the pattern does not use: it has neither sequence parallelism nor ZeRO."""

_EMBEDDING = "aten.embedding.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
_NONE: frozenset[Dim] = frozenset()


def megatron_constraints(
    graph: Graph, axes: NontrivialAxes, *, batch_axis: str | None
) -> dict[ChoiceId, StrategyConstraint]:
    """The pattern as constraints on inputs and operators.

    Args:
        graph: the program.
        axes: the mesh. Its last axis that is not the batch axis shards weights.
        batch_axis: name of the only axis that may shard the batch; if None, all other axes do
            that divide it.
    """
    pattern = _Pattern(graph, axes, batch_axis)
    # Operators first, since they determine the parameters that are factors of products.
    operators = {("operator", node.name): pattern.node(node) for node in graph.nodes}
    # What a stage receives has the layout in which the stage before sends it.
    free = (InputKind.LITERAL, InputKind.RECEIVED)
    names = [i.name for i in graph.inputs if i.kind not in free]
    return {**operators, **{("input", name): pattern.input(name) for name in names}}


class _Pattern:
    """The pattern, applied to the calls of a graph in program order."""

    def __init__(self, graph: Graph, axes: NontrivialAxes, batch_axis: str | None) -> None:
        self._graph = graph
        self._sizes = axes.sizes
        self._origins = DimOrigins(graph)
        self._parameters = weights_of(graph)
        # Parameters that are factors of products or looked up; others are replicated.
        self._products: set[str] = set()
        # Values and dims that are sharded because a column-parallel weight came before.
        self._sharded: set[tuple[str, int]] = set()
        names = [axes.mesh.axis_names[axis] for axis in axes.axes]
        others = [axis for axis, name in enumerate(names) if name != batch_axis]
        self._weight_axis = others[-1] if others else None
        self._batch_axes: list[int] = []
        left = self._origins.batch_size or 1
        for axis, name in enumerate(names):
            may_shard = axis != self._weight_axis and batch_axis in (None, name)
            if may_shard and left % self._sizes[axis] == 0:
                self._batch_axes.append(axis)
                left //= self._sizes[axis]

    def input(self, value: str) -> ShardingConstraint:
        batch = self._origins.of_input(value, Origin.BATCH)
        of_model = self._origins.of_input(value, Origin.MODEL)
        weights = of_model if value in self._products else _NONE
        return self._constraint(batch, self._batch_axes, weights, _NONE)

    def node(self, node: Node) -> ShardingConstraint:
        batch = self._origins.of_call(node, Origin.BATCH)
        rule = rule_for(call_of(self._graph, node))
        sharding, left = [], rule
        for axis in self._batch_axes:
            after = shard_any(left, self._sizes[axis], batch)
            if after is not None:
                sharding.append(axis)
                left = after
        allowed = self._origins.of_call(node, Origin.MODEL)
        if node.operator == _EMBEDDING:
            allowed = frozenset({(0, 0)})
        if node.operator == _EMBEDDING or self._weight_dims(node, rule):
            self._products.update(self._parameters.get(value, "") for value in node.inputs)
        return self._constraint(batch, sharding, allowed, self._weight_sharding(node, rule))

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
            for dim, letter in _outermost(rule, dims).items()
            if (value, dim) in self._sharded
        }
        if node.operator == _ATTENTION:
            heads = _outermost(rule, rule.inputs[0]).get(len(rule.inputs[0]) - 3)
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
        letters = _propagated(rule, letters)
        for value, dims in zip(node.outputs, rule.outputs, strict=True):
            for dim, letter in _outermost(rule, dims).items():
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


def _outermost(rule: OperatorRule, dims: Dims) -> dict[int, str]:
    """For each dim, the letter that is sharded first."""
    found = {}
    for dim, letters in enumerate(dims):
        letter = next((x for x in letters if rule.sizes[x] > 1), None)
        if letter is not None:
            found[dim] = letter
    return found


def _propagated(rule: OperatorRule, letters: set[str]) -> set[str]:
    """The output letters that are sharded if these letters are, including split and merged ones."""
    kept = letters - rule.whole - rule.contracted
    for letter, pieces in rule.pieces.items():
        named = {piece for _, piece in pieces if piece}
        if letter in letters:
            kept |= named
        elif named <= letters:
            kept.add(letter)
    return kept
