"""Export to torch's `parallelize_module`, with FSDP2 on the data-parallel axes."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from autoshard.errors import PlanError
from autoshard.exports.expressed import (
    Expressed,
    expressed,
    headline,
    operators_on_shards,
    percent,
)
from autoshard.exports.outline import (
    Outline,
    OwnedParameter,
    at_rest,
    comment,
    folded,
    in_words,
    not_expressed,
    pattern,
    placement_code,
)
from autoshard.exports.registry import export_target
from autoshard.exports.sharded_modules import (
    ShardedModule,
    ShardStyle,
    TensorParallelism,
    tensor_parallelism,
)
from autoshard.exports.targets.fsdp2 import (
    fsdp_names,
    missing_of_sharding,
    placed_by_fsdp2,
    sharding_code,
)
from autoshard.layouts import I, Layout

_IMPORTS = """
import torch
{dist}from torch import nn
from torch.distributed.device_mesh import DeviceMesh
{fsdp}from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
{strided}"""

_DIST = "import torch.distributed as dist\n"
_FSDP = "from torch.distributed.fsdp import {names}\n"
_STRIDED = "from torch.distributed.tensor.placement_types import _StridedShard\n"

_STYLE = '''

TENSOR_AXIS = {axis!r}


def _distribute(module, device_mesh, placements, source):
    """Make parameters of a module DTensors."""
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        sharded = distribute_tensor(
            whole.detach(), device_mesh, [placement], src_data_rank=source
        )
        module.register_parameter(name, nn.Parameter(sharded, whole.requires_grad))


def _replace_in_forward(module, names, replacement):
    """Let a module see other tensors in place of its parameters while it runs."""
    stored = {{}}

    def replace(module, _):
        stored.update((name, module._parameters[name]) for name in names)
        module._parameters.update((name, replacement(p)) for name, p in stored.items())

    def restore(module, *_):
        module._parameters.update(stored)

    module.register_forward_pre_hook(replace)
    module.register_forward_hook(restore, always_call=True)
'''

_GATHERED = '''

class GatheredInForward(ParallelStyle):
    """Parameters have the given placements, and are gathered while their module runs."""

    def __init__(self, placements):
        super().__init__()
        self.placements = placements

    def _apply(self, module, device_mesh):
        _distribute(module, device_mesh, self.placements, self.src_data_rank)

        def gather(parameter):
            gathered = parameter.redistribute(placements=[Replicate()])
            return gathered.to_local(grad_placements=[Replicate()])

        _replace_in_forward(module, self.placements, gather)
        return module
'''

_CONV1D = '''

class ColwiseConv1D(ParallelStyle):
    """`ColwiseParallel` for transformers' Conv1D, a linear layer with a transposed weight."""

    def __init__(self, *, output_layouts):
        super().__init__()
        self.output_layouts = output_layouts

    def _apply(self, module, device_mesh):
        placements = {{"weight": Shard(1), "bias": Shard(0)}}
        _distribute(module, device_mesh, placements, self.src_data_rank)
        module.nf //= device_mesh.size()
        _replace_in_forward(module, placements, lambda parameter: parameter.to_local())

        def read(_, inputs):
            x = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return x.to_local(grad_placements=[Partial()])

        def gather(_, __, output):
            if self.output_layouts.is_shard():
                return output
            whole = DTensor.from_local(output, device_mesh, [Shard(-1)], run_check=False)
            return whole.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_pre_hook(read)
        module.register_forward_hook(gather)
        return module


