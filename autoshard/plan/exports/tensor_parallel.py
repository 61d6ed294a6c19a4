"""Exports of tensor parallelism: torch's `parallelize_module`, and transformers' `tp_plan`.

Frameworks shard a linear layer column-wise (its outputs) or row-wise (its inputs; the results are
summed). Between a column-wise and a row-wise layer no communication is needed if all operators in
between run on shards, as the plan states. The model's code must support that: it must take sizes
such as the number of heads from the tensors instead of writing them out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby

from autoshard.errors import PlanError
from autoshard.graph import Argument, Node, Ref
from autoshard.layouts import AxisType, Layout
from autoshard.plan.exports.outline import (
    Outline,
    OwnedParameter,
    comment,
    folded,
    not_expressed,
    pattern,
    placement_code,
)
from autoshard.plan.exports.target import export_target


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
        local: True if its sharded activations (outputs if column-wise, inputs if row-wise) stay
            sharded between the layers.
        sized: True if operators between the layers have sizes or dims as arguments, which must
            then fit the shards.
    """

    style: ShardStyle
    types: tuple[tuple[str, AxisType], ...]
    local: bool = False
    sized: bool = False


def sharded_modules(outline: Outline, axis: int) -> dict[str, ShardedModule]:
    """Every module with parameters, by path, and the way in which an axis shards them."""
    owned: dict[str, list[OwnedParameter]] = defaultdict(list)
    for parameter in outline.parameters:
        owned[parameter.module].append(parameter)
    found = {}
    for module, parameters in owned.items():
        reached = any(p.name in outline.read_elsewhere for p in parameters)
        found[module] = ShardedModule(
            ShardStyle.READ_ELSEWHERE if reached else _style_of(outline, module, parameters, axis),
            tuple((p.attribute, p.layout.types[axis]) for p in parameters),
        )
    for region in _Regions(outline, axis, found).run():
        for module in region.modules:
            found[module] = replace(found[module], local=True, sized=region.is_sized)
    return found


def _style_of(
    outline: Outline, module: str, parameters: Sequence[OwnedParameter], axis: int
) -> ShardStyle:
    types = {p.attribute: p.layout.types[axis] for p in parameters}
    if all(t.is_replicated for t in types.values()):
        return ShardStyle.WHOLE
    readers = (n for p in parameters for n in outline.readers.get(p.placed.name, ()))
    nodes = [node for node in readers if node.module == module]
    values = {p.attribute: p.placed.name for p in parameters}
    weight, others = types.get("weight"), {a: t for a, t in types.items() if a != "weight"}
    if weight is None or weight.sub_shards or set(others) - {"bias"}:
        return ShardStyle.OTHER
    if nodes and all(_is_linear(node, values) for node in nodes):
        if weight.dim == 0 and all(t == weight for t in others.values()):
            return ShardStyle.COLUMNS
        if weight.dim == 1 and all(t.is_replicated for t in others.values()):
            return ShardStyle.ROWS
    if nodes and not others and all(_is_embedding(node, values) for node in nodes):
        return ShardStyle.FEATURES if weight.dim else ShardStyle.VOCABULARY
    return ShardStyle.OTHER


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
    """Modules between which activations stay sharded."""

    modules: frozenset[str]
    is_sized: bool


class _Regions:
    """Finds regions in which outputs of column-wise layers stay sharded up to row-wise layers."""

    def __init__(self, outline: Outline, axis: int, modules: dict[str, ShardedModule]) -> None:
        self._graph = outline.graph
        self._axis = axis
        self._modules = modules
        self._placed = {node.name: node for node in outline.stage.nodes}
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
            ends = [m for m in members if self._is(m, ShardStyle.COLUMNS, ShardStyle.ROWS)]
            inner = [m for m in members if m not in ends]
            yield _Region(frozenset(m.module for m in ends), any(map(_says_sizes, inner)))

    def _is(self, node: Node, *styles: ShardStyle) -> bool:
        """True if a node is a linear layer that is sharded in one of these ways."""
        module = self._modules.get(node.module)
        is_linear = node.operator == "aten.linear.default"
        return module is not None and module.style in styles and is_linear

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
        modules = {
            m.module for m in members.values() if self._is(m, ShardStyle.COLUMNS, ShardStyle.ROWS)
        }
        calls = (n for n in self._graph.nodes if n.module in modules)
        if any(n.name not in members for n in calls if n.operator == "aten.linear.default"):
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


_IMPORTS = """
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
"""

_STRIDED = """from torch.distributed.tensor.placement_types import _StridedShard
"""

