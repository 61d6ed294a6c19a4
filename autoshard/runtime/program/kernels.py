"""Local kernels: for each kind of `autoshard.ops.Kernel`, a function that binds it to a rank."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from autoshard.layouts import Kind
from autoshard.ops import Kernel, draws_random_numbers, spec_for
from autoshard.ops.calls import check_call
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.runtime.program.opaque import bind_module
from autoshard.runtime.program.operators import OperatorCall
from autoshard.runtime.program.random_numbers import seeded
from autoshard.runtime.program.sharded_kernels import bind_sharded_kernel
from autoshard.runtime.program.sharded_kernels.experts import bind_experts

MEAN = 1
"""The value of `at::Reduction::Mean`, for the `reduction` argument of losses."""


def bind_kernel(local: LocalNode) -> LocalKernel:
    """The kernel that a rank runs for an operator.

    Raises:
        PlanError: plans may not call the operator, or an argument does not fit its schema.
    """
    spec = spec_for(local.node.operator)
    if local.node.operator.startswith("aten."):  # kernels of others check their arguments
        check_call(local.node)
    run = _BINDERS[spec.kernel](local, spec.kernel_argument)
    return seeded(local, run) if draws_random_numbers(local.node) else run


def _plain(local: LocalNode, _argument: str = "") -> LocalKernel:
    return OperatorCall(local.node, local.place.device, custom=local.custom)


def _resize(local: LocalNode, argument: str) -> LocalKernel:
    return OperatorCall(local.node, local.place.device, replaced={argument: local.output_shapes[0]})


def _reshape(local: LocalNode, _argument: str) -> LocalKernel:
    shape = local.output_shapes[0]
    return lambda tensors, _step: (tensors[0].reshape(shape),)


def _vocabulary(local: LocalNode, _argument: str) -> LocalKernel:
    place = local.place
    rows = local.input_shapes[0][0]
    if not local.axes_sharding((0,)):
        return _plain(local)
    first = local.start(0)
    padding = local.integer("padding_idx", -1)
    inside = first <= padding < first + rows
    # The schema uses -1 for no padding row.
    replaced = {"padding_idx": padding - first if inside else -1}
    call = OperatorCall(local.node, place.device, replaced=replaced)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        table, ids = tensors
        # As in the vocabulary-parallel embedding of Megatron-LM: ids of other ranks give zeros, and
        # the sum over ranks has the row of the one that has it.
        elsewhere = (ids < first) | (ids >= first + rows)
        (found,) = call((table, (ids - first).masked_fill(elsewhere, 0)))
        return (found.masked_fill(elsewhere.unsqueeze(-1), 0),)

    return run


def _scaled(local: LocalNode, argument: str) -> LocalKernel:
    return _scaling(local, argument, _plain(local))


def _classes(local: LocalNode, argument: str) -> LocalKernel:
    return _scaling(local, argument, bind_sharded_kernel(local) or _plain(local))


def _sharded_dim(local: LocalNode, argument: str) -> LocalKernel:
    return bind_sharded_kernel(local) or (_groups(local, argument) if argument else _plain(local))


def _scaling(local: LocalNode, argument: str, plain: LocalKernel) -> LocalKernel:
    averaged = _averaged(local)
    size = prod(local.shapes[tensor][dim] for tensor, dim in averaged)
    local_size = prod(local.input_shapes[tensor][dim] for tensor, dim in averaged)
    if size == local_size or (argument and local.node.argument(argument, MEAN) != MEAN):
        return plain
    # The mean of a shard times its share of the elements: the sum over ranks is the mean of all.
    num_shards = size / local_size

    def run(tensors: Sequence[torch.Tensor], step: Step) -> tuple[torch.Tensor, ...]:
        (mean,) = plain(tensors, step)
        return (mean / num_shards,)

    return run


def _averaged(local: LocalNode) -> set[tuple[int, int]]:
    """The sharded dims that a mean reduces, as pairs of an input's position and a dim of it."""
    found = set()
    for axis, made in enumerate(local.outputs[0].types):
        if made.kind is Kind.PARTIAL:
            dims = [(i, layout.types[axis].dim) for i, layout in enumerate(local.inputs)]
            found.update([pair for pair in dims if pair[1] >= 0][:1])
    return found


