"""Normalisation over sharded dims: ranks reduce means and variances.

Forward computes the global mean first and then the mean of squared differences from it, which is
accurate for values far from zero too. Backward is that of Ba, Kiros and Hinton, "Layer
Normalization", arXiv:1607.06450, with its two sums reduced over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.runtime.program.sharded_kernels.base import (
    Gradients,
    ShardedKernel,
    Statistics,
    widened,
)

_EPS = 1e-5
"""The default of `eps`."""

_MOMENTUM = 0.1
"""The default of `momentum`."""


def bind_last_dims(local: LocalNode) -> LocalKernel | None:
    """Bind layer_norm or rms_norm; None if the normalised dims are not sharded."""
    shape = local.node.argument("normalized_shape")
    assert isinstance(shape, tuple)
    rank = len(local.input_shapes[0])
    dims = tuple(range(rank - len(shape), rank))
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    is_rms = local.node.operator == "aten.rms_norm.default"
    count = prod(size for size in shape if isinstance(size, int))
    # The default of rms_norm is the machine epsilon.
    is_default = is_rms and local.node.argument("eps") is None
    eps = None if is_default else local.number("eps", _EPS)
    norm = _Norm(dims=dims, count=count, eps=eps, centred=not is_rms, statistics=statistics)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        result, _, _ = norm(given["input"], given.get("weight"), given.get("bias"))
        return (result,)

    return run


def bind_group_norm(local: LocalNode) -> LocalKernel | None:
    """Bind group_norm; None if groups are not sharded."""
    samples, channels, *sizes = local.input_shapes[0]
    spatial = tuple(range(2, 2 + len(sizes)))
    num_groups = local.integer("num_groups", 1)
    local_groups, axes = _groups_of(local, num_groups)
    axes = sorted((*axes, *local.axes_sharding(spatial)))
    if not axes:
        return None
    statistics = Statistics(local.place.ranks, tuple(axes))
    count = local.count((1, *spatial)) // num_groups
    norm = _Norm(dims=(2, 3), count=count, eps=local.number("eps", _EPS), statistics=statistics)
    grouped = (samples, local_groups, channels // local_groups, prod(sizes))

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        values = given["input"]
        scales = _viewed(given, (1, *grouped[1:3], 1))
        return (norm(values.reshape(grouped), *scales)[0].view(values.shape),)

    return run


def bind_batch_norm(local: LocalNode) -> LocalKernel | None:
    """Bind batch_norm in training; None if no dim other than the channels is sharded."""
    samples, channels, *sizes = local.input_shapes[0]
    others = (0, *range(2, 2 + len(sizes)))
    statistics = Statistics.over(local, others)
    if not local.node.argument("training") or not statistics.axes:
        return None
    count = local.count(others)
    norm = _Norm(dims=(0, 2), count=count, eps=local.number("eps", _EPS), statistics=statistics)
    momentum = local.number("momentum", _MOMENTUM)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        values = given["input"]
        flat = values.reshape(samples, channels, prod(sizes))
        result, mean, variance = norm(flat, *_viewed(given, (1, channels, 1)))
        # As in ATen, running statistics are changed in place without autograd's knowledge.
        unbiased = variance * (count / max(count - 1, 1))
        for name, batch in (("running_mean", mean), ("running_var", unbiased)):
            if name in given:
                running = given[name].data
                running.lerp_(batch.view(channels).to(running.dtype), momentum)
        return (result.view(values.shape),)

    return run


def _viewed(
    given: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Reshape weight and bias so that they broadcast to the values."""
    scales = (given.get(name) for name in ("weight", "bias"))
    return tuple(None if scale is None else scale.view(shape) for scale in scales)


def _groups_of(local: LocalNode, num_groups: int) -> tuple[int, list[int]]:
    """The number of groups on a rank, and the axes that shard channels within a group."""
    local_groups = max(num_groups * local.input_shapes[0][1] // local.shapes[0][1], 1)
    within = []
    for axis in local.inputs[0].sharding_axes(1):
        size = local.place.axis_sizes[axis]
        if num_groups > 1:
            num_groups //= size
        elif size > 1:
            within.append(axis)
    return local_groups, within


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm(ShardedKernel):
    """Normalise, scale and shift; saves the input, the scales and two statistics per row.

    Attributes:
        dims: the normalised dims.
        count: global number of elements that share a mean and a variance.
        statistics: reduces over the ranks with the other shards of these dims.
        eps: constant added to the variance; None for the machine epsilon of the dtype.
        centred: True if the mean is subtracted.
    """

    dims: tuple[int, ...]
    count: int
    statistics: Statistics
    eps: float | None
    centred: bool = True

    def forward(
        self,
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute normalised values, mean and variance; the latter two have no gradient."""
        wide = widened(values)
        if self.centred:
            # Two collectives, first of the mean: from one, of sums and sums of squares, the
            # variance would be a difference of large numbers, of which few digits are left.
            mean = self.statistics.total(wide.sum(self.dims, keepdim=True)).div_(self.count)
            centred = wide - mean
        else:
            mean, centred = wide.new_zeros(()), wide
        squares = centred.square().sum(self.dims, keepdim=True)
        variance = self.statistics.total(squares).div_(self.count)
        eps = torch.finfo(values.dtype).eps if self.eps is None else self.eps
        scale = (variance + eps).rsqrt_()
        result = centred * scale
        if weight is not None:
            result = result.mul_(weight)
        if bias is not None:
            result = result.add_(bias)
        ctx.save_for_backward(values, weight, mean, scale)
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.mark_non_differentiable(mean, variance)
        return result.to(values.dtype), mean, variance

    def backward(self, ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> Gradients:
        """The gradients of values, weight and bias, as far as they are needed."""
        values, weight, mean, scale = ctx.saved_tensors
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
            along = (scaled * normalised).sum(self.dims, keepdim=True)
            sums = [scaled.sum(self.dims, keepdim=True), along] if self.centred else [along]
            *shift, along = self.statistics.total(torch.stack(sums)).div_(self.count)
            of_values = scaled - normalised.mul_(along)
            for mean_gradient in shift:
                of_values.sub_(mean_gradient)
            of_values = of_values.mul_(scale).to(values.dtype)
        return of_values, of_weight, of_bias
