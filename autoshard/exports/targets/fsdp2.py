"""Export to FSDP2: Python that calls `torch.distributed.fsdp.fully_shard`."""

import re
from collections.abc import Iterator

from autoshard.constraints import dim_origins, outermost_dims
from autoshard.errors import PlanError
from autoshard.exports.expressed import Expressed, expressed, headline, operators_on_shards
from autoshard.exports.outline import (
    Outline,
    OwnedParameter,
    at_rest,
    comment,
    folded,
    in_words,
    not_expressed,
)
from autoshard.exports.registry import export_target
from autoshard.graph import Origin
from autoshard.layouts import I, Layout

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")

IMPORTS = """
{torch}import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import {fsdp}
from torch.distributed.tensor import DTensor, Shard
"""
TORCH = "import torch\n"

_CODE = '''
SHARD_AXIS = {shard_axis!r}
REPLICATE_AXIS = {replicate_axis!r}
DIMS = {{
{dims}
}}
"""The sharded dim of each parameter."""
GROUPS = {{
{groups}
}}
"""Modules whose parameters are gathered together; True if backward gathers them again."""


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a model's parameters over the data-parallel axis.

    Each rank passes different rows of the batch to the model; gradients are averaged over ranks.
    Parameters that are not in DIMS are replicated.
    """
    parameters = dict(model.named_parameters())
    names = {{parameter: name for name, parameter in parameters.items()}}
    whole = {{parameter for name, parameter in parameters.items() if name not in DIMS}}
    axes = SHARD_AXIS if REPLICATE_AXIS is None else (REPLICATE_AXIS, SHARD_AXIS)
    for name, again in GROUPS.items():
        fully_shard(
            model.get_submodule(name),
            mesh=mesh[axes],
            reshard_after_forward=again,
            shard_placement_fn=lambda parameter: Shard(DIMS[names[parameter]]),
            ignored_params=whole,{policy}
        )
{casts}    for parameter in whole:
        for axis in (SHARD_AXIS, REPLICATE_AXIS):
            if axis is not None:
                _average_gradient(parameter, mesh[axis])
    return model


def _average_gradient(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    def average(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(local, group=mesh.get_group())
        local /= mesh.size()

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(average)
{cast_code}'''

_CASTS = """    for module in model.modules():
        own = [name for name, p in module.named_parameters(recurse=False) if p in whole]
        if own:
            _cast_in_forward(module, own, torch.{dtype})
"""

_CAST_CODE = '''

def _cast_in_forward(module: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    """Let a module compute with its replicated parameters in another element type."""
    stored = {}

    def cast(module, _):
        stored.update((name, module._parameters[name]) for name in names)
        module._parameters.update((name, p.to(dtype)) for name, p in stored.items())

    def restore(module, *_):
        module._parameters.update(stored)

    module.register_forward_pre_hook(cast)
    module.register_forward_hook(restore, always_call=True)
'''


def _fsdp2_expresses(outline: Outline) -> Expressed:
    """The share of a plan that FSDP2 on its data-parallel axes expresses."""
    shard_axis(outline)
    axes = outline.data_axes
    placed = [p for p in outline.parameters if placed_by_fsdp2(outline, p) == at_rest(p.layout)]
    operators = operators_on_shards(outline, data=axes, tensor=None, on_shards=())
    return expressed(outline, placed, operators)


@export_target(
    "fsdp2",
    media_type="text/x-python",
    written_as="Python, `shard(model, mesh)`",
    content=(
        "shards over the data-parallel axis, of any dim, and `reshard_after_forward` per block; "
        "nothing of other axes"
    ),
    expresses=_fsdp2_expresses,
)
def to_fsdp2(outline: Outline) -> str:
    """Python with a function `shard(model, mesh)` that applies FSDP2 on the data-parallel axes.

    Raises:
        PlanError: no axis is data-parallel, or FSDP2 does not support the data-parallel axes.
    """
    code = sharding_code(outline)
    imports = IMPORTS.format(torch=TORCH * ("torch." in code), fsdp=fsdp_names(outline))
    return comment(_header(outline)) + imports + code


def shard_axis(outline: Outline) -> int:
    """The axis over which FSDP2 shards; it needs one even if all parameters are replicated.

    Raises:
        PlanError: no axis is data-parallel, or FSDP2 does not support the data-parallel axes.
    """
    axes = outline.data_axes
    if not axes:
        raise PlanError(
            f"FSDP2 needs an axis over which every input is sharded along dim 0, and the plan has "
            f"none: {_batch_begins(outline)}; export to parallelize-module, or plan with "
            f"exportable_to='fsdp2'"
        )
    shard = axes[-1] if outline.shard_axis is None else outline.shard_axis
    others = [axis for axis in axes if axis != shard]
    if len(others) > 1:
        raise PlanError(
            f"the axes {outline.named(axes)} are data-parallel, but FSDP2 supports at most two: "
            f"plan on a mesh with fewer axes"
        )
    if others and others[0] > shard:
        raise PlanError(
            f"FSDP2 shards over the inner one of two axes, but the plan over "
            f"{outline.axes[shard]}, which is before {outline.named(others)}: plan on a mesh with "
            f"these axes in the opposite order, or with exportable_to='fsdp2'"
        )
    return shard