_CODE = '''
AXIS = {axis!r}
IS_DATA_PARALLEL = {shared}
"""True if each rank of the axis has rows of its own, so that gradients are averaged over it."""


class WholeInForward(ParallelStyle):
    """Parameters have the given placements, and are gathered while their module runs."""

    def __init__(self, placements):
        super().__init__()
        self.placements = placements

    def _apply(self, module, device_mesh):
        for name, placement in self.placements.items():
            whole = module.get_parameter(name)
            sharded = distribute_tensor(
                whole.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank
            )
            module.register_parameter(name, nn.Parameter(sharded, whole.requires_grad))
        shards = {{}}

        def gather(module, _):
            shards.update((name, module._parameters[name]) for name in self.placements)
            module._parameters.update((n, _whole(p, device_mesh)) for n, p in shards.items())

        def free(module, *_):
            module._parameters.update(shards)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(free, always_call=True)
        return module


def _whole(parameter: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    gathered = parameter.redistribute(placements=[Replicate()])
    gradient = Partial() if IS_DATA_PARALLEL else Replicate()
    whole = gathered.to_local(grad_placements=[gradient])
    if IS_DATA_PARALLEL and whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, sizes_from_tensors: bool = False
) -> nn.Module:
    """Shard a model's parameters as DTensors over one axis of a mesh, and adapt its modules.

    Args:
        model: a model with the full weights, at least on rank 0 of the axis.
        mesh: a mesh with the axis.
        sizes_from_tensors: True if the model's code takes sizes such as the number of heads
            from its tensors (`view(*shape, -1, head_dim)`), as transformers' models do. Its
            attention then runs on shards, as planned; otherwise its inputs are gathered.
    """
    inner = Shard(-1) if sizes_from_tensors else Replicate()
    styles = {{
{styles}
    }}
    parallelize_module(model, mesh[AXIS], styles)
{ties}    return model
'''


@export_target(
    "parallelize-module",
    media_type="text/x-python",
    written_as="Python, `parallelize(model, mesh)`",
    content=(
        "all parameters on one axis: torch's `ColwiseParallel` and `RowwiseParallel` where "
        "they shard as the plan does, otherwise a style that gathers before use"
    ),
)
def to_parallelize_module(outline: Outline) -> str:
    """Python with a function `parallelize(model, mesh)` that shards parameters over one axis.

    Linear layers and embeddings have torch's styles if these shard as planned; other sharded
    parameters have a style that gathers them while their module runs.

    Raises:
        PlanError: no axis shards a parameter, or the axis is data-parallel and code of other
            modules reads a parameter.
    """
    axis = outline.tensor_axis if outline.tensor_axis is not None else outline.shard_axis
    if axis is None:
        raise PlanError("the plan shards no parameter, so there is nothing to parallelize")
    shared = axis in outline.data_axes
    modules = sharded_modules(outline, axis)
    if shared:
        modules = {name: _gathered(name, module) for name, module in modules.items()}
    styles = "\n".join(_styles(modules))
    code = _IMPORTS + _STRIDED * ("_StridedShard" in styles)
    code += _CODE.format(
        axis=outline.axes[axis],
        shared=shared,
        styles=styles,
        ties="".join(_ties(outline)),
    )
    return comment(_header(outline, axis, modules)) + code


def _gathered(name: str, module: ShardedModule) -> ShardedModule:
    """A module on a data-parallel axis, which must gather its parameters."""
    if module.style is ShardStyle.READ_ELSEWHERE:
        raise PlanError(
            f"code of other modules reads the parameters of {name!r}, so hooks of the module "
            f"cannot average their gradients; export to fsdp2"
        )
    return ShardedModule(ShardStyle.OTHER, module.types)


def _header(outline: Outline, axis: int, modules: Mapping[str, ShardedModule]) -> Iterator[str]:
    yield f"Tensor parallelism over {outline.axes[axis]}, from autoshard's {outline.title}."
    yield "Use: model = parallelize(model, device_mesh)"
    yield ""
    yield from not_expressed(outline, _missing(outline, axis, modules))


def _missing(outline: Outline, axis: int, modules: Mapping[str, ShardedModule]) -> Iterator[str]:
    for other in outline.active:
        sharded = [p.name for p in outline.parameters if p.layout.types[other].is_shard]
        if other == axis:
            continue
        if other in outline.data_axes:
            yield (
                f"{outline.axes[other]}, a data-parallel axis: apply the export to fsdp2 "
                f"after this one"
            )
        if sharded:
            yield f"the sharding over {outline.axes[other]} of {folded(sharded)}"
    reached = [n for n, module in modules.items() if module.style is ShardStyle.READ_ELSEWHERE]
    if reached:
        yield (
            f"parameters of {folded(reached)}, which code of other modules reads: they stay "
            f"replicated"
        )
    gathered = [name for name, module in modules.items() if module.style is ShardStyle.OTHER]
    if gathered:
        yield f"compute on shards in {folded(gathered)}: parameters are gathered before use"
    linear = (ShardStyle.COLUMNS, ShardStyle.ROWS)
    apart = [n for n, m in modules.items() if m.style in linear and not m.local]
    if apart:
        yield f"sharded activations around {folded(apart)}: they are gathered or sliced"
    sized = [n for n, m in modules.items() if m.sized]
    if sized:
        yield f"sharded activations between {folded(sized)}, unless sizes_from_tensors is set"
    yield "layouts of other activations: they are replicated on the axis"


def _styles(modules: Mapping[str, ShardedModule]) -> Iterator[str]:
    for name, style in _folded({name: _style(m) for name, m in modules.items()}).items():
        if style:
            yield f"        {name!r}: {style},"


