"""Exports of tensor parallelism: torch's `parallelize_module`, and transformers' `tp_plan`.

Frameworks know two ways of sharding a linear layer: column-wise (its outputs) and row-wise (its
inputs; the results are summed). Between a column-wise and a row-wise layer nothing is
communicated as long as all operators between run on shards. The plan says whether they do; the
model's own code may not be able to: where it spells out a size, such as the number of heads, it
has to take the size from the tensor.
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


class Cut(Enum):
    """How the parameters of a module are cut on one axis."""

    WHOLE = "whole"
    COLUMNS = "columns"
    ROWS = "rows"
    VOCABULARY = "vocabulary"
    FEATURES = "features"
    OTHER = "other"
    READ_ELSEWHERE = "read elsewhere"


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
        reached = any(p.name in outline.read_elsewhere for p in parameters)
        found[module] = CutModule(
            Cut.READ_ELSEWHERE if reached else _cut(outline, module, parameters, axis),
            tuple((p.attribute, p.layout.types[axis]) for p in parameters),
        )
    for region in _Regions(outline, axis, found).run():
        for module in region.modules:
            found[module] = replace(found[module], local=True, sized=region.is_sized)
    return found


def _cut(outline: Outline, module: str, parameters: Sequence[OwnedParameter], axis: int) -> Cut:
    types = {p.attribute: p.layout.types[axis] for p in parameters}
    if all(t.is_replicated for t in types.values()):
        return Cut.WHOLE
    readers = (n for p in parameters for n in outline.readers.get(p.placed.name, ()))
    nodes = [node for node in readers if node.module == module]
    values = {p.attribute: p.placed.name for p in parameters}
    weight, others = types.get("weight"), {a: t for a, t in types.items() if a != "weight"}
    if weight is None or weight.sub_shards or set(others) - {"bias"}:
        return Cut.OTHER
    if nodes and all(_is_linear(node, values) for node in nodes):
        if weight.dim == 0 and all(t == weight for t in others.values()):
            return Cut.COLUMNS
        if weight.dim == 1 and all(t.is_replicated for t in others.values()):
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
"""Whether each rank of the axis has rows of its own, so that gradients are averaged over it."""


class WholeInForward(ParallelStyle):
    """Parameters lie as given, and are gathered while their module runs."""

    def __init__(self, placements):
        super().__init__()
        self.placements = placements

    def _apply(self, module, device_mesh):
        for name, placement in self.placements.items():
            whole = module.get_parameter(name)
            cut = distribute_tensor(
                whole.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank
            )
            module.register_parameter(name, nn.Parameter(cut, whole.requires_grad))
        held = {{}}

        def gather(module, _):
            held.update((name, module._parameters[name]) for name in self.placements)
            module._parameters.update((n, _whole(p, device_mesh)) for n, p in held.items())

        def let_go(module, *_):
            module._parameters.update(held)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(let_go, always_call=True)
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
    """Make a model's parameters DTensors on one axis of a mesh, and its modules work with them.

    Args:
        model: holds the whole weights on rank 0 of the axis at least.
        mesh: has the axis.
        sizes_from_tensors: whether the model's code takes sizes such as the number of heads
            from its tensors (`view(*shape, -1, head_dim)`), as transformers' models do. Its
            attention then runs on slices, as planned; otherwise what is cut there is gathered.
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
    """A function `parallelize(model, mesh)` that cuts parameters over one axis as planned.

    Linear layers and embeddings that torch's own styles cut as the plan does get these; what
    else is cut gets a style that gathers it where it is used.

    Raises:
        PlanError: no axis cuts a parameter, or the axis is data-parallel and code of other
            modules reads a parameter.
    """
    axis = outline.tensor_axis if outline.tensor_axis is not None else outline.shard_axis
    if axis is None:
        raise PlanError("the plan cuts no parameter, so there is nothing to parallelize")
    shared = axis in outline.data_axes
    modules = cut_modules(outline, axis)
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


def _gathered(name: str, module: CutModule) -> CutModule:
    """A module on an axis whose ranks have rows of their own: nothing but whole weights will do."""
    if module.cut is Cut.READ_ELSEWHERE:
        raise PlanError(
            f"code of other modules reads the parameters of {name!r}, so their gradients cannot be "
            f"averaged where the module runs; export to fsdp2"
        )
    return CutModule(Cut.OTHER, module.types)


def _header(outline: Outline, axis: int, modules: Mapping[str, CutModule]) -> Iterator[str]:
    yield f"Tensor parallelism over {outline.axes[axis]}, from autoshard's {outline.title}."
    yield "Use: model = parallelize(model, device_mesh)"
    yield ""
    yield from not_expressed(_missing(outline, axis, modules))


