"""Python for `torch.distributed.tensor.parallel.parallelize_module`."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from autoshard.errors import PlanError
from autoshard.plan.exports.comments import comment, folded, not_expressed, pattern
from autoshard.plan.exports.linears import Cut, CutModule, cut_modules
from autoshard.plan.exports.outline import Outline, placement_code

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
ROWS_ARE_SHARED_OUT = {shared}
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
    gradient = Partial() if ROWS_ARE_SHARED_OUT else Replicate()
    whole = gathered.to_local(grad_placements=[gradient])
    if ROWS_ARE_SHARED_OUT and whole.requires_grad:
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


def to_parallelize_module(outline: Outline) -> str:
    """A function `parallelize(model, mesh)` that cuts parameters over one axis as planned.

    Linear layers and embeddings that torch's own styles cut as the plan does get these; what
    else is cut gets a style that gathers it where it is used.

    Raises:
        PlanError: no axis cuts a parameter, or the axis shares out the batch and code of other
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
    if module.cut is Cut.REACHED_FOR:
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
                f"{outline.axes[other]}, which shares out the batch: apply the export to fsdp2 "
                f"behind this one"
            )
        if cut:
            yield f"how {outline.axes[other]} cuts {folded(cut)}"
    reached = [n for n, module in modules.items() if module.cut is Cut.REACHED_FOR]
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
        case Cut.REACHED_FOR:
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
