"""Constraints from planning options: pins, forbidden collectives and sharding patterns."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod

from autoshard.errors import LayoutError, OptionError
from autoshard.graph import Graph, InputKind, Node
from autoshard.layouts import (
    AxisType,
    I,
    Layout,
    P,
    R,
    S,
    largest_shard,
    parse_type,
    shards_unevenly,
)
from autoshard.mesh import Mesh
from autoshard.ops import Strategy, axis_rules, call_of, is_view, rule_for, weights_of
from autoshard.plan.constraints.batch import batch_constraints
from autoshard.plan.constraints.constraints import (
    ChoiceId,
    Constraint,
    PlanConstraints,
    StrategyConstraint,
)
from autoshard.plan.constraints.exportable import exportable_constraint
from autoshard.plan.constraints.patterns import pattern_constraint
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.option_restrictions import forbid_label, option_label, pin_label
from autoshard.plan.options import PlanOptions

_Constraints = dict[ChoiceId, StrategyConstraint]
_FREE = "*"
_SHARD = re.compile(r"Shard\((?:dim=)?(\d+)\)")
_PLACEMENTS = {"Replicate()": R, "Partial()": P, "Partial(sum)": P}
_MAX_NAMES = 6
"""Maximum number of names in a message."""


def plan_constraints(graph: Graph, mesh: Mesh, options: PlanOptions) -> PlanConstraints:
    """The constraints that the options set on plans of a graph on a mesh.

    Raises:
        OptionError: an option names something that does not exist, or a layout that the tensor
            cannot have.
    """
    axes = NontrivialAxes.of(mesh)
    found = [*_pin_constraints(graph, axes, options), *_forbidden(graph, axes, options)]
    if options.batch_axis is not None:
        axis = _axis(axes, options.batch_axis, "batch_axis")
        strategies = batch_constraints(graph, axes, axis)
        found.append(Constraint(option_label("batch_axis", options.batch_axis), strategies))
    if options.skip_fully_replicated:
        found.append(Constraint("skip_fully_replicated", _distributed(graph, axes)))
    if options.algo != "optimal":
        found.append(pattern_constraint(graph, axes, options.algo, batch_axis=options.batch_axis))
    if options.exportable_to is not None:
        found.append(
            exportable_constraint(graph, axes, options.exportable_to, batch_axis=options.batch_axis)
        )
    return PlanConstraints(found)


def _forbidden(graph: Graph, axes: NontrivialAxes, options: PlanOptions) -> Iterator[Constraint]:
    weights = weights_of(graph)
    for forbidden in options.forbid:
        numbers: Sequence[int | None] = range(len(axes.sizes))
        if forbidden.axis is not None:
            numbers = [_axis(axes, forbidden.axis, "forbid")]
        found = frozenset((forbidden.kind, axis) for axis in numbers if axis is not None)
        label = forbid_label(forbidden)
        if forbidden.of is None:
            yield Constraint(label, collectives=found)
        elif forbidden.of == "parameters":
            yield Constraint(label, values=dict.fromkeys(weights, found))
        else:
            others = [value for value in graph.values if value not in weights]
            yield Constraint(label, inside=found, values=dict.fromkeys(others, found))


def _axis(axes: NontrivialAxes, name: str, option: str) -> int | None:
    """Index of an axis among the non-trivial ones; None if its size is 1."""
    names = axes.mesh.axis_names
    if name not in names:
        raise OptionError(f"{option} names axis {name!r}, but the mesh has {', '.join(names)}")
    number = names.index(name)
    return axes.axes.index(number) if number in axes.axes else None


@dataclass(frozen=True, slots=True)
class _DistributedWork:
    """Requires that a rank computes less than all `num_points` index points."""

    num_points: int

    def __call__(self, strategy: Strategy) -> bool:
        return prod(strategy.sizes.values()) < self.num_points


def _distributed(graph: Graph, axes: NontrivialAxes) -> _Constraints:
    """Require sharding of all operators that an axis can shard, except views and scalars."""
    constraints: _Constraints = {}
    for node in graph.nodes:
        outputs = [graph.values[value] for value in node.outputs]
        if is_view(node.operator) or not node.inputs or all(t.numel <= 1 for t in outputs):
            continue
        rule = rule_for(call_of(graph, node))
        if any(option.letter for size in axes.sizes for option in axis_rules(rule, size)):
            constraints["operator", node.name] = _DistributedWork(prod(rule.sizes.values()))
    return constraints


@dataclass(frozen=True, slots=True)
class LayoutPattern:
    """A set of layouts over the non-trivial axes, written `S(0),*` or `Shard(0),Replicate()`.

    Attributes:
        allowed: allowed types of each non-trivial axis; None if any type is allowed.
        orders: for each dim that several pinned axes shard, these axes, outermost first.
    """

    allowed: tuple[frozenset[AxisType] | None, ...]
    orders: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def parse(cls, text: str, axes: NontrivialAxes, *, exact: bool) -> "LayoutPattern":
        """Read a pattern with one part per axis of the whole mesh.

        Args:
            text: parts separated by commas, then nesting orders as `Layout` writes them.
            axes: the mesh.
            exact: True if `I` and `R` are distinguished; `Replicate()` always matches both.

        Raises:
            OptionError: a part is not a type, or the number of parts is not that of the axes.
        """
        head, *orders = text.split(";")
        parts = [part.strip() for part in head.split(",")]
        names = axes.mesh.axis_names
        if len(parts) != len(names):
            raise OptionError(
                f"layout {text!r} has {len(parts)} parts, but the mesh has the axes "
                f"{', '.join(names)}; give one part per axis, {_FREE!r} for one left free"
            )
        try:
            types = [R if part == _FREE else _parse_part(part) for part in parts]
            layout = Layout.parse(";".join([",".join(map(str, types)), *orders]))
        except LayoutError as error:
            raise OptionError(f"layout {text!r}: {error}") from None
        allowed = tuple(_allowed(parts[axis], types[axis], exact=exact) for axis in axes.axes)
        layout = axes.narrow(layout)
        nesting = [
            layout.sharding_axes(d) for d in sorted({t.dim for t in layout.types if t.is_shard})
        ]
        return cls(allowed, tuple(order for order in nesting if len(order) > 1))

    def matches(self, layout: Layout) -> bool:
        """True if a layout over the non-trivial axes matches the pattern."""
        return all(
            allowed is None or axis_type in allowed
            for axis_type, allowed in zip(layout.types, self.allowed, strict=True)
        ) and all(
            tuple(a for a in layout.sharding_axes(layout.types[order[0]].dim) if a in order)
            == order
            for order in self.orders
        )

    def why_impossible(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> str | None:
        """The reason why no tensor of this shape can match; None if one can."""
        ranks: dict[int, list[int]] = {}
        interleaved = set()
        for allowed, size in zip(self.allowed, axis_sizes, strict=True):
            for axis_type in allowed or ():
                if axis_type.is_shard:
                    ranks.setdefault(axis_type.dim, []).append(size)
                    interleaved.update([axis_type.dim] if axis_type.sub_shards else [])
        for dim, sizes in ranks.items():
            if dim >= len(shape):
                return f"cannot use Shard({dim}): the tensor is {len(shape)}-D, it has no dim {dim}"
            if shape[dim] % prod(sizes):
                why = _why_uneven(shape[dim], sizes, interleaved=dim in interleaved)
                if why is not None:
                    return (
                        f"cannot use Shard({dim}): size {shape[dim]} does not divide into "
                        f"{prod(sizes)} shards, and {why}"
                    )
        return None


def _why_uneven(size: int, sizes: Sequence[int], *, interleaved: bool) -> str | None:
    """The reason why axes cannot shard a dim unevenly; None if they can."""
    if len(sizes) > 1 or interleaved:
        return "unequal shards need a single axis on the dim, and no interleaving"
    if not shards_unevenly(size, sizes[0]):
        return f"shards of {largest_shard(size, sizes[0])} leave nothing for the last rank"
    return None


def _parse_part(part: str) -> AxisType:
    shard = _SHARD.fullmatch(part)
    if shard is not None:
        return S(int(shard[1]))
    return _PLACEMENTS[part] if part in _PLACEMENTS else parse_type(part)


def _allowed(part: str, axis_type: AxisType, *, exact: bool) -> frozenset[AxisType] | None:
    if part == _FREE:
        return None
    if axis_type.is_replicated and (part in _PLACEMENTS or not exact):
        return frozenset({I, R})
    return frozenset({axis_type})


@dataclass(frozen=True, slots=True)
class _LayoutConstraint:
    """Patterns of inputs and outputs; None or a missing entry allows any layout."""

    inputs: tuple[LayoutPattern | None, ...] = ()
    outputs: tuple[LayoutPattern | None, ...] = ()

    def __call__(self, strategy: Strategy) -> bool:
        return all(
            pattern is None or pattern.matches(layout)
            for patterns, layouts in (
                (self.inputs, strategy.inputs),
                (self.outputs, strategy.outputs),
            )
            for pattern, layout in zip(patterns, layouts, strict=False)
        )


def _pin_constraints(
    graph: Graph, axes: NontrivialAxes, options: PlanOptions
) -> Iterator[Constraint]:
    reader = _PinReader(graph, axes, training=options.mode == "training")
    pins = options.pins
    kinds: tuple[tuple[str, Mapping[str, str], Callable[[str, str], _Constraints]], ...] = (
        ("input", pins.inputs, partial(reader.inputs, _ENTERING)),
        ("parameter", pins.parameters, partial(reader.inputs, {InputKind.PARAMETER})),
        ("buffer", pins.buffers, partial(reader.inputs, {InputKind.BUFFER})),
        ("node", pins.nodes, reader.nodes),
        ("output", pins.outputs, reader.outputs),
    )
    for kind, table, read in kinds:
        for name, text in table.items():
            label = pin_label(kind, name, text)
            try:
                yield Constraint(label, read(name, text))
            except OptionError as error:
                raise OptionError(f"{label}: {error}") from None


_ENTERING = frozenset({InputKind.USER, InputKind.RECEIVED})


class _PinReader:
    """Finds the variables whose names match a pin, and parses its layouts."""

    def __init__(self, graph: Graph, axes: NontrivialAxes, *, training: bool) -> None:
        self._graph = graph
        self._axes = axes
        self._gradients = Gradients(graph, training=training)

    def inputs(self, kinds: Collection[InputKind], name: str, text: str) -> _Constraints:
        pattern = LayoutPattern.parse(text, self._axes, exact=False)
        candidates = [i for i in self._graph.inputs if i.kind in kinds]
        found = [
            i.name
            for i in candidates
            if any(fnmatchcase(known, name) for known in (i.target, i.name, *i.aliases))
        ]
        _check_found(found, [i.target for i in candidates])
        for value in found:
            self._check_possible(value, pattern)
        return {("input", value): _LayoutConstraint(outputs=(pattern,)) for value in found}

    def outputs(self, name: str, text: str) -> _Constraints:
        pattern = LayoutPattern.parse(text, self._axes, exact=False)
        candidates = {
            str(position): output.name
            for position, output in enumerate(self._graph.outputs)
            if output.name is not None
        }
        found = {
            position: value
            for position, value in candidates.items()
            if position == name or fnmatchcase(value, name)
        }
        _check_found(found, [f"{position} ({value})" for position, value in candidates.items()])
        for value in found.values():
            self._check_possible(value, pattern)
        return {("output", position): _LayoutConstraint(inputs=(pattern,)) for position in found}

    def nodes(self, name: str, text: str) -> _Constraints:
        found = {node.name: node for node in self._graph.nodes if fnmatchcase(node.name, name)}
        found.update((node.name, node) for node in self._module_results(name))
        _check_found(found, [node.name for node in self._graph.nodes])
        return {("operator", node.name): self._node(node, text) for node in found.values()}

    def _module_results(self, name: str) -> Iterator[Node]:
        """Nodes whose results are read outside of a module whose path matches."""
        modules = {prefix for node in self._graph.nodes for prefix in _prefixes(node.module)}
        matching = {module for module in modules if fnmatchcase(module, name)}
        returned = {output.name for output in self._graph.outputs}
        for node in self._graph.nodes:
            around = matching.intersection(_prefixes(node.module))
            readers = [
                set(_prefixes(self._graph.nodes[reader].module))
                for value in node.outputs
                for reader, _ in self._graph.consumers[value]
            ]
            is_returned = not returned.isdisjoint(node.outputs)
            if around and (is_returned or any(around - reader for reader in readers)):
                yield node

    def _node(self, node: Node, text: str) -> _LayoutConstraint:
        left, arrow, right = text.partition("->")
        if not arrow:
            return _LayoutConstraint(
                outputs=tuple(self._pattern(text.strip(), v, None) for v in node.outputs)
            )
        inputs, outputs = left.split(), right.split()
        counts = ((inputs, node.inputs, "inputs"), (outputs, node.outputs, "outputs"))
        for given, values, what in counts:
            if len(given) != len(values):
                raise OptionError(
                    f"it gives {len(given)} {what}, but {node.name} has {len(values)}; "
                    f"give a layout without spaces for each, {_FREE!r} for one left free"
                )
        return _LayoutConstraint(
            tuple(self._pattern(t, v, node) for t, v in zip(inputs, node.inputs, strict=True)),
            tuple(self._pattern(t, v, None) for t, v in zip(outputs, node.outputs, strict=True)),
        )

    def _pattern(self, text: str, value: str, reader: Node | None) -> LayoutPattern | None:
        """The pattern of an output, or of an input of `reader`."""
        if text == _FREE and len(self._axes.mesh.axes) > 1:
            return None
        if reader is None:
            exact = self._gradients.exists(value)
        else:
            exact = self._gradients.of_use(value, reader) is not Gradient.NONE
        pattern = LayoutPattern.parse(text, self._axes, exact=exact)
        self._check_possible(value, pattern)
        return pattern

    def _check_possible(self, value: str, pattern: LayoutPattern) -> None:
        tensor = self._graph.values[value]
        why = pattern.why_impossible(tensor.shape, self._axes.sizes)
        if why is not None:
            raise OptionError(f"{value} of shape {list(tensor.shape)}: {why}")


def _prefixes(module: str) -> Iterator[str]:
    """The paths of a module and of its parent modules."""
    parts = module.split(".") if module else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _check_found(found: object, names: list[str]) -> None:
    if not found:
        shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        raise OptionError(f"no such name; there are {shown or 'none'}")
