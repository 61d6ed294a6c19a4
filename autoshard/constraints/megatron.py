"""The fixed sharding pattern of Megatron-LM as a constraint, for use as a baseline.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: the last axis shards weights by columns
or by rows, attention by heads and embeddings by vocabulary; the residual stream is replicated on
it. The other axes shard the batch and replicate parameters. A weight is row-parallel if its
operand is sharded by an earlier weight, and column-parallel otherwise.

An axis named `dp` or `ep` shards the batch and never weights; `ep` also shards the experts of a
mixture, between two all-to-all collectives. An axis named `cp` shards the sequence of tokens and,
in attention, that of the queries, for which keys and values are gathered (Llama 3,
arXiv:2407.21783, section 3.3.2). With a distributed optimizer (ZeRO-1; Rajbhandari et al., SC 2020)
the axes that shard the batch or the sequence also shard parameters at rest.

With sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2) the last axis also
shards, by sequence, what is between a row-parallel and the next column-parallel weight: residual
stream, norms, dropout.
"""

from collections.abc import Collection
from dataclasses import dataclass

from autoshard.constraints.batch import BatchSharding, dim_origins, outermost_dims
from autoshard.constraints.constraints import (
    ChoiceId,
    Dim,
    ShardingConstraint,
    StrategyConstraint,
    shard_any,
)
from autoshard.constraints.data_parallel import parameter_shards
from autoshard.constraints.letters import outermost_letters, propagated_letters
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.graph import Graph, InputKind, Node, Origin
from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.layouts import Action
from autoshard.ops import OperatorRule, call_of, rule_for, weights_of

_EMBEDDING = "aten.embedding.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
_NONE: frozenset[Dim] = frozenset()
_MATRICES = {GROUPED_MM: 1, EXPERT_BIAS: 0}
"""Position of the parameters of experts."""

DATA_AXIS, EXPERT_AXIS, CONTEXT_AXIS = "dp", "ep", "cp"
"""Names of axes that shard the batch; the batch and experts; the sequence of tokens."""


@dataclass(frozen=True)
class MegatronAxes:
    """Purposes of the axes of a mesh, by index.

    Attributes:
        weights: the axis that shards weights; None if none does.
        batch: the axes that shard the batch.
        context: the axis that shards the sequence of tokens in all operators.
        experts: the axis that also shards experts.
        by_sequence: True for sequence parallelism on the axis of weights.
        distributed: True if the axes of batch and context also shard parameters at rest.
    """

    weights: int | None
    batch: tuple[int, ...]
    context: int | None = None
    experts: int | None = None
    by_sequence: bool = False
    distributed: bool = False

    @property
    def state(self) -> tuple[int, ...]:
        """The axes that shard parameters at rest, beside that of weights and of experts."""
        context = () if self.context is None else (self.context,)
        return (*self.batch, *context) if self.distributed else ()


def megatron_forbids(
    axes: NontrivialAxes, *, by_sequence: bool, distributed: bool
) -> frozenset[tuple[str, int]]:
    """Collectives that the pattern does not use, each with the index of a non-trivial axis.

    Rows of experts are sent with all-to-all; reduce-scatter is for sequence parallelism and for
    the gradients of a distributed optimizer.
    """
    numbers = range(len(axes.sizes))
    has_experts = EXPERT_AXIS in map(axes.name, numbers)
    kinds = [] if has_experts else [Action.ALL_TO_ALL]
    kinds += [] if by_sequence or distributed else [Action.REDUCE_SCATTER]
    return frozenset((kind, axis) for kind in kinds for axis in numbers)


def megatron_constraints(
    graph: Graph,
    axes: NontrivialAxes,
    *,
    batch_axis: str | None,
    by_sequence: bool = False,
    distributed: bool = False,
) -> dict[ChoiceId, StrategyConstraint]:
    """The pattern as constraints on inputs and operators.

    Args:
        graph: the program.
        axes: the mesh. Its last axis that is neither the batch axis nor named otherwise shards
            weights.
        batch_axis: name of the only axis that may shard the batch; if None, all other axes do
            that divide it.
        by_sequence: True for sequence parallelism.
        distributed: True for a distributed optimizer.
    """
    names = [axes.name(axis) for axis in range(len(axes.sizes))]
    named = (batch_axis, DATA_AXIS, EXPERT_AXIS, CONTEXT_AXIS)
    others = [axis for axis, name in enumerate(names) if name not in named]
    weight_axis = others[-1] if others else None
    batch_axes: list[int] = []
    origins = dim_origins(graph)
    left = origins.batch_size or 1
    for axis, name in enumerate(names):
        may_shard = name != CONTEXT_AXIS and axis != weight_axis and batch_axis in (None, name)
        if may_shard and left % axes.sizes[axis] == 0:
            batch_axes.append(axis)
            left //= axes.sizes[axis]
    purposes = MegatronAxes(
        weight_axis,
        tuple(batch_axes),
        context=names.index(CONTEXT_AXIS) if CONTEXT_AXIS in names else None,
        experts=names.index(EXPERT_AXIS) if EXPERT_AXIS in names else None,
        by_sequence=by_sequence,
        distributed=distributed,
    )
    return megatron_pattern(graph, axes.sizes, purposes)


