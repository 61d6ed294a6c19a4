"""Roles of mesh axes in a plan, found in its layouts: batch, features, sequence, experts, pipeline.

An axis has a role in each operator: the origin of the dim that it shards. The share of a role is
that of the floating-point operations of all contractions, or of the elements of all results if
there are none. A parameter is *fully sharded* along an axis (FSDP) if it is stored in shards and
gathered before its operators read it.

Placements are in DTensor's words, by what a dim counts: `Shard(batch)`, `Shard(sequence)`,
`Shard(features)`, `Shard(experts)`, `Partial`, `Replicate`.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar

from autoshard.constraints.batch import DimOrigins
from autoshard.graph import DimFactors, Graph, InputKind, Node, Origin, graph_from_json
from autoshard.graph.experts import EXPERT_BIAS, GROUPED_MM
from autoshard.layouts import Layout
from autoshard.ops import OperatorRule, call_of, rule_for, weights_of
from autoshard.plan.document import Plan
from autoshard.plan.stage import PlacedNode, Stage
from autoshard.pricing.module_kinds import ModuleKind, module_kinds, parameter_kinds


class AxisRole(StrEnum):
    """Role of an axis in an operator."""

    BATCH = "batch"
    FEATURES = "heads/features"
    SEQUENCE = "sequence"
    EXPERTS = "experts"
    IDLE = "nothing"

    @property
    def words(self) -> str:
        """The role after "shards"."""
        return f"the {self}" if self in {AxisRole.BATCH, AxisRole.SEQUENCE} else str(self)


class Storage(NamedTuple):
    """Placement of a parameter along an axis.

    Attributes:
        dim: that the axis shards; None if each rank has the whole.
        gathered: True for shards that are gathered before operators read them (FSDP).
    """

    dim: int | None = None
    gathered: bool = False

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate"
        return f"Shard({self.dim}){' gathered' if self.gathered else ''}"


AxisKey = tuple[str, int]
"""Name and number of ranks of an axis; stages of a pipeline may have different ones."""

Subject = ModuleKind | None
"""Kind of layer that a figure is about; None for operators and parameters of no layer."""

COUNTED_IN_ELEMENTS = frozenset({ModuleKind.NORM, ModuleKind.EMBEDDING, None})
"""Kinds whose work is counted in elements of results; that of others in operations."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class AxisUse:
    """The use of one mesh axis.

    Attributes:
        name: name of the axis.
        size: its number of ranks.
        work: share of the floating-point operations by role.
        stored: share of the bytes of parameters by storage.
        stages: number of pipeline ranks that divide it; 1 for none.
    """

    name: str
    size: int
    work: Mapping[AxisRole, float]
    stored: Mapping[Storage, float]
    stages: int = 1

    @property
    def main_role(self) -> AxisRole | None:
        """The role with the largest share; None for an axis that only divides stages."""
        return max(self.work, key=lambda role: (self.work[role], role != "nothing"), default=None)

    @property
    def remark(self) -> str:
        """A remark if the role contradicts what the name suggests; empty otherwise."""
        stem = self.name.lower().rstrip("0123456789_")
        meaning, expected = _SUGGESTED.get(stem, ("", frozenset()))
        role = self.main_role
        if stem in _PIPELINE_NAMES and self.stages == 1:
            meaning = "pipeline parallelism"
        elif not meaning or role in {None, AxisRole.IDLE, *expected}:
            return ""
        does = "is not divided among stages"
        if role is not None:
            does = f"shards {role.words} in {percent(self.work[role])} of flops"
        return f"axis {self.name} {does}, although its name suggests {meaning}"


_DATA = ("data parallelism", frozenset({AxisRole.BATCH}))
_TENSOR = ("tensor parallelism", frozenset({AxisRole.FEATURES, AxisRole.EXPERTS}))
_SEQUENCE = ("sequence parallelism", frozenset({AxisRole.SEQUENCE}))
_EXPERTS = ("expert parallelism", frozenset({AxisRole.EXPERTS}))
_SUGGESTED: Mapping[str, tuple[str, frozenset[AxisRole]]] = {
    **dict.fromkeys(("dp", "ddp", "data", "fsdp", "hsdp", "batch", "replica", "replicate"), _DATA),
    **dict.fromkeys(("dp_shard", "dp_replicate", "shard"), _DATA),
    **dict.fromkeys(("tp", "mp", "tensor", "model"), _TENSOR),
    **dict.fromkeys(("cp", "seq", "sequence", "context"), _SEQUENCE),
    **dict.fromkeys(("ep", "expert", "experts"), _EXPERTS),
}
"""Stems of names of axes, what they suggest, and the roles that agree with it."""