class RowwiseConv1D(ParallelStyle):
    """`RowwiseParallel` for transformers' Conv1D, a linear layer with a transposed weight."""

    def __init__(self, *, input_layouts):
        super().__init__()
        self.input_layouts = input_layouts

    def _apply(self, module, device_mesh):
        placements = {{"weight": Shard(0), "bias": Replicate()}}
        _distribute(module, device_mesh, placements, self.src_data_rank)

        def local(parameter):
            # The bias is added once, to the sum of all ranks.
            shard = parameter.to_local()
            return shard if parameter.ndim > 1 else torch.zeros_like(shard)

        _replace_in_forward(module, placements, local)

        def read(_, inputs):
            x = DTensor.from_local(inputs[0], device_mesh, [self.input_layouts], run_check=False)
            return x.redistribute(placements=[Shard(-1)]).to_local().contiguous()

        def add(module, _, output):
            parts = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local() + module.bias.to_local()

        module.register_forward_pre_hook(read)
        module.register_forward_hook(add)
        return module
'''

_FUNCTION = '''

def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, sizes_from_tensors: bool = False
) -> nn.Module:
    """Shard a model's parameters as DTensors, and adapt its modules.

    Args:
        model: a model with the full weights, at least on the first rank of each axis.
        mesh: a mesh with the axes of the plan.
        sizes_from_tensors: True if the model's code takes sizes such as the number of heads
            from its tensors (`view(*shape, -1, head_dim)`), as most models of transformers do. Its
            attention then runs on shards, as planned; otherwise its inputs are gathered.
    """
    inner = Shard(-1) if sizes_from_tensors else Replicate()
    styles = {{
{styles}
    }}
    parallelize_module(model, mesh[TENSOR_AXIS], styles)
{rest}    return model
'''


def _tensor_axis(outline: Outline) -> int:
    """The axis over which layers are sharded.

    Raises:
        PlanError: there is none.
    """
    if outline.tensor_axis is None:
        raise PlanError(
            "the plan is not tensor-parallel: no axis that has the whole batch shards a parameter; "
            "plan with exportable_to='parallelize-module', or export to fsdp2"
        )
    return outline.tensor_axis


def _expresses(outline: Outline) -> Expressed:
    """The share of a plan that the export expresses with `sizes_from_tensors`."""
    return _measured(outline, tensor_parallelism(outline, _tensor_axis(outline)), sized=True)


def _measured(outline: Outline, found: TensorParallelism, *, sized: bool) -> Expressed:
    """The share of a plan that is expressed with or without `sizes_from_tensors`."""
    tensor, data = _tensor_axis(outline), outline.data_axes
    placed = [p for p in outline.parameters if _placed(outline, p, tensor) == at_rest(p.layout)]
    on_shards = found.layers | (found.inner if sized else found.inner - found.sized)
    operators = operators_on_shards(outline, data=data, tensor=tensor, on_shards=on_shards)
    return expressed(outline, placed, operators)


def _placed(outline: Outline, parameter: OwnedParameter, tensor: int) -> Layout:
    """The layout of a parameter after the export."""
    axis = None if parameter.name in outline.read_elsewhere else tensor
    if outline.data_axes:
        return placed_by_fsdp2(outline, parameter, axis)
    types = at_rest(parameter.layout).types
    return Layout(tuple(t if a == axis else I for a, t in enumerate(types)))


@export_target(
    "parallelize-module",
    media_type="text/x-python",
    written_as="Python, `parallelize(model, mesh)`",
    content=(
        "layers on one axis: torch's `ColwiseParallel` and `RowwiseParallel` where they shard as "
        "the plan does, otherwise a style that gathers before use; FSDP2 on the data-parallel axes"
    ),
    expresses=_expresses,
)
def to_parallelize_module(outline: Outline) -> str:
    """Python with a function `parallelize(model, mesh)`.

    Linear layers and embeddings have torch's styles if these shard as planned; other sharded
    parameters have a style that gathers them while their module runs. Data-parallel axes are
    those of FSDP2.

    Raises:
        PlanError: no axis is tensor-parallel, or FSDP2 does not support the data-parallel axes.
    """
    axis = _tensor_axis(outline)
    found = tensor_parallelism(outline, axis)
    styles = "\n".join(_styles(found.modules))
    data = bool(outline.data_axes)
    code = _IMPORTS.format(
        dist=_DIST * data,
        fsdp=_FSDP.format(names=fsdp_names(outline)) * data,
        strided=_STRIDED * ("_StridedShard" in styles),
    )
    code += _STYLE.format(axis=outline.axes[axis])
    code += _GATHERED.format() * ("GatheredInForward" in styles)
    code += _CONV1D.format() * ("Conv1D(" in styles)
    if data:
        code += "\n" + sharding_code(outline)
    rest = "".join(_ties(outline)) + "    model = shard(model, mesh)\n" * data
    code += _FUNCTION.format(styles=styles, rest=rest)
    return comment(_header(outline, axis, found)) + code


def _header(outline: Outline, axis: int, found: TensorParallelism) -> Iterator[str]:
    whole = _measured(outline, found, sized=True)
    if found.sized:
        less = _measured(outline, found, sized=False)
        yield f"Expresses {whole}; {percent(less.share)} without sizes_from_tensors=True."
    else:
        yield headline(whole)
    data = f", FSDP2 over {outline.named(outline.data_axes)}" if outline.data_axes else ""
    yield f"Tensor parallelism over {outline.axes[axis]}{data}, from autoshard's {outline.title}."
    argument = ", sizes_from_tensors=True" if found.sized else ""
    yield f"Use: model = parallelize(model, device_mesh{argument})"
    yield ""
    yield from not_expressed(outline, _missing(outline, axis, found.modules))


def _missing(outline: Outline, axis: int, modules: Mapping[str, ShardedModule]) -> Iterator[str]:
    others = [a for a in outline.active if a != axis and a not in outline.data_axes]
    if others:
        yield f"parallelism over {outline.named(others)}: its ranks repeat each other's work"
    for parameter in outline.parameters:
        placed = _placed(outline, parameter, axis)
        if placed != at_rest(parameter.layout):
            planned, here = (in_words(x, outline.axes) for x in (parameter.layout, placed))
            yield f"{parameter.name}: {planned} in the plan, {here} here"
    if outline.data_axes:
        yield from missing_of_sharding(outline)
    reached = [n for n, module in modules.items() if module.style is ShardStyle.READ_ELSEWHERE]
    if reached:
        yield (
            f"parameters of {folded(reached)}, which code of other modules reads: they stay "
            f"replicated on {outline.axes[axis]}"
        )
    gathered = [name for name, module in modules.items() if module.style is ShardStyle.OTHER]
    if gathered:
        yield f"compute on shards in {folded(gathered)}: parameters are gathered before use"
    apart = [n for n, m in modules.items() if m.is_product and not m.local]
    if apart:
        yield f"sharded activations around {folded(apart)}: they are gathered or sliced"
    sized = [n for n, m in modules.items() if m.sized]
    if sized:
        yield f"sharded activations between {folded(sized)}, unless sizes_from_tensors is set"


def _styles(modules: Mapping[str, ShardedModule]) -> Iterator[str]:
    for name, style in _folded({name: _style(m) for name, m in modules.items()}).items():
        if style:
            yield f"        {name!r}: {style},"


def _style(module: ShardedModule) -> str:
    inner = "inner" if module.sized else "Shard(-1)"
    kind = "Conv1D" if module.is_conv1d else "Parallel"
    match module.style:
        case ShardStyle.COLUMNS:
            return f"Colwise{kind}(output_layouts={inner if module.local else 'Replicate()'})"
        case ShardStyle.ROWS:
            return f"Rowwise{kind}(input_layouts={inner if module.local else 'Replicate()'})"
        case ShardStyle.VOCABULARY:
            return "RowwiseParallel(input_layouts=Replicate())"
        case ShardStyle.FEATURES:
            return "ColwiseParallel(output_layouts=Replicate())"
        case ShardStyle.OTHER | ShardStyle.WHOLE:
            placed = ", ".join(f"{name!r}: {placement_code(t)}" for name, t in module.types)
            return f"GatheredInForward({{{placed}}})"
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