def megatron_pattern(
    graph: Graph, sizes: tuple[int, ...], axes: MegatronAxes
) -> dict[ChoiceId, StrategyConstraint]:
    """The pattern with given purposes of axes, as constraints on inputs and operators.

    Args:
        graph: the program.
        sizes: size of each axis.
        axes: their purposes.
    """
    pattern = _MegatronPattern(graph, sizes, axes)
    # Operators first, since they determine the parameters that are factors of products.
    operators = {("operator", node.name): pattern.node(node) for node in graph.nodes}
    # What a stage receives has the layout in which the stage before sends it.
    free = (InputKind.LITERAL, InputKind.RECEIVED)
    names = [i.name for i in graph.inputs if i.kind not in free]
    inputs = {("input", name): pattern.input(name) for name in names}
    return {**operators, **inputs, **{("shared", v): pattern.shared(v) for v in graph.values}}


def framework_pattern(
    graph: Graph, sizes: tuple[int, ...], axes: MegatronAxes
) -> dict[str, ShardingConstraint]:
    """The pattern of torchtitan's models, as constraints on operators by name.

    It differs from `megatron_pattern` in that embeddings are sharded by vocabulary in any case.

    Args:
        graph: the program.
        sizes: size of each axis.
        axes: their purposes.
    """
    pattern = _MegatronPattern(graph, sizes, axes)
    found = {node.name: pattern.node(node) for node in graph.nodes}
    rows = frozenset({(0, 0)})
    for node in graph.nodes:
        if axes.weights is not None and node.operator == _EMBEDDING:
            found[node.name] = found[node.name].with_axis(axes.weights, rows, rows)
    return found