_PIPELINE_NAMES = frozenset({"pp", "pipe", "pipeline", "stage", "stages"})


@dataclass(frozen=True)
class Roles:
    """The roles of all axes in a plan.

    Attributes:
        sizes: number of ranks of each axis of the mesh, by name; axes of one rank are left out.
        work: operations (or elements, see `COUNTED_IN_ELEMENTS`) by kind of layer, axis and role.
        stored: bytes of parameters by kind of layer, axis and storage.
        results: elements of the results of operators by kind of layer, axis and placement.
        divided: number of pipeline ranks along each axis that stages divide, by name.
    """

    sizes: Mapping[str, int]
    work: Mapping[tuple[Subject, AxisKey], Counter[AxisRole]]
    stored: Mapping[tuple[Subject, AxisKey], Counter[Storage]]
    results: Mapping[tuple[Subject, AxisKey], Counter[str]]
    divided: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def axes(self) -> tuple[AxisUse, ...]:
        """The use of each axis, in the order of the mesh."""
        return tuple(self._use(name) for name in self.sizes)

    def _use(self, name: str) -> AxisUse:
        counted: Counter[AxisRole] = Counter()
        elements: Counter[AxisRole] = Counter()
        for (kind, (axis, _)), roles in self.work.items():
            if axis == name:
                (elements if kind in COUNTED_IN_ELEMENTS else counted).update(roles)
        stored: Counter[Storage] = Counter()
        for (_, (axis, _)), storages in self.stored.items():
            stored.update(storages if axis == name else {})
        return AxisUse(
            name,
            self.sizes[name],
            shares(counted if counted.total() else elements),
            shares(stored),
            self.divided.get(name, 1),
        )


def percent(share: float) -> str:
    """A share in whole percent; only all of something is 100 %, and only nothing is 0 %."""
    text = f"{share:.0%}"
    if text == "0%" and share > 0:
        return "<1 %"
    return ">99 %" if text == "100%" and share < 1 else f"{text[:-1]} %"


def shares(amounts: Counter[_Key]) -> dict[_Key, float]:
    """Each amount as a share of the total, largest first; empty if the total is 0."""
    total = amounts.total()
    return {key: amount / total for key, amount in amounts.most_common() if total and amount}


def find_roles(plan: Plan) -> Roles:
    """Find the roles of the axes of a plan.

    Args:
        plan: a plan with stages.
    """
    work: defaultdict[tuple[Subject, AxisKey], Counter[AxisRole]] = defaultdict(Counter)
    stored: defaultdict[tuple[Subject, AxisKey], Counter[Storage]] = defaultdict(Counter)
    results: defaultdict[tuple[Subject, AxisKey], Counter[str]] = defaultdict(Counter)
    for stage, graph, origins in _stages(plan):
        found = _RolesInStage(stage, graph, origins)
        for node, placed in zip(graph.nodes, stage.nodes, strict=True):
            kind, amount = found.work_of(node)
            for axis, role in found.roles_of(node, placed):
                work[kind, axis][role] += amount * stage.micro_batches
            for axis, placement, elements in found.results_of(node, placed):
                results[kind, axis][placement] += elements * stage.micro_batches
        for _, kind, nbytes, storages in found.parameters():
            for axis, storage in storages:
                stored[kind, axis][storage] += nbytes
    sizes = {axis.name: axis.size for axis in plan.mesh.axes if axis.size > 1}
    divided = _divided(plan, sizes)
    return Roles(sizes, dict(work), dict(stored), dict(results), divided)


@dataclass(frozen=True, slots=True)
class StageRoles:
    """The roles of the axes of several ranks of one stage, in the order of `axes`.

    Attributes:
        axes: names of the axes.
        operators: role in each operator, by its name.
        parameters: storage of each parameter in words, by the name of its value.
    """

    axes: tuple[str, ...]
    operators: Mapping[str, tuple[AxisRole, ...]]
    parameters: Mapping[str, tuple[str, ...]]


