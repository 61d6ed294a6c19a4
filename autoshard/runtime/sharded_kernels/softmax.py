"""Softmax, its logarithm, and the logarithm of a sum of exponentials, along cut dims."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.graph import Token
from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.sharded_kernels.statistics import Statistics, widened


def bind_softmax(local: LocalNode) -> LocalKernel | None:
    """A softmax or its logarithm: a rank has its slice of the result; None where rows are whole."""
    (dim,) = local.dims("dim")
    statistics = Statistics.over(local, (dim,))
    if not statistics.axes:
        return None
    function = _LogSoftmax if local.node.operator.startswith("aten.log_softmax") else _Softmax
    wanted = local.node.argument("dtype")
    dtype = getattr(torch, wanted.value) if isinstance(wanted, Token) else None
    return lambda tensors, _step: (
        function.apply(tensors[0].to(dtype or tensors[0].dtype), dim, statistics),  # type: ignore[no-untyped-call]  # torch
    )


def bind_logsumexp(local: LocalNode) -> LocalKernel | None:
    """logsumexp: the same on all ranks; None where rows are whole."""
    dims = local.dims("dim")
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    keeps = bool(local.node.argument("keepdim", False))
    return lambda tensors, _step: (_LogSumExp.apply(tensors[0], dims, keeps, statistics),)  # type: ignore[no-untyped-call]  # torch


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int, statistics: Statistics) -> torch.Tensor:
        wide = widened(scores)
        result = (wide - _shift_of(wide, (dim,), statistics)).exp_()
        sums = statistics.total(result.sum(dim, keepdim=True))
        result = result.div_(sums).to(scores.dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.statistics = dim, statistics
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        weighted = gradient * result
        sums = ctx.statistics.total(widened(weighted).sum(ctx.dim, keepdim=True))
        return weighted.sub_(result * sums.to(result.dtype)), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int, statistics: Statistics) -> torch.Tensor:
        wide = widened(scores)
        sums, shift = sums_of_exponentials(wide, (dim,), statistics)
        result = (wide - shift).sub_(statistics.total(sums).log_()).to(scores.dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.statistics = dim, statistics
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        sums = ctx.statistics.total(widened(gradient).sum(ctx.dim, keepdim=True))
        return gradient - result.exp().mul_(sums.to(result.dtype)), None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        dims: tuple[int, ...],
        keeps: bool,  # noqa: FBT001  autograd takes positions only
        statistics: Statistics,
    ) -> torch.Tensor:
        sums, shift = sums_of_exponentials(widened(scores), dims, statistics)
        result = statistics.total(sums).log_().add_(shift).to(scores.dtype)
        ctx.save_for_backward(scores, result)
        ctx.dims, ctx.keeps = dims, keeps
        return result if keeps else squeezed(result, dims)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scores, result = ctx.saved_tensors
        gradient = gradient.reshape(result.shape)
        return (scores - result).exp_().mul_(gradient), None, None, None


def sums_of_exponentials(
    scores: torch.Tensor, dims: tuple[int, ...], statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of a rank's own exponentials, and what was subtracted so that none is too large.

    Args:
        scores: a rank's slice, in 32 bits at least.
        dims: along which sums go.
        statistics: over the ranks that have the other slices.
    """
    shift = _shift_of(scores, dims, statistics)
    return (scores - shift).exp_().sum(dims, keepdim=True), shift


def _shift_of(scores: torch.Tensor, dims: tuple[int, ...], statistics: Statistics) -> torch.Tensor:
    largest = statistics.largest(scores.amax(dims, keepdim=True))
    # A row that is infinite has no exponentials to compare; torch subtracts nothing either.
    return largest.masked_fill(largest.isinf(), 0)


def squeezed(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The tensor without dims of size 1."""
    kept = [size for dim, size in enumerate(tensor.shape) if dim not in dims]
    return tensor.view(kept)
