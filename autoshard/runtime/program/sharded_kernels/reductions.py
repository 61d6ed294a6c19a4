"""Reductions and softmax along sharded dims: ranks reduce maxima, sums and counts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph import Token
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.runtime.program.sharded_kernels.base import (
    Gradients,
    ShardedKernel,
    Statistics,
    widened,
)


def bind_reduction(local: LocalNode) -> LocalKernel | None:
    """Bind an operator that reduces dims to one tensor; None if these are not sharded."""
    dims = local.dims("dim") or tuple(range(len(local.input_shapes[0])))
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    reduction = _REDUCTIONS[_packet(local)](local, dims, statistics)
    squeezed = () if local.node.argument("keepdim") else dims
    return lambda tensors, _step: (reduction(tensors[0]).squeeze(squeezed),)


def bind_arg_extreme(local: LocalNode) -> LocalKernel | None:
    """Bind max, min, argmax or argmin along a dim; None if it is not sharded."""
    dims = local.dims("dim")
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    (dim,) = dims
    extreme = _ArgExtreme(dims, statistics, _sign(local), local.start(dim))
    squeezed = () if local.node.argument("keepdim") else dims
    first_output = 1 if _packet(local).startswith("arg") else 0

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        outputs = extreme(tensors[0])[first_output:]
        return tuple(output.squeeze(squeezed) for output in outputs)

    return run


def bind_softmax(local: LocalNode) -> LocalKernel | None:
    """Bind softmax or log_softmax, whose result is sharded; None if rows are not sharded."""
    dims = local.dims("dim")
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    kernel = (_LogSoftmax if _packet(local) == "log_softmax" else _Softmax)(dims, statistics)
    wanted = local.node.argument("dtype")
    dtype = getattr(torch, wanted.value) if isinstance(wanted, Token) else None
    return lambda tensors, _step: (kernel(tensors[0].to(dtype or tensors[0].dtype)),)


def sums_of_exponentials(
    scores: torch.Tensor, dims: tuple[int, ...], statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of the exponentials of a shard, and the shift subtracted to avoid overflow.

    Args:
        scores: the rank's shard, in at least float32.
        dims: the dims that are summed.
        statistics: reduces over the ranks with the other shards.
    """
    shift = _shift(scores, dims, statistics)
    return (scores - shift).exp_().sum(dims, keepdim=True), shift


def _shift(scores: torch.Tensor, dims: tuple[int, ...], statistics: Statistics) -> torch.Tensor:
    largest = statistics.largest(scores.amax(dims, keepdim=True))
    # Like torch, subtract nothing if the maximum is infinite.
    return largest.masked_fill(largest.isinf(), 0)


def _packet(local: LocalNode) -> str:
    return local.node.operator.split(".")[1]


def _sign(local: LocalNode) -> int:
    return -1 if _packet(local) in ("amin", "min", "argmin") else 1


