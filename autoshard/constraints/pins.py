"""Pins as constraints: layouts of inputs, parameters, buffers, operators and outputs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from autoshard.constraints.constraints import ChoiceId, Constraint, StrategyConstraint
from autoshard.constraints.layout_pattern import FREE, LayoutPattern, has_sections
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph, InputKind, Node, module_paths
from autoshard.graph.gradients import Gradient, Gradients
from autoshard.ops import Strategy
from autoshard.plan.options import Pins, PlanOptions
from autoshard.plan.options.restrictions import pin_label

_Constraints = dict[ChoiceId, StrategyConstraint]
_WILDCARDS = "*?["
_MAX_NAMES = 6
"""Maximum number of names in a message."""


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


def pin_constraints(
    graph: Graph, axes: NontrivialAxes, options: PlanOptions
) -> Iterator[Constraint]:
    """A constraint for each pin.

    Raises:
        OptionError: a pin names something that does not exist, or a layout that the tensor cannot
            have.
    """
    reader = _PinReader(graph, axes, training=options.mode == "training")
    pins = options.constraints.pins
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


def pinned_sub_shards(
    graph: Graph, axes: NontrivialAxes, options: PlanOptions
) -> dict[tuple[str, int], tuple[tuple[int, ...], ...]]:
    """The interleaved sub-shards that pins name, by value and dim.

    Raises:
        OptionError: as for `pin_constraints`.
    """
    tables = {
        table: {
            name: text
            for name, text in getattr(options.constraints.pins, table).items()
            if has_sections(text)
        }
        for table in Pins.model_fields
    }
    if not any(tables.values()):
        return {}
    options = options.with_values(pins=Pins.model_validate(tables))
    found: dict[tuple[str, int], dict[tuple[int, ...], None]] = {}
    for constraint in pin_constraints(graph, axes, options):
        for choice, pinned in constraint.strategies.items():
            assert isinstance(pinned, _LayoutConstraint)
            for value, pattern in _patterns_by_value(graph, choice, pinned):
                for shard in pattern.sub_shards:
                    found.setdefault((value, shard.dim), {})[shard.sub_shards] = None
    return {place: tuple(all_of) for place, all_of in found.items()}


def _patterns_by_value(
    graph: Graph, choice: ChoiceId, pinned: _LayoutConstraint
) -> Iterator[tuple[str, LayoutPattern]]:
    role, name = choice
    inputs: tuple[str | None, ...] = ()
    outputs: tuple[str | None, ...] = ()
    if role == "operator":
        node = graph.nodes[graph.numbers[name]]
        inputs, outputs = node.inputs, node.outputs
    elif role == "output":
        inputs = (graph.outputs[int(name)].name,)
    else:
        outputs = (name,)
    for values, patterns in ((inputs, pinned.inputs), (outputs, pinned.outputs)):
        for value, pattern in zip(values, patterns, strict=False):
            if value is not None and pattern is not None:
                yield value, pattern


_ENTERING = frozenset({InputKind.USER, InputKind.RECEIVED})


class _PinReader:
    """Finds the variables whose names match a pin, and parses its layouts."""

    def __init__(self, graph: Graph, axes: NontrivialAxes, *, training: bool) -> None:
        self._graph = graph
        self._axes = axes
        self._gradients = Gradients(graph, training=training)
        self._fitted: dict[tuple[LayoutPattern, tuple[int, ...]], LayoutPattern] = {}

    def inputs(self, kinds: Collection[InputKind], name: str, text: str) -> _Constraints:
        pattern = LayoutPattern.parse(text, self._axes, exact=False)
        candidates = [i for i in self._graph.inputs if i.kind in kinds]
        found = [
            i.name
            for i in candidates
            if any(fnmatchcase(known, name) for known in (i.target, i.name, *i.aliases))
        ]
        _check_found(found, [i.target for i in candidates])
        return {
            ("input", value): _LayoutConstraint(outputs=(self._stored(name, value, pattern),))
            for value in found
        }

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
        return {
            ("output", position): _LayoutConstraint(inputs=(self._stored(name, value, pattern),))
            for position, value in found.items()
        }

    def nodes(self, name: str, text: str) -> _Constraints:
        found = {node.name: node for node in self._graph.nodes if fnmatchcase(node.name, name)}
        found.update((node.name, node) for node in self._module_results(name))
        _check_found(found, [node.name for node in self._graph.nodes])
        return {("operator", node.name): self._node(node, text) for node in found.values()}

    def _module_results(self, name: str) -> Iterator[Node]:
        """Nodes whose results are read outside of a module whose path matches."""
        modules = {path for node in self._graph.nodes for path in module_paths(node.module)}
        matching = {module for module in modules if fnmatchcase(module, name)}
        returned = {output.name for output in self._graph.outputs}
        for node in self._graph.nodes:
            around = matching.intersection(module_paths(node.module))
            readers = [
                set(module_paths(self._graph.nodes[reader].module))
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
                    f"give a layout without spaces for each, {FREE!r} for one left free"
                )
        return _LayoutConstraint(
            tuple(self._pattern(t, v, node) for t, v in zip(inputs, node.inputs, strict=True)),
            tuple(self._pattern(t, v, None) for t, v in zip(outputs, node.outputs, strict=True)),
        )

    def _pattern(self, text: str, value: str, reader: Node | None) -> LayoutPattern | None:
        """The pattern of an output, or of an input of `reader`."""
        if text == FREE and len(self._axes.mesh.axes) > 1:
            return None
        if reader is None:
            exact = self._gradients.exists(value)
        else:
            exact = self._gradients.of_use(value, reader) is not Gradient.NONE
        pattern = LayoutPattern.parse(text, self._axes, exact=exact)
        self._check_possible(value, pattern)
        return pattern

    def _stored(self, name: str, value: str, pattern: LayoutPattern) -> LayoutPattern:
        """The pattern of a stored tensor; those of a pattern of names fit the size of each.

        Raises:
            OptionError: the tensor cannot match; the message says why.
        """
        self._check_possible(value, pattern, stored=True)
        shape = self._graph.values[value].shape
        is_whole = value in self._graph.running_statistics
        if is_whole and any(t.is_shard for allowed in pattern.allowed for t in allowed or ()):
            raise OptionError(f"a batch norm updates {value}, of which every rank needs all")
        key = pattern, () if is_whole else shape
        if key not in self._fitted:
            self._fitted[key] = pattern.fitted(key[1], self._axes.sizes)
        fitted = self._fitted[key]
        if fitted.ranks < pattern.ranks and not any(x in name for x in _WILDCARDS):
            raise OptionError(
                f"{value} of shape {list(shape)} can be sharded over at most {fitted.ranks} of the "
                f"{pattern.ranks} ranks of these axes; write {FREE!r} for an axis that need not "
                f"shard it, or give a pattern of names, which shards each tensor as far as possible"
            )
        return fitted

    def _check_possible(self, value: str, pattern: LayoutPattern, *, stored: bool = False) -> None:
        tensor = self._graph.values[value]
        why = pattern.why_impossible(tensor.shape, self._axes.sizes, stored=stored)
        if why is not None:
            raise OptionError(f"{value} of shape {list(tensor.shape)}: {why}")


def _check_found(found: object, names: list[str]) -> None:
    if not found:
        shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        raise OptionError(f"no such name; there are {shown or 'none'}")