class _MegatronPattern:
    """The pattern, applied to the calls of a graph in program order."""

    def __init__(self, graph: Graph, sizes: tuple[int, ...], axes: MegatronAxes) -> None:
        self._graph = graph
        self._sizes = sizes
        self._axes = axes
        self._weight_axis = axes.weights
        self._origins = dim_origins(graph)
        self._batch = BatchSharding(graph, sizes, axes.batch, self._origins)
        self._parameters = weights_of(graph)
        # The calls' tensors by the parameter of experts, or what is computed from it alone.
        self._matrices = {
            self._parameters.get(node.inputs[_MATRICES[node.operator]], ""): node.outputs
            for node in graph.nodes
            if node.operator in _MATRICES
        }
        # Parameters that are factors of products or looked up; others are replicated.
        self._products: set[str] = set()
        # Values and dims that are sharded because a column-parallel weight came before.
        self._sharded: set[tuple[str, int]] = set()
        self._sharded_values: set[str] = set()
        # Values with rows of tokens that are ordered by expert.
        self._rows: set[str] = set()

    def input(self, value: str) -> ShardingConstraint:
        batch = self._origins.of_input(value, Origin.BATCH)
        of_model = self._origins.of_input(value, Origin.MODEL)
        weights = of_model if value in self._products else _NONE
        found = self._constraint(batch, self._axes.batch, weights, _NONE)
        if self._axes.context is not None:
            sequence = self._origins.of_input(value, Origin.INPUT)
            found = found.with_axis(self._axes.context, sequence, sequence)
        if self._parameters.get(value) == value:
            found = self._stored(value, found)
        return found

    def _stored(self, value: str, found: ShardingConstraint) -> ShardingConstraint:
        """The constraint on a parameter at rest, which further axes shard."""
        shape = self._graph.values[value].shape
        experts: tuple[int, ...] = ()
        if value in self._matrices:
            experts = self._expert_axes(self._matrices[value])
        for axis in experts:
            found = found.with_axis(axis, frozenset({(0, 0)}), frozenset({(0, 0)}))
        state = [axis for axis in self._axes.state if axis not in experts]
        others = {*experts, *(() if self._weight_axis is None else (self._weight_axis,))}
        sizes = [self._sizes[axis] for axis in (*state, *sorted(others))]
        shards = parameter_shards(shape, sizes)
        for axis, dim in zip(state, shards, strict=False):
            one = _NONE if dim is None else frozenset({(0, dim)})
            found = found.with_axis(axis, one, one)
        return found

    def shared(self, value: str) -> ShardingConstraint:
        """The constraint on the layout in which all consumers of a value get it."""
        axes, factors = self._axes, self._origins.of_value(value)
        allowed: list[frozenset[Dim] | None] = [None] * len(self._sizes)
        # Its strategy has the layout as input and as output.
        purposes = [(axis, Origin.BATCH) for axis in axes.batch if axis != axes.experts]
        purposes += [] if axes.context is None else [(axes.context, Origin.INPUT)]
        for axis, origin in purposes:
            dims = outermost_dims(factors, origin)
            allowed[axis] = frozenset((i, dim) for i in range(2) for dim in dims)
        return ShardingConstraint(tuple(allowed), (_NONE,) * len(self._sizes))

    def node(self, node: Node) -> ShardingConstraint:
        rule = rule_for(call_of(self._graph, node))
        batch, sharding = self._batch.of_call(node)
        allowed = self._origins.of_call(node, Origin.MODEL)
        if node.operator == _EMBEDDING:
            allowed = frozenset({(0, 0)})
        if node.operator == _EMBEDDING or self._weight_dims(node, rule):
            self._products.update(self._parameters.get(value, "") for value in node.inputs)
        required = self._weight_sharding(node, rule)
        if self._axes.by_sequence and not required and not self._is_sharded(node):
            sequence = self._sequence(node, rule, self._weight_axis)
            allowed, required = allowed | sequence, sequence
        found = self._constraint(batch, sharding, allowed, required)
        if self._axes.context is not None:
            sequence = self._sequence(node, rule, self._axes.context)
            allowed = sequence or self._flattened(node)
            found = found.with_axis(self._axes.context, allowed, sequence)
        return self._with_experts(node, found)

    def _with_experts(self, node: Node, found: ShardingConstraint) -> ShardingConstraint:
        """The constraint of a call, which shards experts if it computes with rows by expert."""
        tensors = (*node.inputs, *node.outputs)
        if node.operator in (DISPATCH, GROUPED_MM, EXPERT_BIAS) or self._has_rows(node.inputs):
            if node.operator != COMBINE:
                self._rows.update(node.outputs)
            of_experts = {(i, 0) for i, value in enumerate(tensors) if value in self._rows}
            if node.operator in _MATRICES:
                of_experts.add((_MATRICES[node.operator], 0))
            tokens = {i for i, value in enumerate(tensors) if value not in self._rows}
            exchanged = {(i, 0) for i in tokens} if node.operator in (DISPATCH, COMBINE) else _NONE
            for axis in self._expert_axes(tensors):
                found = found.with_axis(
                    axis, frozenset(of_experts | exchanged), frozenset(of_experts)
                )
        return found

    def _has_rows(self, values: Collection[str]) -> bool:
        return not self._rows.isdisjoint(values)

    def _expert_axes(self, tensors: Collection[str]) -> tuple[int, ...]:
        """The axes that shard experts: that of weights too, where they divide over both."""
        axes = self._axes
        if axes.experts is None:
            return ()
        own = (axes.experts,)
        if axes.weights is None:
            return own
        both = self._sizes[axes.experts] * self._sizes[axes.weights]
        rows = (self._graph.values[value].shape[0] for value in tensors if value in self._rows)
        divides = all(size % both == 0 for size in rows)
        return (*own, axes.weights) if divides else own

    def _is_sharded(self, node: Node) -> bool:
        """True if a weight, or a tensor that a weight sharded, is an operand of a node."""
        tensors = (*node.inputs, *node.outputs)
        return node.operator == _EMBEDDING or not self._sharded_values.isdisjoint(tensors)

    def _sequence(self, node: Node, rule: OperatorRule, axis: int | None) -> frozenset[Dim]:
        """The sequence dims of a node, if an axis can shard one of them."""
        dims = self._origins.of_call(node, Origin.INPUT)
        if node.operator == _ATTENTION:  # of queries; all ranks read all keys and values
            rows = rule.inputs[0][-2]
            tensors = enumerate((*rule.inputs, *rule.outputs))
            dims &= {(i, dim) for i, own in tensors for dim, at in enumerate(own) if at == rows}
        if axis is None or not dims:
            return _NONE
        return dims if shard_any(rule, self._sizes[axis], dims) is not None else _NONE

    def _flattened(self, node: Node) -> frozenset[Dim]:
        """The dims of a node's tensors with tokens of all sequences, and of what they are made of.

        A rank with one sequence has consecutive tokens of it.
        """
        return self._origins.of_call(node, Origin.BATCH, Origin.INPUT)

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
                    self._sharded_values.add(value)
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
        may = [batch if axis in self._axes.batch else _NONE for axis in range(num_axes)]
        must = [batch if axis in sharding else _NONE for axis in range(num_axes)]
        if self._weight_axis is not None:
            may[self._weight_axis], must[self._weight_axis] = allowed, required
        return ShardingConstraint(tuple(may), tuple(must))


def _at(rule: OperatorRule, dim: Dim) -> tuple[str, ...]:
    """The letters of a dim of an input."""
    return rule.inputs[dim[0]][dim[1]]