def _repeat(local: LocalNode, argument: str) -> LocalKernel:
    source, result = local.input_shapes[0], local.output_shapes[0]
    padded = (*(1 for _ in range(len(result) - len(source))), *source)
    times = tuple(whole // max(part, 1) for whole, part in zip(result, padded, strict=True))
    return OperatorCall(local.node, local.place.device, replaced={argument: times})


def _split(local: LocalNode, _argument: str) -> LocalKernel:
    dim = _dim(local)
    sizes = [shape[dim] for shape in local.output_shapes]
    return lambda tensors, _step: torch.split(tensors[0], sizes, dim)


def _run(local: LocalNode, _argument: str) -> LocalKernel:
    dim, start = _dim(local), local.node.argument("start") or 0
    size, place = local.shapes[0][dim], local.place
    parts = prod(place.axis_sizes[axis] for axis in local.inputs[0].sharding_axes(dim))
    if parts == 1 or local.node.argument("step", 1) != 1:
        return _plain(local)
    assert isinstance(start, int)
    first, length = max(start, -size) % size // parts, local.output_shapes[0][dim]
    return lambda tensors, _step: (tensors[0].narrow(dim, first, length),)


def _dim(local: LocalNode) -> int:
    return local.integer("dim", 0) % max(len(local.input_shapes[0]), 1)


def _groups(local: LocalNode, argument: str) -> LocalKernel:
    groups = local.integer(argument, 1)
    share = max(groups * local.input_shapes[0][1] // local.shapes[0][1], 1)
    return OperatorCall(local.node, local.place.device, replaced={argument: share})


def _diagonal(local: LocalNode, argument: str) -> LocalKernel:
    rows = len(local.input_shapes[0]) - 2
    offset = local.integer(argument, 0) + local.start(rows) - local.start(rows + 1)
    return OperatorCall(local.node, local.place.device, replaced={argument: offset})


def _bags(local: LocalNode, _argument: str) -> LocalKernel:
    plain = _plain(local)

    def run(tensors: Sequence[torch.Tensor], step: Step) -> tuple[torch.Tensor, ...]:
        made = plain(tensors, step)
        return tuple(
            table if table.shape == shape else table.new_zeros(shape)
            for table, shape in zip(made, local.output_shapes, strict=True)
        )

    return run


def _counts(local: LocalNode, _argument: str) -> LocalKernel:
    plain = _plain(local)
    if local.place.device.type != "cpu":
        return plain

    def run(tensors: Sequence[torch.Tensor], step: Step) -> tuple[torch.Tensor, ...]:
        (values,) = tensors
        if values.is_floating_point():
            return plain(tensors, step)
        (counts,) = plain((values.double(),), step)
        return (counts.to(values.dtype),)

    return run


def _experts(local: LocalNode, argument: str) -> LocalKernel:
    place = local.place
    names = local.names()
    is_sharded = local.axes_sharding((0,)) or local.axes_sharding((0,), 1)
    if argument not in names or not is_sharded:
        return _plain(local)
    at = names.index(argument)
    num_rows, num_matrices = local.input_shapes[0][0], local.input_shapes[1][0]
    before, first = local.start(0), local.start(0, 1)
    call = OperatorCall(local.node, place.device)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        rows, matrices, *rest = tensors
        ends = (tensors[at] - before).clamp(0, num_rows)
        start = ends[first - 1] if first else torch.zeros_like(ends[0])
        ends = (ends[first : first + num_matrices] - start).to(tensors[at].dtype)
        rest[at - 2] = ends
        places = torch.arange(num_rows, device=rows.device)
        others = (places >= ends[-1]).unsqueeze(-1)
        # Kernels leave rows after the last group unwritten, in forward and in backward.
        moved = rows[(places + start) % num_rows].masked_fill(others, 0)
        (product,) = call((moved, matrices, *rest))
        return (product.masked_fill(others, 0)[(places - start) % num_rows],)

    return run


def _attention(local: LocalNode, argument: str) -> LocalKernel:
    return bind_sharded_kernel(local) or _causal(local, argument)


def _causal(local: LocalNode, argument: str) -> LocalKernel:
    plain = _plain(local)
    node, num_queries = local.node, local.input_shapes[0][-2]
    first = local.start(len(local.input_shapes[0]) - 2)
    end = first + num_queries
    if not node.argument(argument):
        return plain
    if first == 0:
        # Later keys are masked for all queries, and equal numbers of both are faster.
        return lambda tensors, step: plain(_until(tensors, end), step)
    given = dict(node.arguments)
    names = ("dropout_p", "scale", "enable_gqa")
    options: dict[str, Any] = {name: given[name] for name in names if name in given}
    bias = causal_lower_right(num_queries, end)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        # Only this function, not the ATen operators, accepts masks that are not materialised.
        query, key, value = _until(tensors, end)
        return (scaled_dot_product_attention(query, key, value, attn_mask=bias, **options),)

    return run


def _until(tensors: Sequence[torch.Tensor], end: int) -> tuple[torch.Tensor, ...]:
    """The queries, and the first `end` keys and values."""
    query, key, value = tensors
    return query, key[..., :end, :], value[..., :end, :]


_BINDERS: Mapping[Kernel, Callable[[LocalNode, str], LocalKernel]] = {
    Kernel.PLAIN: _plain,
    Kernel.RESIZE: _resize,
    Kernel.RESHAPE: _reshape,
    Kernel.VOCABULARY: _vocabulary,
    Kernel.SCALED: _scaled,
    Kernel.SHARDED_DIM: _sharded_dim,
    Kernel.CLASSES: _classes,
    Kernel.REPEAT: _repeat,
    Kernel.SPLIT: _split,
    Kernel.RANGE: _run,
    Kernel.GROUPS: _groups,
    Kernel.BAGS: _bags,
    Kernel.COUNTS: _counts,
    Kernel.EXPERTS: _experts,
    Kernel.DIAGONAL: _diagonal,
    Kernel.ATTENTION: _attention,
    Kernel.MODULE: lambda local, _argument: bind_module(local),
    Kernel.ROUTED: lambda local, _argument: bind_experts(local),
}
