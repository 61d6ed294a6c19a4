"""The plans that an export target can express, as constraints.

On the data-parallel axes, every operator with a batch shards it, and nothing else is sharded but
parameters at rest; FSDP2 runs that. On the tensor-parallel axis, linear layers are column- or
row-parallel and embeddings are sharded by vocabulary or by features. Between a column-parallel and
a row-parallel layer activations stay sharded, everywhere else they are replicated.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod
from typing import get_args

from autoshard.constraints.batch import BatchSharding, dim_origins
from autoshard.constraints.constraints import (
    ChoiceId,
    Constraint,
    Dim,
    ShardingConstraint,
    StrategyConstraint,
)
from autoshard.constraints.data_parallel import shards_together
from autoshard.constraints.letters import outermost_letters, propagated_letters
from autoshard.constraints.megatron import MegatronAxes, framework_pattern
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph, Input, InputKind, Node, Origin
from autoshard.graph.parallel_layers import LayerKind, ParallelLayer, parallel_layers
from autoshard.layouts import Action, I, Layout, P
from autoshard.ops import OperatorRule, Strategy, call_of, rule_for
from autoshard.plan.options import ExportableTo, ExportRole
from autoshard.plan.options.restrictions import option_label

_MAX_DATA_AXES = 2
_NONE: frozenset[Dim] = frozenset()
_MOVES = (Action.ALL_GATHER, Action.REDUCE_SCATTER, Action.ALL_TO_ALL, Action.HALO_EXCHANGE)
_SENDS = (Action.ALL_TO_ALL, Action.HALO_EXCHANGE)
_ORDER: tuple[ExportRole, ...] = get_args(ExportRole)
"""Roles in the order in which torchtitan nests its axes, outermost first."""
_DATA = frozenset[ExportRole]({"replicate", "shard"})


@dataclass(frozen=True, slots=True)
class ExportAxes:
    """The purposes of the non-trivial axes in an export.

    Attributes:
        replicate: the data-parallel axes that replicate parameters.
        shard: the data-parallel axes over which parameters may be sharded.
        context: the axis that shards sequences; None if there is none.
        tensor: the tensor-parallel axis; None if there is none.
    """

    replicate: tuple[int, ...]
    shard: tuple[int, ...]
    context: int | None
    tensor: int | None

    @classmethod
    def of(cls, roles: Sequence[ExportRole]) -> "ExportAxes":
        """The axes with each role, from the role of each axis."""
        found = {role: tuple(i for i, one in enumerate(roles) if one == role) for role in _ORDER}
        context, tensor = (next(iter(found[role]), None) for role in ("context", "tensor"))
        return cls(found["replicate"], found["shard"], context, tensor)

    @property
    def data(self) -> tuple[int, ...]:
        """The data-parallel axes."""
        return tuple(sorted((*self.replicate, *self.shard)))

    @property
    def full(self) -> tuple[int, ...]:
        """The axes over which torchtitan shards all parameters; it replicates over no others."""
        return (*self.shard, *(() if self.context is None else (self.context,)))


def export_roles(
    axes: NontrivialAxes, target: ExportableTo, batch_axis: str | None
) -> tuple[tuple[ExportRole, ...], ...]:
    """The ways in which an export can use the axes: the role of each, the usual way first.

    With `fsdp2` all axes are data-parallel, with `hf-tp-plan` none is, with `parallelize-module`
    all but one. torchtitan nests replicas, shards, context and tensor parallelism in this order.

    Args:
        axes: the mesh.
        target: the export target.
        batch_axis: name of the only axis that may shard the batch, if one is set.

    Raises:
        OptionError: the target cannot use the axes.
    """
    names = [axes.name(axis) for axis in range(len(axes.sizes))]
    found = _possible_roles(len(names), target)
    if not found:
        supported = (
            "one axis, which shards layers"
            if target == "hf-tp-plan"
            else f"at most {_MAX_DATA_AXES} data-parallel axes"
        )
        raise OptionError(
            f"exportable_to {target!r} supports {supported}, but the mesh has the axes "
            f"{', '.join(names)} of several devices: plan on a mesh with fewer axes"
        )
    if batch_axis in names:
        number = names.index(batch_axis)
        found = [roles for roles in found if roles[number] in _DATA]
        if target == "torchtitan":
            found = [roles for roles in found if sum(role in _DATA for role in roles) == 1]
    if not found:
        raise OptionError(
            f"exportable_to {target!r} needs an axis that shards layers, besides batch_axis "
            f"{batch_axis!r}: plan on a mesh with another axis, or for fsdp2"
        )
    return tuple(map(tuple, found))


def _possible_roles(number: int, target: ExportableTo) -> list[list[ExportRole]]:
    """The roles that a target can give to a number of axes; none if it cannot use so many."""
    if target == "torchtitan":
        return _torchtitan_roles(number)
    if target == "hf-tp-plan":
        return [["tensor"] * number] if number <= 1 else []
    others: list[ExportRole] = ["replicate", "shard"]
    if target == "fsdp2" or not number:
        return [others[-number:] if number else []] if number <= _MAX_DATA_AXES else []
    data = others[-(number - 1) :] if number > 1 else []
    places = reversed(range(number)) if number <= _MAX_DATA_AXES + 1 else ()
    return [[*data[:place], "tensor", *data[place:]] for place in places]


def _torchtitan_roles(number: int) -> list[list[ExportRole]]:
    """The roles that torchtitan can give to axes; full sharding and tensor parallelism first."""
    found = [
        [*roles]
        for roles in combinations_with_replacement(_ORDER, number)
        if max(roles.count("context"), roles.count("tensor")) <= 1
        # It combines replicas with other parallelism only if FSDP2 shards parameters.
        and (not {"shard", "context"}.isdisjoint(roles) or not {"replicate", "tensor"} <= {*roles})
    ]
    usual = [*["shard"] * (number - 1), "tensor" if number > 1 else "shard"][:number]
    return sorted(found, key=lambda roles: roles != usual)


def exportable_constraint(
    graph: Graph,
    axes: NontrivialAxes,
    target: ExportableTo,
    *,
    batch_axis: str | None,
    roles: Sequence[ExportRole] | None = None,
) -> Constraint:
    """The constraint that a plan can be exported to a target.

    Args:
        graph: the program.
        axes: the mesh.
        target: the export target.
        batch_axis: name of the only axis that may shard the batch, if one is set.
        roles: of the axes, outermost first; axes that a pipeline cut off may come before. The
            usual ones if None.

    Raises:
        OptionError: the target cannot use the axes, or they do not divide the batch.
    """
    possible = export_roles(axes, target, batch_axis)
    chosen = possible[0]
    if roles is not None:
        chosen = tuple(roles)[max(len(roles) - len(axes.sizes), 0) :]
        if chosen not in possible:
            raise OptionError(
                f"export_roles {', '.join(chosen)} are not possible with exportable_to "
                f"{target!r} on this mesh; possible are {'; '.join(map(', '.join, possible))}"
            )
    return _Exportable(graph, axes, target, ExportAxes.of(chosen)).constraint()


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
        by_rows: the axes that must shard it along dim 0, as torchtitan's FSDP2 does.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: ExportAxes
    in_layers: bool
    by_rows: tuple[int, ...]

    def __call__(self, strategy: Strategy) -> bool:
        (layout,) = strategy.outputs
        axes, types = self.axes, layout.types
        if any(types[axis].is_shard for axis in axes.replicate):
            return False
        on_tensor = I if axes.tensor is None else types[axes.tensor]
        if on_tensor.is_shard and (on_tensor.sub_shards or not self.in_layers):
            return False
        if self.by_rows:
            rows = (types[axis] for axis in self.by_rows)
            return all(t.is_shard and t.dim == 0 and not t.sub_shards for t in rows)
        return all(self._is_fully_sharded(layout, axis) for axis in axes.full)

    def _is_fully_sharded(self, layout: Layout, axis: int) -> bool:
        """True if FSDP2 can shard the parameter in this way over an axis, or replicates it."""
        found = layout.types[axis]
        if not found.is_shard:
            return True
        sharding = layout.sharding_axes(found.dim)
        is_even = self.shape[found.dim] % prod(self.sizes[a] for a in sharding) == 0
        is_supported = is_even or (found.dim == 0 and len(sharding) == 1)
        return is_supported and sharding[-1] == axis and not found.sub_shards


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
            if self._target == "torchtitan":
                break  # its models define what they return
            if output.name is not None and output.updates is None:
                strategies["output", str(position)] = self._output(output.name)
        return Constraint(
            option_label("exportable_to", self._target),
            strategies,
            values=dict(self._forbidden_collectives()),
        )

    def _operators(self) -> Iterator[tuple[str, StrategyConstraint]]:
        axes = self._axes
        if self._target == "torchtitan":
            purposes = MegatronAxes(axes.tensor, axes.data, axes.context, by_sequence=True)
            yield from framework_pattern(self._graph, self._sizes, purposes).items()
            return
        for node in self._graph.nodes:
            yield node.name, self._operator(node)

    def _user_input(self, given: Input) -> ShardingConstraint:
        batch = self._origins.of_input(given.name, Origin.BATCH)
        found = self._sharding(batch, self._axes.data if batch else (), _NONE)
        if self._axes.context is None:
            return found
        sequence = self._origins.of_input(given.name, Origin.INPUT)
        return found.with_axis(self._axes.context, sequence, sequence)

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
            by_rows=self._axes.full
            if self._target == "torchtitan" and self._has_rows(shape)
            else (),
        )

    def _has_rows(self, shape: tuple[int, ...]) -> bool:
        """True if a plan can shard dim 0 over the axes of FSDP2; its shards may not be empty."""
        sizes = [self._sizes[axis] for axis in self._axes.full]
        return bool(shape and sizes) and shards_together(shape[0], sizes)

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
                    moves = [*_SENDS]
                forbidden |= set(_on(moves, [self._axes.tensor]))
            if self._axes.context is not None:
                forbidden |= set(_on(_SENDS, [self._axes.context]))
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