def _style(module: ShardedModule) -> str:
    inner = "inner" if module.sized else "Shard(-1)"
    match module.style:
        case ShardStyle.COLUMNS:
            return f"ColwiseParallel(output_layouts={inner if module.local else 'Replicate()'})"
        case ShardStyle.ROWS:
            return f"RowwiseParallel(input_layouts={inner if module.local else 'Replicate()'})"
        case ShardStyle.VOCABULARY:
            return "RowwiseParallel(input_layouts=Replicate())"
        case ShardStyle.FEATURES:
            return "ColwiseParallel(output_layouts=Replicate())"
        case ShardStyle.OTHER | ShardStyle.WHOLE:
            placed = ", ".join(f"{name!r}: {placement_code(t)}" for name, t in module.types)
            return f"WholeInForward({{{placed}}})"
        case ShardStyle.READ_ELSEWHERE:
            return ""


def _folded(styles: Mapping[str, str]) -> dict[str, str]:
    """Styles by pattern if all modules that match the pattern have one style, else by name."""
    patterns: dict[str, set[str]] = {}
    for name, style in styles.items():
        patterns.setdefault(pattern(name), set()).add(style)
    return {
        pattern(name) if len(patterns[pattern(name)]) == 1 else name: style
        for name, style in styles.items()
    }


def _ties(outline: Outline) -> Iterator[str]:
    for _, group in groupby(outline.parameters, key=lambda p: p.placed.name):
        first, *others = group
        for other in others:
            yield (
                f"    model.get_submodule({other.module!r}).register_parameter(\n"
                f"        {other.attribute!r}, model.get_parameter({first.name!r})\n"
                f"    )\n"
            )


_HF_CODE = """
TP_SIZE = {size}
TP_PLAN = {{
{rules}
}}
"""


@export_target(
    "hf-tp-plan",
    media_type="text/x-python",
    written_as="Python, `TP_SIZE` and `TP_PLAN`",
    content="linear layers and embeddings that are sharded over one axis, in all layers alike",
)
def to_hf_tp_plan(outline: Outline) -> str:
    """Python with `TP_SIZE` and `TP_PLAN`, for transformers' `DistributedConfig`.

    Its rules are for all layers at once, so layers must be sharded alike. Modules that the plan
    replicates are listed too, since transformers adds the model's default rules to those given.

    Raises:
        PlanError: no layer is sharded in a way that transformers supports.
    """
    axis = outline.tensor_axis
    modules = {} if axis is None else sharded_modules(outline, axis)
    rules = _hf_rules(modules)
    if axis is None or set(rules.values()) <= {"replicate"}:
        raise PlanError(
            "a tp_plan can express only linear layers and embeddings that are sharded over an axis "
            "which does not shard the batch; the plan has none: export to fsdp2 or "
            "parallelize-module"
        )
    code = _HF_CODE.format(
        size=outline.sizes[axis],
        rules="\n".join(f"    {name!r}: {rule!r}," for name, rule in rules.items()),
    )
    return comment(_hf_header(outline, axis, rules)) + code


def _hf_rules(modules: Mapping[str, ShardedModule]) -> dict[str, str]:
    styles: dict[str, set[str]] = {}
    for name, module in modules.items():
        if not name:  # rules need the name of a module; parameters of the root are replicated
            continue
        styles.setdefault(pattern(name), set()).add(_hf_style(module))
    return {
        name: next(iter(found)) if len(found) == 1 else "replicate"
        for name, found in styles.items()
    }


def _hf_style(module: ShardedModule) -> str:
    match module.style:
        case ShardStyle.COLUMNS:
            return "colwise" if module.local else "colwise_gather_output"
        case ShardStyle.ROWS:
            return "rowwise" if module.local else "rowwise_split_input"
        case ShardStyle.VOCABULARY:
            return "embedding_rowwise"
        case ShardStyle.FEATURES:
            return "embedding_colwise"
        case ShardStyle.WHOLE | ShardStyle.OTHER | ShardStyle.READ_ELSEWHERE:
            return "replicate"


def _hf_header(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    yield f"Tensor parallelism over {outline.axes[axis]}, from autoshard's {outline.title}."
    yield "Use: AutoModelForCausalLM.from_pretrained("
    yield "    name, distributed_config=DistributedConfig(tp_size=TP_SIZE, tp_plan=TP_PLAN))"
    yield "with transformers' DistributedConfig (5.20 or later), under torchrun;"
    yield "it needs the package accelerate."
    yield ""
    yield from not_expressed(outline, _hf_missing(outline, axis, rules))


def _hf_missing(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    for other in outline.active:
        if other != axis:
            yield f"the axis {outline.axes[other]}"
    whole = [
        parameter.name
        for parameter in outline.parameters
        if parameter.layout.types[axis].is_shard
        and rules.get(pattern(parameter.module), "replicate") == "replicate"
    ]
    if whole:
        yield f"the sharding of {folded(whole)}, which stay replicated"
    yield "layouts of activations, except between `colwise` and `rowwise`"
