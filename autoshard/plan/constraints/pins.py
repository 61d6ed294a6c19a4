"""Pins: which choices they are about, and what they demand of them."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from autoshard.errors import OptionError
from autoshard.graph import Graph, InputKind, Node
from autoshard.plan.active_axes import ActiveAxes
from autoshard.plan.constraints.demands import Demand, LayoutDemand
from autoshard.plan.constraints.patterns import FREE, LayoutPattern
from autoshard.plan.gradients import Gradient, Gradients
from autoshard.plan.options import PlanOptions

Place = tuple[str, str]
"""Role and name of a choice, as `Variable` has them."""

_ARROW = "->"


def pin_demands(
    graph: Graph, axes: ActiveAxes, options: PlanOptions
) -> dict[str, dict[Place, Demand]]:
    """What each pin demands, by the label under which messages name it.

    Raises:
        OptionError: a pin matches nothing, cannot be read, or fits no tensor.
    """
    pinning = _Pinning(graph, axes, training=options.mode == "training")
    kinds: tuple[tuple[str, Mapping[str, str], Callable[..., dict[Place, Demand]]], ...] = (
        ("input", options.pins.inputs, pinning.inputs),
        ("parameter", options.pins.parameters, pinning.parameters),
        ("node", options.pins.nodes, pinning.nodes),
        ("output", options.pins.outputs, pinning.outputs),
    )
    demands = {}
    for kind, pins, demand in kinds:
        for name, text in pins.items():
            label = f"pin of {kind} {name!r} to {text!r}"
            try:
                demands[label] = demand(name, text)
            except OptionError as error:
                raise OptionError(f"{label}: {error}") from None
    return demands


class _Pinning:
    def __init__(self, graph: Graph, axes: ActiveAxes, *, training: bool) -> None:
        self._graph = graph
        self._axes = axes
        self._gradients = Gradients(graph, training=training)

    def inputs(self, name: str, text: str) -> dict[Place, Demand]:
        return self._entering(InputKind.USER, name, text)

    def parameters(self, name: str, text: str) -> dict[Place, Demand]:
        return self._entering(InputKind.PARAMETER, name, text)

    def _entering(self, kind: InputKind, name: str, text: str) -> dict[Place, Demand]:
        pattern = LayoutPattern.parse(text, self._axes, exact=False)
        every = [i for i in self._graph.inputs if i.kind is kind]
        found = [
            i.name
            for i in every
            if any(fnmatchcase(known, name) for known in (i.target, i.name, *i.aliases))
        ]
        _expect(found, [i.target for i in every])
        for value in found:
            self._check(value, pattern)
        return {("input", value): LayoutDemand(outputs=(pattern,)) for value in found}

    def outputs(self, name: str, text: str) -> dict[Place, Demand]:
        pattern = LayoutPattern.parse(text, self._axes, exact=False)
        every = {
            str(position): output.name
            for position, output in enumerate(self._graph.outputs)
            if output.name is not None
        }
        found = {
            position: value
            for position, value in every.items()
            if position == name or fnmatchcase(value, name)
        }
        _expect(found, [f"{position} ({value})" for position, value in every.items()])
        for value in found.values():
            self._check(value, pattern)
        return {("output", position): LayoutDemand(inputs=(pattern,)) for position in found}

    def nodes(self, name: str, text: str) -> dict[Place, Demand]:
        found = {node.name: node for node in self._graph.nodes if fnmatchcase(node.name, name)}
        found.update((node.name, node) for node in self._leaving(name))
        _expect(found, [node.name for node in self._graph.nodes])
        return {("operator", node.name): self._node(node, text) for node in found.values()}

    def _leaving(self, name: str) -> Iterator[Node]:
        """Nodes that make what leaves a module whose path matches."""
        modules = {prefix for node in self._graph.nodes for prefix in _prefixes(node.module)}
        matching = {module for module in modules if fnmatchcase(module, name)}
        returned = {output.name for output in self._graph.outputs}
        for node in self._graph.nodes:
            around = matching.intersection(_prefixes(node.module))
            users = [
                set(_prefixes(self._graph.nodes[user].module))
                for value in node.outputs
                for user, _ in self._graph.consumers[value]
            ]
            is_returned = not returned.isdisjoint(node.outputs)
            if around and (is_returned or any(around - user for user in users)):
                yield node

    def _node(self, node: Node, text: str) -> LayoutDemand:
        left, arrow, right = text.partition(_ARROW)
        if not arrow:
            wanted = tuple(self._pattern(text.strip(), v, None) for v in node.outputs)
            return LayoutDemand(outputs=wanted)
        inputs, outputs = left.split(), right.split()
        counts = ((inputs, node.inputs, "inputs"), (outputs, node.outputs, "outputs"))
        for given, values, what in counts:
            if len(given) != len(values):
                raise OptionError(
                    f"it gives {len(given)} {what}, but {node.name} has {len(values)}; "
                    f"give a layout without spaces for each, {FREE!r} for one left free"
                )
        return LayoutDemand(
            tuple(self._pattern(t, v, node) for t, v in zip(inputs, node.inputs, strict=True)),
            tuple(self._pattern(t, v, None) for t, v in zip(outputs, node.outputs, strict=True)),
        )

    def _pattern(self, text: str, value: str, user: Node | None) -> LayoutPattern | None:
        if text == FREE and len(self._axes.mesh.axes) > 1:
            return None
        if user is None:
            exact = self._gradients.exists(value)
        else:
            exact = self._gradients.of_use(value, user) is not Gradient.NONE
        pattern = LayoutPattern.parse(text, self._axes, exact=exact)
        self._check(value, pattern)
        return pattern

    def _check(self, value: str, pattern: LayoutPattern) -> None:
        tensor = self._graph.values[value]
        why = pattern.why_impossible(tensor.shape, self._axes.sizes)
        if why is not None:
            raise OptionError(f"{value} of shape {list(tensor.shape)} cannot lie so: {why}")


def _prefixes(module: str) -> Iterator[str]:
    """The path of a module and of all modules around it."""
    parts = module.split(".") if module else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _expect(found: object, names: list[str]) -> None:
    if not found:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > len(names[:6]) else "")
        raise OptionError(f"no such name; there are {shown or 'none'}")