def _batch_begins(outline: Outline) -> str:
    """The module that shards the batch first, of a plan whose inputs do not over any axis."""
    origins = dim_origins(outline.graph)
    for node in outline.graph.nodes:
        layouts = map(Layout.parse, outline.placed[node.name].outputs)
        for value, layout in zip(node.outputs, layouts, strict=True):
            dims = outermost_dims(origins.of_value(value), Origin.BATCH)
            axes = [
                a
                for a in outline.active
                if layout.types[a].dim in dims and layout.types[a].is_shard
            ]
            if axes:
                given = ", ".join(
                    placed.target
                    for placed in outline.stage.inputs
                    if placed.kind == "user" and Layout.parse(placed.layout).types[axes[0]].dim != 0
                )
                return (
                    f"{node.module or node.name} is the first that shards the batch, over "
                    f"{outline.named(axes)}; before it, ranks have all rows of {given}"
                )
    return "no module shards the batch"


def sharding_code(outline: Outline) -> str:
    """Python code of the function `shard`, without imports.

    Raises:
        PlanError: as `shard_axis`.
    """
    shard = shard_axis(outline)
    others = [axis for axis in outline.data_axes if axis != shard]
    dims = {
        p.name: p.layout.types[shard].dim
        for p in outline.parameters
        if _is_sharded(outline, p, shard)
    }
    policy = _policy_code(outline)
    all_sharded = len(dims) == len(outline.parameters)
    compute = None if outline.policy is None else outline.policy.param_dtype
    casts = compute is not None and not all_sharded
    return _CODE.format(
        policy="" if policy is None else f"\n            mp_policy={policy},",
        casts=_CASTS.format(dtype=compute) if casts else "",
        cast_code=_CAST_CODE if casts else "",
        shard_axis=outline.axes[shard],
        replicate_axis=outline.axes[others[0]] if others else None,
        dims="\n".join(f"    {name!r}: {dim}," for name, dim in dims.items()),
        groups="\n".join(_groups(outline, dims)),
    )


def fsdp_names(outline: Outline) -> str:
    """The names that the code imports of `torch.distributed.fsdp`."""
    return "fully_shard" if _policy_code(outline) is None else "MixedPrecisionPolicy, fully_shard"


def _policy_code(outline: Outline) -> str | None:
    """Python code of the mixed-precision policy; None if there is none."""
    policy = outline.policy
    if policy is None:
        return None
    types = (
        f"{name}=torch.{dtype}"
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
        if (dtype := getattr(policy, name)) is not None
    )
    casts = [] if policy.cast_forward_inputs else ["cast_forward_inputs=False"]
    return f"MixedPrecisionPolicy({', '.join([*types, *casts])})"


def _is_sharded(outline: Outline, parameter: OwnedParameter, axis: int) -> bool:
    """True if FSDP2 can shard a parameter as planned: not interleaved, uneven only along dim 0."""
    axis_type = parameter.layout.types[axis]
    if not axis_type.is_shard or axis_type.sub_shards:
        return False
    return axis_type.dim == 0 or parameter.placed.shape[axis_type.dim] % outline.sizes[axis] == 0


def _groups(outline: Outline, dims: dict[str, int]) -> Iterator[str]:
    """A group for each block with sharded parameters, and one for the parameters outside."""
    groups: dict[str, bool] = {}
    for parameter in outline.parameters:
        if parameter.name in dims:
            found = _BLOCK.match(parameter.module)
            name = found[0] if found else ""
            groups[name] = groups.get(name, False) or parameter.placed.name in outline.regathered
    for name in sorted(groups, key=lambda name: name == ""):
        yield f"    {name!r}: {groups[name]},"


def placed_by_fsdp2(
    outline: Outline, parameter: OwnedParameter, tensor: int | None = None
) -> Layout:
    """The layout of a parameter after FSDP2.

    Args:
        outline: the plan.
        parameter: a parameter.
        tensor: an axis over which the parameter is already sharded as planned.
    """
    shard = shard_axis(outline)
    kept = {shard} if _is_sharded(outline, parameter, shard) else set()
    if tensor is not None:
        kept.add(tensor)
    types = [t if axis in kept else I for axis, t in enumerate(at_rest(parameter.layout).types)]
    return Layout.nested(types, [axis for axis in (tensor, shard) if axis is not None])


def _header(outline: Outline) -> Iterator[str]:
    yield headline(_fsdp2_expresses(outline))
    yield f"FSDP2 over {outline.named(outline.data_axes)}, from autoshard's {outline.title}."
    yield "Use: model = shard(model, device_mesh)"
    yield ""
    yield from not_expressed(outline, _missing(outline))


def _missing(outline: Outline) -> Iterator[str]:
    others = [axis for axis in outline.active if axis not in outline.data_axes]
    if others:
        yield (
            f"parallelism over {outline.named(others)}: its ranks repeat each other's work; the "
            f"export to parallelize-module has both"
        )
    for parameter in outline.parameters:
        found = placed_by_fsdp2(outline, parameter)
        if found != at_rest(parameter.layout):
            planned, here = (in_words(x, outline.axes) for x in (parameter.layout, found))
            yield f"{parameter.name}: {planned} in the plan, {here} here"
    yield from missing_of_sharding(outline)


def missing_of_sharding(outline: Outline) -> Iterator[str]:
    """Parts of the plan of the data-parallel axes that FSDP2 does not express."""
    shard = shard_axis(outline)
    whole = [p.name for p in outline.parameters if not _is_sharded(outline, p, shard)]
    if whole:
        yield f"DTensors on {outline.axes[shard]} for parameters replicated there: {folded(whole)}"
        reduced = None if outline.policy is None else outline.policy.reduce_dtype
        if reduced not in (None, outline.stored_dtype):
            yield f"{reduced} sums of their gradients: they have the type of the parameters"
