"""The ways in which a plan shards modules over one axis, as frameworks shard layers.

Frameworks shard a linear layer column-wise (its outputs) or row-wise (its inputs; the results are
summed). Between a column-wise and a row-wise layer no communication is needed if all operators in
between run on shards, as the plan states. The model's code must support that: it must take sizes
such as the number of heads from the tensors instead of writing them out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from autoshard.exports.outline import Outline, OwnedParameter
from autoshard.graph import Argument, Node
from autoshard.graph.parallel_layers import LayerKind, ParallelLayer, parallel_layers
from autoshard.layouts import AxisType, Layout, P


class ShardStyle(Enum):
    """The way in which one mesh axis shards the parameters of a module."""

    WHOLE = "whole"
    COLUMNS = "columns"
    ROWS = "rows"
    VOCABULARY = "vocabulary"
    FEATURES = "features"
    OTHER = "other"
    READ_ELSEWHERE = "read elsewhere"


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A module with parameters, and the way in which an axis shards them.

    Attributes:
        style: the way in which the parameters are sharded.
        types: type of each parameter on the axis, by its name in the module.
        layer: the layer that the module is, if frameworks can shard it.
        local: True if its sharded activations (outputs if column-wise, inputs if row-wise) stay
            sharded between the layers.
        sized: True if operators between the layers have sizes or dims as arguments, which must
            then fit the shards.
    """

    style: ShardStyle
    types: tuple[tuple[str, AxisType], ...]
    layer: ParallelLayer | None = None
    local: bool = False
    sized: bool = False

    @property
    def is_product(self) -> bool:
        """True if it is a linear layer that is sharded by columns or rows."""
        return self.style in (ShardStyle.COLUMNS, ShardStyle.ROWS)

    @property
    def is_conv1d(self) -> bool:
        """True if it is a `Conv1D` of transformers."""
        return self.layer is not None and self.layer.kind is LayerKind.CONV1D


@dataclass(frozen=True)
class TensorParallelism:
    """The way in which one axis shards the modules of a plan.

    Attributes:
        modules: every module with parameters, by path.
        inner: operators that run on shards between layers.
        sized: those between layers that depend on sizes, see `ShardedModule.sized`.
        layers: operators of sharded layers that run on the shards of their parameters.
    """

    modules: Mapping[str, ShardedModule]
    inner: frozenset[str]
    sized: frozenset[str]
    layers: frozenset[str]


def tensor_parallelism(outline: Outline, axis: int) -> TensorParallelism:
    """The way in which an axis shards the modules of a plan."""
    owned: dict[str, list[OwnedParameter]] = defaultdict(list)
    for parameter in outline.parameters:
        owned[parameter.module].append(parameter)
    layers = parallel_layers(outline.graph)
    found = {}
    for module, parameters in owned.items():
        reached = any(p.name in outline.read_elsewhere for p in parameters)
        layer = layers.get(module)
        types = {p.attribute: p.layout.types[axis] for p in parameters}
        style = ShardStyle.READ_ELSEWHERE if reached else _style(layer, types)
        if layer is not None and layer.kind is LayerKind.CONV1D and style in _RUN_ON_SHARDS:
            weight = next(p.placed.shape for p in parameters if p.attribute == "weight")
            if weight[types["weight"].dim] % outline.sizes[axis]:
                style = ShardStyle.OTHER
        found[module] = ShardedModule(style, tuple(types.items()), layer)
    found = {m: _if_run(outline, axis, sharded) for m, sharded in found.items()}
    regions = list(_Regions(outline, axis, found).run())
    for region in regions:
        for module in region.modules:
            found[module] = replace(found[module], local=True, sized=region.is_sized)
    return TensorParallelism(
        found,
        frozenset(name for region in regions for name in region.inner),
        frozenset(name for region in regions if region.is_sized for name in region.inner),
        frozenset(
            node.name
            for module in found.values()
            if module.layer is not None and module.style in _RUN_ON_SHARDS
            for call in module.layer.calls
            for node in call.nodes
        ),
    )


def _style(layer: ParallelLayer | None, types: Mapping[str, AxisType]) -> ShardStyle:
    """The way in which a module's parameters are sharded."""
    if all(t.is_replicated for t in types.values()):
        return ShardStyle.WHOLE
    weight, others = types.get("weight"), [t for a, t in types.items() if a != "weight"]
    if layer is None or weight is None or any(t.sub_shards for t in types.values()):
        return ShardStyle.OTHER
    if layer.kind is LayerKind.EMBEDDING:
        return ShardStyle.FEATURES if weight.dim == layer.column_dim else ShardStyle.VOCABULARY
    if weight.dim == layer.column_dim and all(t.dim == 0 for t in others):
        return ShardStyle.COLUMNS
    if weight.dim == layer.row_dim and all(t.is_replicated for t in others):
        return ShardStyle.ROWS
    return ShardStyle.OTHER


