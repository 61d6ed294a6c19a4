"""Which modules an axis cuts by columns or by rows, and where slices may stay on their ranks.

Frameworks know two ways of cutting a linear layer: by columns (its outputs) and by rows (its
inputs, the results are summed). Between a cut by columns and one by rows nothing moves as long
as all operators between run on slices. The plan says whether they do; whether the model's own
code can is another matter: where it spells out a size, such as the number of heads, it has to
take it from the tensor.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from autoshard.graph import Argument, Node, Ref
from autoshard.layouts import AxisType, Layout
from autoshard.plan.exports.outline import Outline, OwnedParameter


class Cut(Enum):
    """How the parameters of a module are cut on one axis."""

    WHOLE = "whole"
    COLUMNS = "columns"
    ROWS = "rows"
    VOCABULARY = "vocabulary"
    FEATURES = "features"
    OTHER = "other"
    REACHED_FOR = "reached for"


@dataclass(frozen=True, slots=True)
class CutModule:
    """A module whose own parameters an axis cuts, or leaves whole.

    Attributes:
        cut: the way, as frameworks know it.
        types: type of each parameter on the axis, by its name in the module.
        local: whether the slices on its cut side (what comes out of columns, what goes into
            rows) stay on their ranks.
        sized: whether code between says sizes or dims, which then must fit slices.
    """

    cut: Cut
    types: tuple[tuple[str, AxisType], ...]
    local: bool = False
    sized: bool = False


def cut_modules(outline: Outline, axis: int) -> dict[str, CutModule]:
    """Every module that holds parameters, by path, and how an axis cuts them."""
    owned: dict[str, list[OwnedParameter]] = defaultdict(list)
    for parameter in outline.parameters:
        owned[parameter.module].append(parameter)
    found = {}
    for module, parameters in owned.items():
        reached = any(p.name in outline.reached_for for p in parameters)
        found[module] = CutModule(
            Cut.REACHED_FOR if reached else _cut(outline, module, parameters, axis),
            tuple((p.attribute, p.layout.types[axis]) for p in parameters),
        )
    for region in _Regions(outline, axis, found).run():
        for module in region.modules:
            found[module] = replace(found[module], local=True, sized=region.is_sized)
    return found


def _cut(outline: Outline, module: str, parameters: Sequence[OwnedParameter], axis: int) -> Cut:
    types = {p.attribute: p.layout.types[axis] for p in parameters}
    if all(t.is_whole for t in types.values()):
        return Cut.WHOLE
    readers = (n for p in parameters for n in outline.readers.get(p.placed.name, ()))
    nodes = [node for node in readers if node.module == module]
    values = {p.attribute: p.placed.name for p in parameters}
    weight, others = types.get("weight"), {a: t for a, t in types.items() if a != "weight"}
    if weight is None or weight.chunks or set(others) - {"bias"}:
        return Cut.OTHER
    if nodes and all(_is_linear(node, values) for node in nodes):
        if weight.dim == 0 and all(t == weight for t in others.values()):
            return Cut.COLUMNS
        if weight.dim == 1 and all(t.is_whole for t in others.values()):
            return Cut.ROWS
    if nodes and not others and all(_is_embedding(node, values) for node in nodes):
        return Cut.FEATURES if weight.dim else Cut.VOCABULARY
    return Cut.OTHER


def _is_linear(node: Node, values: dict[str, str]) -> bool:
    bias = Ref(values["bias"]) if "bias" in values else None
    return (
        node.operator == "aten.linear.default"
        and node.argument("weight") == Ref(values["weight"])
        and node.argument("bias") == bias
    )


def _is_embedding(node: Node, values: dict[str, str]) -> bool:
    return node.operator == "aten.embedding.default" and node.argument("weight") == Ref(
        values["weight"]
    )


@dataclass(frozen=True, slots=True)
class _Region:
    """Modules between which slices stay on their ranks."""

    modules: frozenset[str]
    is_sized: bool


class _Regions:
    """Finds where what columns make reaches nothing but rows, without leaving its slices."""

    def __init__(self, outline: Outline, axis: int, modules: dict[str, CutModule]) -> None:
        self._graph = outline.graph
        self._axis = axis
        self._modules = modules
        self._placed = {node.name: node for node in outline.stage.nodes}
        self._makers = {v: node for node in self._graph.nodes for v in node.outputs}
        self._readers = outline.readers
        self._inputs = {placed.name: placed for placed in outline.stage.inputs}
        self._leaving = {output.name for output in outline.stage.outputs}

    def run(self) -> Iterator[_Region]:
        """The regions, each once."""
        seen: set[str] = set()
        for node in self._graph.nodes:
            if node.name in seen or not self._is(node, Cut.COLUMNS):
                continue
            members = self._connected(node)
            if members is None:
                continue
            seen.update(member.name for member in members)
            ends = [m for m in members if self._is(m, Cut.COLUMNS, Cut.ROWS)]
            inner = [m for m in members if m not in ends]
            yield _Region(frozenset(m.module for m in ends), any(map(_says_sizes, inner)))

    def _is(self, node: Node, *cuts: Cut) -> bool:
        """Whether a node is a linear layer that is cut in one of these ways."""
        module = self._modules.get(node.module)
        return module is not None and module.cut in cuts and node.operator == "aten.linear.default"

    def _connected(self, start: Node) -> list[Node] | None:
        """All nodes that share slices with this one; None if slices leave them."""
        members, waiting = {start.name: start}, [start]
        while waiting:
            node = waiting.pop()
            around = self._around(node)
            if around is None:
                return None
            for other in around:
                if other.name not in members:
                    members[other.name] = other
                    waiting.append(other)
        # A module that is called twice must be in it with all its calls.
        modules = {m.module for m in members.values() if self._is(m, Cut.COLUMNS, Cut.ROWS)}
        calls = (n for n in self._graph.nodes if n.module in modules)
        if any(n.name not in members for n in calls if n.operator == "aten.linear.default"):
            return None
        return list(members.values())

    def _around(self, node: Node) -> list[Node] | None:
        """The nodes that a node shares slices with; None if it is not of a region."""
        found: list[Node] = []
        if not self._is(node, Cut.COLUMNS):
            makers = self._sources(node)
            if makers is None:
                return None
            found += makers
        if not self._is(node, Cut.ROWS):
            readers = self._targets(node)
            if readers is None:
                return None
            found += readers
        return found

    def _sources(self, node: Node) -> list[Node] | None:
        if self._runs_inside(node):
            return None
        rows, makers = self._is(node, Cut.ROWS), []
        for value, wanted in zip(node.inputs, self._types(node, "inputs"), strict=True):
            if rows and self._is_parameter(value):
                continue
            if not wanted.is_shard:
                if not self._is_harmless(value):
                    return None
                continue
            maker = self._makers.get(value)
            if maker is None or self._made(value) != wanted:
                return None
            makers.append(maker)
        return makers

    def _targets(self, node: Node) -> list[Node] | None:
        found: list[Node] = []
        for value, made in zip(node.outputs, self._types(node, "outputs"), strict=True):
            if not made.is_shard or value in self._leaving:
                return None
            for reader in self._readers.get(value, ()):
                if self._is(reader, Cut.COLUMNS):
                    return None
                wanted = dict(zip(reader.inputs, self._types(reader, "inputs"), strict=True))
                if wanted[value] != made:
                    return None
                found.append(reader)
        return found

    def _is_harmless(self, value: str) -> bool:
        """Whether ranks may use a whole value beside slices: no gradient flows to it."""
        return not self._is_parameter(value) and not self._graph.values[value].requires_grad

    def _is_parameter(self, value: str) -> bool:
        placed = self._inputs.get(value)
        return placed is not None and placed.kind == "parameter"

    def _runs_inside(self, node: Node) -> bool:
        return bool(self._placed[node.name].inside)

    def _made(self, value: str) -> AxisType:
        node = self._makers[value]
        return self._types(node, "outputs")[node.outputs.index(value)]

    def _types(self, node: Node, side: str) -> list[AxisType]:
        layouts: Iterable[str] = getattr(self._placed[node.name], side)
        return [Layout.parse(text).types[self._axis] for text in layouts]


def _says_sizes(node: Node) -> bool:
    """Whether a call names sizes or dims, which code may have spelled out."""
    return any(_has_integers(argument) for _, argument in node.arguments)


def _has_integers(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_has_integers(item) for item in argument)
    return isinstance(argument, int) and not isinstance(argument, bool)