def stage_roles(plan: Plan) -> Iterator[StageRoles]:
    """Find the roles of the axes in every operator and parameter of each stage.

    Args:
        plan: a plan with stages.
    """
    for stage, graph, origins in _stages(plan):
        found = _RolesInStage(stage, graph, origins)
        yield StageRoles(
            tuple(name for name, size in stage.axes if size > 1),
            {
                node.name: tuple(role for _, role in found.roles_of(node, placed))
                for node, placed in zip(graph.nodes, stage.nodes, strict=True)
            },
            {
                name: tuple(str(storage) for _, storage in storages)
                for name, _, _, storages in found.parameters()
            },
        )


def _divided(plan: Plan, sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of stages along each axis that is longer in the mesh than in every stage."""
    inside = [dict(stage.axes) for stage in plan.stages]
    longest = {name: max(axes.get(name, 1) for axes in inside) for name in sizes}
    return {name: sizes[name] // longest[name] for name in sizes if longest[name] < sizes[name]}


def _stages(plan: Plan) -> Iterator[tuple[Stage, Graph, DimOrigins]]:
    """Each stage with its program, in which received tensors have the origins of sent ones."""
    known: dict[str, tuple[DimFactors, ...]] = {}
    for stage in plan.stages:
        graph = graph_from_json(stage.program)
        inputs = tuple(
            replace(given, dims=known[given.name])
            if given.kind is InputKind.RECEIVED and given.name in known
            else given
            for given in graph.inputs
        )
        graph = replace(graph, inputs=inputs)
        origins = DimOrigins(graph)
        sent = {output.name for output in graph.outputs if output.sent}
        known.update((name, origins.of_value(name)) for name in sent if name is not None)
        yield stage, graph, origins


class _RolesInStage:
    """Roles in one stage.

    Args:
        stage: the stage.
        graph: its program.
        origins: origins of the dims of its values.
    """

    def __init__(self, stage: Stage, graph: Graph, origins: DimOrigins) -> None:
        self._stage, self._graph, self._origins = stage, graph, origins
        self._kinds = module_kinds(graph)
        self._weights = weights_of(graph)
        self._sizes = tuple(size for _, size in stage.axes)
        self._rules: dict[int, OperatorRule] = {}
        self._known: dict[tuple[object, ...], tuple[tuple[AxisKey, AxisRole], ...]] = {}

    def work_of(self, node: Node) -> tuple[Subject, int]:
        """The kind of a node, and its operations; its elements if its kind is counted in them."""
        kind = self._kinds.get(node.name)
        if kind in COUNTED_IN_ELEMENTS:
            return kind, sum(self._graph.values[value].numel for value in node.outputs)
        rule = self._rule(node)
        return kind, round(rule.flops_per_point * prod(rule.sizes.values()))

    def roles_of(self, node: Node, placed: PlacedNode) -> tuple[tuple[AxisKey, AxisRole], ...]:
        """The role in a node of each axis of several ranks; equal nodes share the result."""
        weights = tuple(value in self._weights for value in node.inputs)
        layouts = (*placed.inputs, *placed.outputs)
        key = (self._origins.kind_of(node), weights, layouts)
        if key not in self._known:
            parsed = [Layout.parse(text) for text in layouts]
            self._known[key] = tuple(
                (axis, self._role(node, parsed, number))
                for number, axis in enumerate(self._stage.axes)
                if axis[1] > 1
            )
        return self._known[key]

    def results_of(self, node: Node, placed: PlacedNode) -> Iterator[tuple[AxisKey, str, int]]:
        """The placement of each result along each axis of several ranks, and its elements."""
        texts = (*placed.inputs, *placed.outputs)
        layouts = [Layout.parse(text) for text in texts]
        for number, axis in enumerate(self._stage.axes):
            if axis[1] == 1:
                continue
            role = self._role(node, layouts, number)
            for output, value in enumerate(node.outputs, len(placed.inputs)):
                layout = layouts[output]
                placement = "Replicate" if layout.types[number].is_replicated else "Partial"
                if layout.types[number].is_shard:
                    found = self._role_of_dim(node, output, layout, number)
                    by_expert = role is AxisRole.EXPERTS and layout.types[number].dim == 0
                    placement = f"Shard({_DIMS[AxisRole.EXPERTS if by_expert else found]})"
                yield axis, placement, self._graph.values[value].numel

    def _rule(self, node: Node) -> OperatorRule:
        kind = self._graph.kinds[self._graph.numbers[node.name]]
        if kind not in self._rules:
            self._rules[kind] = rule_for(call_of(self._graph, node))
        return self._rules[kind]

    def _role(self, node: Node, layouts: list[Layout], axis: int) -> AxisRole:
        found = {
            self._role_of_dim(node, tensor, layout, axis)
            for tensor, layout in enumerate(layouts)
            if layout.types[axis].is_shard
        }
        # A dim of a tensor that the model creates, such as a mask, has the least specific origin.
        order = (AxisRole.EXPERTS, AxisRole.BATCH, AxisRole.SEQUENCE, AxisRole.FEATURES)
        return next((role for role in order if role in found), AxisRole.IDLE)

    def _role_of_dim(self, node: Node, tensor: int, layout: Layout, axis: int) -> AxisRole:
        dim, rule = layout.types[axis].dim, self._rule(node)
        is_input = tensor < len(rule.inputs)
        letters = rule.inputs[tensor][dim] if is_input else ()
        reads_weight = any(value in self._weights for value in node.inputs)
        if reads_weight and rule.contracted.intersection(letters):
            return AxisRole.FEATURES
        if node.operator in {GROUPED_MM, EXPERT_BIAS} and is_input and dim == 0:
            return AxisRole.EXPERTS
        if self._shards_matrices(node, tensor, dim):
            return AxisRole.EXPERTS
        factors = self._origins.of_dims(node)[tensor][dim]
        order = layout.sharding_axes(dim)
        outer = prod(self._sizes[a] for a in order[: order.index(axis)])
        return _ROLES[_origin_inside(factors, outer)]

    def _shards_matrices(self, node: Node, tensor: int, dim: int) -> bool:
        """True for the first dim of a batched product with a parameter: one matrix per expert."""
        is_batched = node.operator.split(".")[1] in {"bmm", "baddbmm"}
        weights = [value in self._weights for value in node.inputs]
        return is_batched and dim == 0 and any(weights) and tensor < len(weights)

    def parameters(self) -> Iterator[tuple[str, Subject, int, list[tuple[AxisKey, Storage]]]]:
        """Name, kind of layer, bytes, and storage along each axis of every parameter."""
        kinds = parameter_kinds(self._graph, self._kinds)
        used = self._used_in_shards()
        for placed in self._stage.parameters:
            layout, kind = Layout.parse(placed.layout), kinds.get(placed.name)
            storages = [
                (
                    axis,
                    Storage(
                        layout.types[number].dim,
                        used.isdisjoint((placed.name, number, one) for one in (kind, None)),
                    )
                    if layout.types[number].is_shard
                    else Storage(),
                )
                for number, axis in enumerate(self._stage.axes)
                if axis[1] > 1
            ]
            nbytes = self._graph.values[placed.name].nbytes
            yield placed.name, kind, nbytes, storages

    def _used_in_shards(self) -> set[tuple[str, int, Subject]]:
        """Parameters, axes and kinds of layers whose operators read shards of the parameter.

        A tied parameter may be read in shards by one kind, and gathered for another.
        """
        found: set[tuple[str, int, Subject]] = set()
        for node, placed in zip(self._graph.nodes, self._stage.nodes, strict=True):
            if all(value in self._weights for value in node.inputs):
                continue
            for value, text in zip(node.inputs, placed.inputs, strict=True):
                if value in self._weights:
                    types = Layout.parse(text).types
                    sharded = (a for a, t in enumerate(types) if t.is_shard)
                    kind = self._kinds.get(node.name)
                    found.update((self._weights[value], axis, kind) for axis in sharded)
        return found


_ROLES = {
    Origin.BATCH: AxisRole.BATCH,
    Origin.INPUT: AxisRole.SEQUENCE,
    Origin.MODEL: AxisRole.FEATURES,
}


_DIMS = {role: str(role) for role in AxisRole} | {AxisRole.FEATURES: "features"}
"""Meanings of dims, in placements."""


def _origin_inside(factors: DimFactors, outer: int) -> Origin:
    """The origin of what an axis shards, if the axes outside of it have made `outer` slices."""
    for size, origin in factors:
        if size > outer:
            return origin
        outer = max(outer // size, 1)
    return factors[-1][1] if factors else Origin.MODEL
