"""Normalisations over dims that are cut: ranks share means and variances.

Forward takes the mean of all, then the mean of squares around it, which loses nothing where
numbers are far from zero. Backward is that of Ba, Kiros and Hinton, "Layer Normalization",
arXiv:1607.06450, with its two sums over all ranks' slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.sharded_kernels.statistics import Statistics, widened


def bind_last_dims(local: LocalNode) -> LocalKernel | None:
    """layer_norm and rms_norm with a slice of what is normalised; None where it is whole."""
    shape = local.node.argument("normalized_shape")
    assert isinstance(shape, tuple)
    rank = len(local.input_shapes[0])
    dims = tuple(range(rank - len(shape), rank))
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    norm = _Norm(
        dims=dims,
        count=prod(size for size in shape if isinstance(size, int)),
        eps=_epsilon(local),
        centred=not _is_root_mean_square(local),
        statistics=statistics,
    )

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        values = given["input"]
        made, _, _ = _normalise(values, given.get("weight"), given.get("bias"), norm)
        return (made,)

    return run


_EPS = 1e-5
"""The default of `eps`."""


def _is_root_mean_square(local: LocalNode) -> bool:
    return local.node.operator == "aten.rms_norm.default"


def _epsilon(local: LocalNode) -> float | None:
    """What is added to a variance; None for the least of the type, as root mean squares have it."""
    eps = local.node.argument("eps", None if _is_root_mean_square(local) else _EPS)
    assert eps is None or isinstance(eps, (int, float))
    return eps


def bind_group_norm(local: LocalNode) -> LocalKernel | None:
    """group_norm with a slice of what groups have; None where groups are whole."""
    samples, channels, *places = local.input_shapes[0]
    spread = tuple(range(2, 2 + len(places)))
    num_groups = local.node.argument("num_groups", 1)
    assert isinstance(num_groups, int)
    share, axes = _groups_of(local, num_groups)
    statistics = Statistics(local.place.ranks, tuple(sorted((*axes, *local.axes_cutting(spread)))))
    if not statistics.axes:
        return None
    count = local.count((1, *spread)) // num_groups
    norm = _Norm(dims=(2, 3), count=count, statistics=statistics, eps=_epsilon(local))
    grouped = (samples, share, channels // share, prod(places))
    scales = (1, share, channels // share, 1)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        values = given["input"]
        weight, bias = (
            None if given.get(name) is None else given[name].view(scales)
            for name in ("weight", "bias")
        )
        made, _, _ = _normalise(values.reshape(grouped), weight, bias, norm)
        return (made.view(values.shape),)

    return run


def _groups_of(local: LocalNode, num_groups: int) -> tuple[int, list[int]]:
    """Groups on a rank, and the axes that cut within a group: those inside the cuts of groups."""
    share = max(num_groups * local.input_shapes[0][1] // local.shapes[0][1], 1)
    within = []
    for axis in local.inputs[0].cutting_axes(1):
        size = local.place.axis_sizes[axis]
        if num_groups > 1:
            num_groups //= size
        elif size > 1:
            within.append(axis)
    return share, within


def bind_batch_norm(local: LocalNode) -> LocalKernel | None:
    """batch_norm in training with a slice of the batch; None where statistics are whole."""
    samples, channels, *places = local.input_shapes[0]
    others = (0, *range(2, 2 + len(places)))
    statistics = Statistics.over(local, others)
    if not local.node.argument("training") or not statistics.axes:
        return None
    count = local.count(others)
    norm = _Norm(dims=(0, 2), count=count, statistics=statistics, eps=_epsilon(local))
    momentum = local.node.argument("momentum", _MOMENTUM)
    assert isinstance(momentum, (int, float))

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        values = given["input"]
        weight, bias = (
            None if given.get(name) is None else given[name].view(1, channels, 1)
            for name in ("weight", "bias")
        )
        flat = values.reshape(samples, channels, prod(places))
        made, mean, variance = _normalise(flat, weight, bias, norm)
        # As the operator does: what it tracks is no output of it, and autograd does not count
        # the change, for backward of a checkpoint takes the statistics as they are by then.
        unbiased = variance * (count / max(count - 1, 1))
        for name, seen in (("running_mean", mean), ("running_var", unbiased)):
            if name in given:
                tracked = given[name].data
                tracked.lerp_(seen.view(channels).to(tracked.dtype), momentum)
        return (made.view(values.shape),)

    return run


_MOMENTUM = 0.1
"""The default of `momentum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """What is normalised together.

    Attributes:
        dims: that share statistics.
        count: numbers that share them, those of other ranks included.
        statistics: over the ranks that have the others.
        eps: added to the variance; None for the least of the type.
        centred: whether the mean is subtracted.
    """

    dims: tuple[int, ...]
    count: int
    statistics: Statistics
    eps: float | None
    centred: bool = True


def _normalise(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: _Norm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made, mean, variance = _Normalise.apply(values, weight, bias, norm)  # type: ignore[no-untyped-call]  # torch
    return made, mean, variance


class _Normalise(torch.autograd.Function):
    """Keeps its input, the scales and two numbers per row, as the operators do."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: _Norm,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = widened(values)
        if norm.centred:
            mean = norm.statistics.total(wide.sum(norm.dims, keepdim=True)).div_(norm.count)
            centred = wide - mean
        else:
            mean, centred = wide.new_zeros(()), wide
        squares = centred.square().sum(norm.dims, keepdim=True)
        variance = norm.statistics.total(squares).div_(norm.count)
        eps = torch.finfo(values.dtype).eps if norm.eps is None else norm.eps
        scale = (variance + eps).rsqrt_()
        made = centred * scale
        if weight is not None:
            made = made.mul_(weight)
        if bias is not None:
            made = made.add_(bias)
        ctx.save_for_backward(values, weight, mean, scale)
        ctx.norm = norm
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.mark_non_differentiable(mean, variance)
        return made.to(values.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, scale = ctx.saved_tensors
        norm: _Norm = ctx.norm
        needs_values, needs_weight, needs_bias, *_rest = ctx.needs_input_grad
        wide = widened(gradient)
        normalised = (widened(values) - mean).mul_(scale)
        of_values = of_weight = of_bias = None
        if needs_weight:
            of_weight = (wide * normalised).sum_to_size(weight.shape).to(weight.dtype)
        if needs_bias:
            of_bias = wide.sum_to_size(ctx.bias_shape).to(gradient.dtype)
        if needs_values:
            scaled = wide if weight is None else wide * weight
            along = (scaled * normalised).sum(norm.dims, keepdim=True)
            sums = [scaled.sum(norm.dims, keepdim=True), along] if norm.centred else [along]
            *shift, along = norm.statistics.total(torch.stack(sums)).div_(norm.count)
            of_values = scaled - normalised.mul_(along)
            for mean_gradient in shift:
                of_values.sub_(mean_gradient)
            of_values = of_values.mul_(scale).to(values.dtype)
        return of_values, of_weight, of_bias, None