def _signed(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    return tensor if sign > 0 else -tensor


@dataclass(frozen=True, slots=True)
class _AlongDims(ShardedKernel):
    """A kernel along sharded dims.

    Attributes:
        dims: the reduced or normalised dims.
        statistics: reduces over the ranks with the other shards.
    """

    dims: tuple[int, ...]
    statistics: Statistics


class _Softmax(_AlongDims):
    def forward(self, ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        wide = widened(scores)
        result = (wide - _shift(wide, self.dims, self.statistics)).exp_()
        sums = self.statistics.total(result.sum(self.dims, keepdim=True))
        result = result.div_(sums).to(scores.dtype)
        ctx.save_for_backward(result)
        return result

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        (result,) = ctx.saved_tensors
        weighted = gradient * result
        sums = self.statistics.total(widened(weighted).sum(self.dims, keepdim=True))
        return (weighted.sub_(result * sums.to(result.dtype)),)


class _LogSoftmax(_AlongDims):
    def forward(self, ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        wide = widened(scores)
        sums, shift = sums_of_exponentials(wide, self.dims, self.statistics)
        result = (wide - shift).sub_(self.statistics.total(sums).log_()).to(scores.dtype)
        ctx.save_for_backward(result)
        return result

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        (result,) = ctx.saved_tensors
        sums = self.statistics.total(widened(gradient).sum(self.dims, keepdim=True))
        return (gradient - result.exp().mul_(sums.to(result.dtype)),)


class _LogSumExp(_AlongDims):
    def forward(self, ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        sums, shift = sums_of_exponentials(widened(scores), self.dims, self.statistics)
        result = self.statistics.total(sums).log_().add_(shift).to(scores.dtype)
        ctx.save_for_backward(scores, result)
        return result

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        scores, result = ctx.saved_tensors
        return ((scores - result).exp_().mul_(gradient),)


class _EuclideanNorm(_AlongDims):
    """The Euclidean norm."""

    def forward(self, ctx: Any, values: torch.Tensor) -> torch.Tensor:
        squares = widened(values).square().sum(self.dims, keepdim=True)
        norm = self.statistics.total(squares).sqrt_().to(values.dtype)
        ctx.save_for_backward(values, norm)
        return norm

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        values, norm = ctx.saved_tensors
        return (values * (gradient / norm).masked_fill_(norm == 0, 0),)


@dataclass(frozen=True, slots=True)
class _Extreme(_AlongDims):
    """amax or amin: the gradient is divided among equal elements.

    Attributes:
        sign: 1 for the maximum, -1 for the minimum.
    """

    sign: int

    def forward(self, ctx: Any, values: torch.Tensor) -> torch.Tensor:
        own = _signed(widened(values), self.sign).amax(self.dims, keepdim=True)
        extreme = _signed(self.statistics.largest(own), self.sign).to(values.dtype)
        ctx.save_for_backward(values, extreme)
        return extreme

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        values, extreme = ctx.saved_tensors
        shares = values == extreme
        count = shares.sum(self.dims, keepdim=True, dtype=widened(gradient).dtype)
        return (shares * (gradient / self.statistics.total(count).to(gradient.dtype)),)


@dataclass(frozen=True, slots=True)
class _ArgExtreme(_AlongDims):
    """The maximum or minimum of each row and the first index at which it occurs.

    Attributes:
        sign: 1 for the maximum, -1 for the minimum.
        start: global index of the shard's first element.
    """

    sign: int
    start: int

    def forward(self, ctx: Any, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own, index = _signed(widened(values), self.sign).max(self.dims[0], keepdim=True)
        largest = self.statistics.largest(own.clone())
        # The maximum of negated indices is the first index; ranks with smaller elements send none.
        none = torch.iinfo(index.dtype).min
        negated = torch.where(own == largest, -(index + self.start), none)
        first = -self.statistics.largest(negated)
        ctx.save_for_backward(first)
        ctx.shape = values.shape
        ctx.mark_non_differentiable(first)
        return _signed(largest, self.sign).to(values.dtype), first

    def backward(self, ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Gradients:
        (first,), (dim,) = ctx.saved_tensors, self.dims
        index = first - self.start
        inside = (index >= 0) & (index < ctx.shape[dim])
        result = gradient.new_zeros(ctx.shape)
        return (result.scatter_(dim, index.masked_fill(~inside, 0), gradient * inside),)


@dataclass(frozen=True, slots=True)
class _Variance(_AlongDims):
    """Variance or standard deviation.

    Attributes:
        count: number of elements of a global row.
        divisor: divisor of the sum of squares: the count minus the correction.
        takes_root: True if the result is the standard deviation.
    """

    count: int
    divisor: float
    takes_root: bool

    def forward(self, ctx: Any, values: torch.Tensor) -> torch.Tensor:
        wide = widened(values)
        mean = self.statistics.total(wide.sum(self.dims, keepdim=True)).div_(self.count)
        squares = (wide - mean).square_().sum(self.dims, keepdim=True)
        variance = self.statistics.total(squares).div_(self.divisor)
        result = (variance.sqrt_() if self.takes_root else variance).to(values.dtype)
        ctx.save_for_backward(values, mean, result if self.takes_root else None)
        return result

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        values, mean, root = ctx.saved_tensors
        if root is not None:
            gradient = (gradient / (2 * root)).masked_fill_(root == 0, 0)
        each = gradient * (2 / self.divisor)
        return ((values - mean).mul_(each).to(values.dtype),)


def _variance(local: LocalNode, dims: tuple[int, ...], statistics: Statistics) -> _Variance:
    correction = local.node.argument("correction")
    if correction is None:
        correction = int(bool(local.node.argument("unbiased", True)))
    assert isinstance(correction, (int, float))
    count = local.count(dims)
    takes_root = _packet(local) == "std"
    return _Variance(dims, statistics, count, max(count - correction, 0), takes_root)


def _extreme(local: LocalNode, dims: tuple[int, ...], statistics: Statistics) -> _Extreme:
    return _Extreme(dims, statistics, _sign(local))


_REDUCTIONS: Mapping[str, Callable[[LocalNode, tuple[int, ...], Statistics], ShardedKernel]] = {
    "amax": _extreme,
    "amin": _extreme,
    "var": _variance,
    "std": _variance,
    "linalg_vector_norm": lambda _, dims, statistics: _EuclideanNorm(dims, statistics),
    "logsumexp": lambda _, dims, statistics: _LogSumExp(dims, statistics),
}
"""Kernels by ATen operator name without overload."""
