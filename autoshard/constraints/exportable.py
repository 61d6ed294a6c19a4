"""The plans that an export target can express, as constraints.

On the data-parallel axes, every operator with a batch shards it, and nothing else is sharded but
parameters at rest; FSDP2 runs that. On the tensor-parallel axis, linear layers are column- or
row-parallel and embeddings are sharded by vocabulary or by features. Between a column-parallel and
a row-parallel layer activations stay sharded, everywhere else they are replicated.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.constraints.batch import BatchSharding, dim_origins
from autoshard.constraints.constraints import (
    ChoiceId,
    Constraint,
    Dim,
    ShardingConstraint,
    StrategyConstraint,
)
from autoshard.constraints.letters import outermost_letters, propagated_letters
from autoshard.constraints.megatron import sequence_parallel_pattern
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph, Input, InputKind, Node, Origin
from autoshard.graph.parallel_layers import LayerKind, ParallelLayer, parallel_layers
from autoshard.layouts import Action, I, Layout, P, can_be_sharded
from autoshard.ops import OperatorRule, Strategy, call_of, rule_for
from autoshard.plan.options import ExportableTo
from autoshard.plan.options.restrictions import option_label

_MAX_DATA_AXES = 2
_NONE: frozenset[Dim] = frozenset()
_MOVES = (Action.ALL_GATHER, Action.REDUCE_SCATTER, Action.ALL_TO_ALL, Action.HALO_EXCHANGE)


@dataclass(frozen=True, slots=True)
class ExportAxes:
    """The purposes of the non-trivial axes in an export.

    Attributes:
        data: the data-parallel axes; FSDP2 shards parameters over the last of them.
        tensor: the tensor-parallel axis; None if there is none.
    """

    data: tuple[int, ...]
    tensor: int | None

    @property
    def shard(self) -> int | None:
        """The data-parallel axis over which parameters may be sharded."""
        return self.data[-1] if self.data else None


def export_axes(axes: NontrivialAxes, target: ExportableTo, batch_axis: str | None) -> ExportAxes:
    """The purposes of axes in plans that are made for a target.

    With `fsdp2` all axes are data-parallel, otherwise all but the last one that is not
    `batch_axis`. One axis is data-parallel for torchtitan.

    Raises:
        OptionError: the target cannot use so many axes.
    """
    numbers = tuple(range(len(axes.sizes)))
    names = [axes.name(axis) for axis in numbers]
    tensor = next((axis for axis in reversed(numbers) if names[axis] != batch_axis), None)
    if target == "fsdp2" or (target == "torchtitan" and len(numbers) == 1):
        tensor = None
    data = tuple(axis for axis in numbers if axis != tensor)
    limit = 0 if target == "hf-tp-plan" else _MAX_DATA_AXES
    if len(data) > limit:
        supported = (
            "one axis, which shards layers" if limit == 0 else f"at most {limit} data-parallel axes"
        )
        raise OptionError(
            f"exportable_to {target!r} supports {supported}, but the mesh has the axes "
            f"{', '.join(names)} of several devices: plan on a mesh with fewer axes"
        )
    if tensor is None and target in ("hf-tp-plan", "parallelize-module") and numbers:
        raise OptionError(
            f"exportable_to {target!r} needs an axis that shards layers, besides batch_axis "
            f"{batch_axis!r}: plan on a mesh with another axis, or for fsdp2"
        )
    return ExportAxes(data, tensor)


def exportable_constraint(
    graph: Graph, axes: NontrivialAxes, target: ExportableTo, *, batch_axis: str | None
) -> Constraint:
    """The constraint that a plan can be exported to a target.

    Args:
        graph: the program.
        axes: the mesh.
        target: the export target.
        batch_axis: name of the only axis that may shard the batch, if one is set.

    Raises:
        OptionError: the target cannot use the axes, or they do not divide the batch.
    """
    purposes = export_axes(axes, target, batch_axis)
    return _Exportable(graph, axes, target, purposes).constraint()


@dataclass(frozen=True, slots=True)
class _OperatorConstraint:
    """A constraint on the strategies of an operator.

    Attributes:
        sharding: the dims that each axis may and must shard.
        tensor: the tensor-parallel axis; None if there is none.
        partial: tensors of the call that may be partial on the tensor-parallel axis.
    """

    sharding: ShardingConstraint
    tensor: int | None
    partial: frozenset[int]

    def __call__(self, strategy: Strategy) -> bool:
        if not self.sharding(strategy):
            return False
        if self.tensor is None:
            return True
        types = [x.types[self.tensor] for x in (*strategy.inputs, *strategy.outputs)]
        if any(t.sub_shards for t in types):
            return False
        if any(t == P and i not in self.partial for i, t in enumerate(types)):
            return False
        return all(collective.axis != self.tensor for collective in strategy.collectives)


@dataclass(frozen=True, slots=True)
class _ParameterConstraint:
    """A constraint on the layout of a parameter at rest.

    Attributes:
        shape: of the parameter.
        sizes: size of each non-trivial axis.
        axes: the purposes of the axes.
        in_layers: True if it belongs only to layers that the tensor-parallel axis may shard.
        by_rows: True if FSDP2 must shard it, along dim 0, as torchtitan does.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: ExportAxes
    in_layers: bool
    by_rows: bool

    def __call__(self, strategy: Strategy) -> bool:
        (layout,) = strategy.outputs
        axes, types = self.axes, layout.types
        if any(types[axis].is_shard for axis in axes.data if axis != axes.shard):
            return False
        on_tensor = I if axes.tensor is None else types[axes.tensor]
        if on_tensor.is_shard and (on_tensor.sub_shards or not self.in_layers):
            return False
        return axes.shard is None or self._is_fully_sharded(layout, axes.shard)

    def _is_fully_sharded(self, layout: Layout, axis: int) -> bool:
        """True if FSDP2 can shard the parameter in this way over an axis, or replicates it."""
        found = layout.types[axis]
        if self.by_rows:
            return found.is_shard and found.dim == 0 and not found.sub_shards
        if not found.is_shard:
            return True
        sharding = layout.sharding_axes(found.dim)
        is_even = self.shape[found.dim] % prod(self.sizes[a] for a in sharding) == 0
        is_supported = is_even or (found.dim == 0 and len(sharding) == 1)
        return is_supported and sharding[-1] == axis and not found.sub_shards