_RUN_ON_SHARDS = (
    ShardStyle.COLUMNS,
    ShardStyle.ROWS,
    ShardStyle.VOCABULARY,
    ShardStyle.FEATURES,
)


def _if_run(outline: Outline, axis: int, module: ShardedModule) -> ShardedModule:
    """The module; with style OTHER if the plan gathers its parameters before their use."""
    if module.style not in _RUN_ON_SHARDS or module.layer is None:
        return module
    for call in module.layer.calls:
        node = outline.placed[call.product.name]
        types = [Layout.parse(text).types[axis] for text in (*node.inputs, *node.outputs)]
        by_value = dict(zip((*call.product.inputs, *call.product.outputs), types, strict=True))
        own = module.layer.parameters
        wanted = dict(module.types)["weight"]
        summed = module.style in (ShardStyle.ROWS, ShardStyle.VOCABULARY)
        result = by_value[call.product.outputs[0]]
        if by_value[own["weight"]] != wanted or (result == P) != summed:
            return replace(module, style=ShardStyle.OTHER)
    return module


@dataclass(frozen=True, slots=True)
class _Region:
    """Modules between which activations stay sharded, and the operators in between."""

    modules: frozenset[str]
    inner: frozenset[str]
    is_sized: bool


class _Regions:
    """Finds regions in which outputs of column-wise layers stay sharded up to row-wise layers."""

    def __init__(self, outline: Outline, axis: int, modules: dict[str, ShardedModule]) -> None:
        self._graph = outline.graph
        self._axis = axis
        self._modules = modules
        self._placed = outline.placed
        self._products: dict[str, str] = {}
        self._layer_nodes: set[str] = set()
        for path, module in modules.items():
            for call in module.layer.calls if module.layer and module.is_product else ():
                self._products[call.product.name] = path
                self._layer_nodes.update(node.name for node in call.nodes)
        self._makers = {v: node for node in self._graph.nodes for v in node.outputs}
        self._readers = outline.readers
        self._inputs = {placed.name: placed for placed in outline.stage.inputs}
        self._leaving = {output.name for output in outline.stage.outputs}

    def run(self) -> Iterator[_Region]:
        """The regions."""
        seen: set[str] = set()
        for node in self._graph.nodes:
            if node.name in seen or not self._is(node, ShardStyle.COLUMNS):
                continue
            members = self._connected(node)
            if members is None:
                continue
            seen.update(member.name for member in members)
            inner = [m for m in members if m.name not in self._layer_nodes]
            yield _Region(
                frozenset(self._products[m.name] for m in members if m.name in self._products),
                frozenset(m.name for m in inner),
                any(map(_says_sizes, inner)),
            )

    def _is(self, node: Node, style: ShardStyle) -> bool:
        """True if a node is the product of a linear layer that is sharded in this way."""
        path = self._products.get(node.name)
        return path is not None and self._modules[path].style is style

    def _connected(self, start: Node) -> list[Node] | None:
        """All nodes connected by sharded values; None if one of these is read by other nodes."""
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
        # All calls of a module must be in the region.
        modules = {self._products[name] for name in members if name in self._products}
        if any(m in modules and name not in members for name, m in self._products.items()):
            return None
        return list(members.values())

    def _around(self, node: Node) -> list[Node] | None:
        """The nodes that a node is connected to by sharded values; None if it is in no region."""
        found: list[Node] = []
        if not self._is(node, ShardStyle.COLUMNS):
            makers = self._sources(node)
            if makers is None:
                return None
            found += makers
        if not self._is(node, ShardStyle.ROWS):
            readers = self._targets(node)
            if readers is None:
                return None
            found += readers
        return found

    def _sources(self, node: Node) -> list[Node] | None:
        if self._runs_inside(node):
            return None
        rows, makers = self._is(node, ShardStyle.ROWS), []
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
                if self._is(reader, ShardStyle.COLUMNS):
                    return None
                wanted = dict(zip(reader.inputs, self._types(reader, "inputs"), strict=True))
                if wanted[value] != made:
                    return None
                found.append(reader)
        return found

    def _is_harmless(self, value: str) -> bool:
        """True if a replicated value may be used with shards: it has no gradient."""
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
    """True if a call has integer arguments, such as sizes, which the model's code may fix."""
    return any(_has_integers(argument) for _, argument in node.arguments)


def _has_integers(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_has_integers(item) for item in argument)
    return isinstance(argument, int) and not isinstance(argument, bool)