def _missing(outline: Outline, axis: int, modules: Mapping[str, CutModule]) -> Iterator[str]:
    for other in outline.active:
        cut = [p.name for p in outline.parameters if p.layout.types[other].is_shard]
        if other == axis:
            continue
        if other in outline.data_axes:
            yield (
                f"{outline.axes[other]}, a data-parallel axis: apply the export to fsdp2 "
                f"behind this one"
            )
        if cut:
            yield f"how {outline.axes[other]} cuts {folded(cut)}"
    reached = [n for n, module in modules.items() if module.cut is Cut.READ_ELSEWHERE]
    if reached:
        yield (
            f"parameters of {folded(reached)}, which code of other modules reads: they are left as "
            f"they are, whole"
        )
    gathered = [name for name, module in modules.items() if module.cut is Cut.OTHER]
    if gathered:
        yield f"work on slices in {folded(gathered)}: parameters are gathered before use"
    apart = [n for n, m in modules.items() if m.cut in (Cut.COLUMNS, Cut.ROWS) and not m.local]
    if apart:
        yield f"slices that stay on their rank around {folded(apart)}: they are gathered or cut"
    sized = [n for n, m in modules.items() if m.sized]
    if sized:
        yield f"slices between {folded(sized)}, unless sizes_from_tensors is set"
    yield "layouts of activations elsewhere: they are whole on every rank of the axis"


def _styles(modules: Mapping[str, CutModule]) -> Iterator[str]:
    for name, style in _folded({name: _style(m) for name, m in modules.items()}).items():
        if style:
            yield f"        {name!r}: {style},"


def _style(module: CutModule) -> str:
    inner = "inner" if module.sized else "Shard(-1)"
    match module.cut:
        case Cut.COLUMNS:
            return f"ColwiseParallel(output_layouts={inner if module.local else 'Replicate()'})"
        case Cut.ROWS:
            return f"RowwiseParallel(input_layouts={inner if module.local else 'Replicate()'})"
        case Cut.VOCABULARY:
            return "RowwiseParallel(input_layouts=Replicate())"
        case Cut.FEATURES:
            return "ColwiseParallel(output_layouts=Replicate())"
        case Cut.OTHER | Cut.WHOLE:
            placed = ", ".join(f"{name!r}: {placement_code(t)}" for name, t in module.types)
            return f"WholeInForward({{{placed}}})"
        case Cut.READ_ELSEWHERE:
            return ""


def _folded(styles: Mapping[str, str]) -> dict[str, str]:
    """Styles by pattern where all modules that a pattern matches have one style, else by name."""
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

    Its rules are for all layers at once, so layers must be cut alike. Modules that the plan
    leaves whole are named too, since transformers adds the model's own rules to those given.

    Raises:
        PlanError: no layer is cut in a way that transformers knows.
    """
    axis = outline.tensor_axis
    modules = {} if axis is None else cut_modules(outline, axis)
    rules = _hf_rules(modules)
    if axis is None or set(rules.values()) <= {"replicate"}:
        raise PlanError(
            "the plan cuts no linear layer or embedding over an axis that leaves the batch whole, "
            "which is all that a tp_plan can say; export to fsdp2 or parallelize-module"
        )
    code = _HF_CODE.format(
        size=outline.sizes[axis],
        rules="\n".join(f"    {name!r}: {rule!r}," for name, rule in rules.items()),
    )
    return comment(_hf_header(outline, axis, rules)) + code


def _hf_rules(modules: Mapping[str, CutModule]) -> dict[str, str]:
    styles: dict[str, set[str]] = {}
    for name, module in modules.items():
        if not name:  # a rule has to name a module; what the root holds is whole anyway
            continue
        styles.setdefault(pattern(name), set()).add(_hf_style(module))
    return {
        name: next(iter(found)) if len(found) == 1 else "replicate"
        for name, found in styles.items()
    }


def _hf_style(module: CutModule) -> str:
    match module.cut:
        case Cut.COLUMNS:
            return "colwise" if module.local else "colwise_gather_output"
        case Cut.ROWS:
            return "rowwise" if module.local else "rowwise_split_input"
        case Cut.VOCABULARY:
            return "embedding_rowwise"
        case Cut.FEATURES:
            return "embedding_colwise"
        case Cut.WHOLE | Cut.OTHER | Cut.READ_ELSEWHERE:
            return "replicate"


def _hf_header(outline: Outline, axis: int, rules: Mapping[str, str]) -> Iterator[str]:
    yield f"Tensor parallelism over {outline.axes[axis]}, from autoshard's {outline.title}."
    yield "Use: AutoModelForCausalLM.from_pretrained("
    yield "    name, distributed_config=DistributedConfig(tp_size=TP_SIZE, tp_plan=TP_PLAN))"
    yield "with transformers' DistributedConfig (5.20 or later), under torchrun;"
    yield "it needs the package accelerate."
    yield ""
    yield from not_expressed(_hf_missing(outline, axis, rules))


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
        yield f"the cuts of {folded(whole)}, which stay whole on every rank"
    yield "layouts of activations outside of what lies between `colwise` and `rowwise`"