def _can_shard_rows(shape: tuple[int, ...], sizes: tuple[int, ...], axes: ExportAxes) -> bool:
    """True if a plan can shard dim 0 over the axis of FSDP2; its shards may not be empty."""
    return axes.shard is not None and bool(shape) and can_be_sharded(shape[0], sizes[axes.shard])


class _Exportable:
    """The constraint, built in program order."""

    def __init__(
        self, graph: Graph, axes: NontrivialAxes, target: ExportableTo, purposes: ExportAxes
    ) -> None:
        self._graph = graph
        self._sizes = axes.sizes
        self._target = target
        self._axes = purposes
        self._origins = dim_origins(graph)
        self._batch = BatchSharding(graph, axes.sizes, purposes.data, self._origins)
        self._layers = parallel_layers(graph)
        self._layer_of = {
            node.name: layer
            for layer in self._layers.values()
            for call in layer.calls
            for node in call.nodes
        }
        # Values and dims that are sharded if the column-parallel layers before them are.
        self._sharded: set[tuple[str, int]] = set()
        batch = self._origins.batch_size
        ranks = prod(self._sizes[axis] for axis in purposes.data)
        if purposes.data and (batch is None or batch % ranks):
            raise OptionError(
                f"exportable_to {target!r} divides the batch among {ranks} ranks, but it has "
                f"{batch or 'no'} rows"
            )

    def constraint(self) -> Constraint:
        strategies: dict[ChoiceId, StrategyConstraint] = {
            ("operator", name): constraint for name, constraint in self._operators()
        }
        for given in self._graph.inputs:
            if given.kind is InputKind.PARAMETER:
                strategies["input", given.name] = self._parameter(given)
            elif given.kind is InputKind.USER and given.name in self._graph.values:
                strategies["input", given.name] = self._user_input(given)
        for position, output in enumerate(self._graph.outputs):
            if output.name is not None and output.updates is None:
                strategies["output", str(position)] = self._output(output.name)
        return Constraint(
            option_label("exportable_to", self._target),
            strategies,
            values=dict(self._forbidden_collectives()),
        )

    def _operators(self) -> Iterator[tuple[str, StrategyConstraint]]:
        tensor = self._axes.tensor
        if self._target == "torchtitan" and tensor is not None:
            yield from sequence_parallel_pattern(
                self._graph, self._sizes, tensor, self._axes.data
            ).items()
            return
        for node in self._graph.nodes:
            yield node.name, self._operator(node)

    def _user_input(self, given: Input) -> ShardingConstraint:
        batch = self._origins.of_input(given.name, Origin.BATCH)
        return self._sharding(batch, self._axes.data if batch else (), _NONE)

    def _output(self, value: str) -> ShardingConstraint:
        """Outputs are not sharded by the tensor-parallel axis, and have a rank's rows."""
        dims = [
            next((origin for size, origin in factors if size > 1), Origin.MODEL)
            for factors in self._origins.of_value(value)
        ]
        batch = frozenset((0, dim) for dim, origin in enumerate(dims) if origin is Origin.BATCH)
        return self._sharding(batch, self._axes.data if batch else (), _NONE)

    def _sharding(
        self, batch: frozenset[Dim], sharding: Sequence[int], tensor: frozenset[Dim]
    ) -> ShardingConstraint:
        """A constraint that these data-parallel axes shard the batch, and no axis other dims."""
        axes = range(len(self._sizes))
        allowed = [tensor if axis == self._axes.tensor else batch for axis in axes]
        return ShardingConstraint(
            tuple(allowed), tuple(batch if axis in sharding else _NONE for axis in axes)
        )

    def _parameter(self, given: Input) -> _ParameterConstraint:
        names = (given.target, *given.aliases)
        layers = [self._layers.get(name.rpartition(".")[0]) for name in names]
        kinds = _KINDS[self._target]
        in_layers = all(layer is not None and layer.kind in kinds for layer in layers)
        shape = self._graph.values[given.name].shape
        return _ParameterConstraint(
            *(shape, self._sizes, self._axes),
            in_layers=in_layers,
            by_rows=self._target == "torchtitan"
            and _can_shard_rows(shape, self._sizes, self._axes),
        )

    def _operator(self, node: Node) -> _OperatorConstraint:
        rule = rule_for(call_of(self._graph, node))
        batch, sharding = self._batch.of_call(node)
        partial: frozenset[int] = frozenset()
        dims = _NONE
        if self._axes.tensor is not None:
            layer = self._layer_of.get(node.name)
            if layer is not None and layer.kind in _KINDS[self._target]:
                dims, partial = self._layer_dims(node, rule, layer)
            else:
                dims = self._inner_dims(node, rule)
            self._sharded.update(
                (value, dim)
                for i, value in enumerate(node.outputs)
                for dim in range(len(rule.outputs[i]))
                if (len(node.inputs) + i, dim) in dims
            )
        return _OperatorConstraint(
            self._sharding(batch, sharding, dims), self._axes.tensor, partial
        )

    def _layer_dims(
        self, node: Node, rule: OperatorRule, layer: ParallelLayer
    ) -> tuple[frozenset[Dim], frozenset[int]]:
        """Dims that may be sharded in a layer, and the tensors that may be partial."""
        num = len(node.inputs)
        result = num, len(rule.outputs[0]) - 1
        if layer.kind is LayerKind.CONV1D and node.operator != "aten.addmm.default":
            read = (node.inputs[0], len(rule.inputs[0]) - 1)
            is_last = any(call.nodes[-1] is node for call in layer.calls)
            dims = {(0, read[1]), result} if is_last or read in self._sharded else set()
            return frozenset(dims), frozenset({0, num} if is_last else ())
        own = {value: i for i, value in enumerate(node.inputs)}
        weight = own[layer.parameters["weight"]]
        dims = {(weight, layer.column_dim), result}
        addends = {own[layer.parameters["bias"]]} if "bias" in layer.parameters else set()
        dims |= {(i, 0) for i in addends}
        read_position = next(i for i in own.values() if i != weight and i not in addends)
        last = len(rule.inputs[read_position]) - 1
        is_embedding = layer.kind is LayerKind.EMBEDDING
        if is_embedding:
            dims.add((weight, layer.row_dim))
        elif (node.inputs[read_position], last) in self._sharded:
            dims |= {(weight, layer.row_dim), (read_position, last)}
        return frozenset(dims), frozenset({*addends, num})

    def _inner_dims(self, node: Node, rule: OperatorRule) -> frozenset[Dim]:
        """Dims that may be sharded in an operator that reads results of column-parallel layers."""
        letters: set[str] = set()
        others: set[str] = set()
        for value, dims in zip(node.inputs, rule.inputs, strict=True):
            found = outermost_letters(rule, dims)
            sharded = {letter for dim, letter in found.items() if (value, dim) in self._sharded}
            letters |= sharded
            others |= set(found.values()) - sharded
            if not sharded and self._graph.values[value].requires_grad:
                # Each rank would have only its part of the gradient of a replicated tensor.
                return _NONE
        num_ranks = 1 if self._axes.tensor is None else self._sizes[self._axes.tensor]
        letters -= others | rule.contracted
        letters = {letter for letter in letters if rule.can_shard(letter, num_ranks)}
        kept = propagated_letters(rule, letters)
        tensors = [(dims, letters) for dims in rule.inputs]
        tensors += [(dims, kept) for dims in rule.outputs]
        return frozenset(
            (i, dim)
            for i, (dims, wanted) in enumerate(tensors)
            for dim, letter in outermost_letters(rule, dims).items()
            if letter in wanted
        )

    def _forbidden_collectives(self) -> Iterator[tuple[str, frozenset[tuple[str, int]]]]:
        """Collectives that move shards of each value where the target has no such step."""
        gathered = self._gathered()
        parameters = {given.name for given in self._graph.parameters}
        for value in self._graph.values:
            forbidden = set()
            if value not in parameters:
                forbidden |= set(_on(_MOVES, self._axes.data))
            if self._axes.tensor is not None:
                moves = [m for m in _MOVES if m is not Action.ALL_GATHER or value not in gathered]
                if self._target == "torchtitan":
                    moves = [Action.ALL_TO_ALL, Action.HALO_EXCHANGE]
                forbidden |= set(_on(moves, [self._axes.tensor]))
            if forbidden:
                yield value, frozenset(forbidden)

    def _gathered(self) -> frozenset[str]:
        """The values that may be gathered on the tensor-parallel axis."""
        return frozenset(
            value
            for layer in self._layers.values()
            if layer.kind in _KINDS[self._target]
            for call in layer.calls
            for value in (call.result, *call.product.outputs)
        )


_KINDS: dict[ExportableTo, tuple[LayerKind, ...]] = {
    "fsdp2": (),
    "parallelize-module": (LayerKind.LINEAR, LayerKind.EMBEDDING, LayerKind.CONV1D),
    "hf-tp-plan": (LayerKind.LINEAR, LayerKind.EMBEDDING),
    "torchtitan": (LayerKind.LINEAR, LayerKind.EMBEDDING),
}
"""The layers that each target can shard over the tensor-parallel axis."""


def _on(actions: Iterable[Action], axes: Iterable[int]) -> Iterator[tuple[str, int]]:
    axes = tuple(axes)
    return ((action, axis) for action in actions for axis in axes)
