"""Reductions whose result is the same on all ranks: extremes, deviations and lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.sharded_kernels.softmax import squeezed
from autoshard.runtime.sharded_kernels.statistics import Statistics, widened

_Tensors = tuple[torch.Tensor | None, ...]


def bind_amax(local: LocalNode) -> LocalKernel | None:
    """The largest or smallest, whose places share its gradient; None where rows are whole."""
    dims = _reduced(local)
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    sign = _sign(local)
    keeps = _keeps(local)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        (values,) = tensors
        made = _Largest.apply(values if sign > 0 else -values, dims, statistics)  # type: ignore[no-untyped-call]  # torch
        made = made if sign > 0 else -made
        return (made if keeps else squeezed(made, dims),)

    return run


def bind_first(local: LocalNode) -> LocalKernel | None:
    """max, min, argmax and argmin along a dim; None where rows are whole."""
    named = local.dims("dim")
    statistics = Statistics.over(local, named)
    if not statistics.axes:
        return None
    (dim,) = named
    sign, start = _sign(local), local.start(dim)
    dims = () if _keeps(local) else (dim,)
    only_place = local.node.operator.startswith("aten.arg")

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        (values,) = tensors
        largest, place = _First.apply(values if sign > 0 else -values, dim, start, statistics)  # type: ignore[no-untyped-call]  # torch
        made = (place,) if only_place else (largest if sign > 0 else -largest, place)
        return tuple(squeezed(tensor, dims) for tensor in made)

    return run


def bind_variance(local: LocalNode) -> LocalKernel | None:
    """Variance or deviation; None where rows are whole."""
    dims = _reduced(local)
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    count = local.count(dims)
    correction = local.node.argument("correction")
    if correction is None:
        correction = int(bool(local.node.argument("unbiased", True)))
    assert isinstance(correction, (int, float))
    takes_root, keeps = local.node.operator.startswith("aten.std"), _keeps(local)
    settings = (count, max(count - correction, 0), takes_root)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        made = _Variance.apply(tensors[0], dims, settings, statistics)  # type: ignore[no-untyped-call]  # torch
        return (made if keeps else squeezed(made, dims),)

    return run


def bind_vector_norm(local: LocalNode) -> LocalKernel | None:
    """The root of the sum of squares; None where rows are whole."""
    dims = _reduced(local)
    statistics = Statistics.over(local, dims)
    if not statistics.axes:
        return None
    keeps = _keeps(local)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        made = _Length.apply(tensors[0], dims, statistics)  # type: ignore[no-untyped-call]  # torch
        return (made if keeps else squeezed(made, dims),)

    return run


def _reduced(local: LocalNode) -> tuple[int, ...]:
    """The dims that are reduced: all where none is named."""
    return local.dims("dim") or tuple(range(len(local.input_shapes[0])))


def _keeps(local: LocalNode) -> bool:
    return bool(local.node.argument("keepdim"))


def _sign(local: LocalNode) -> int:
    packet = local.node.operator.split(".")[1]
    return -1 if packet in ("amin", "min", "argmin") else 1


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, dims: tuple[int, ...], statistics: Statistics
    ) -> torch.Tensor:
        largest = statistics.largest(widened(values).amax(dims, keepdim=True)).to(values.dtype)
        ctx.save_for_backward(values, largest)
        ctx.dims, ctx.statistics = dims, statistics
        return largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        values, largest = ctx.saved_tensors
        shares = values == largest
        count = shares.sum(ctx.dims, keepdim=True, dtype=widened(gradient).dtype)
        each = gradient / ctx.statistics.total(count).to(gradient.dtype)
        return shares * each, None, None


class _First(torch.autograd.Function):
    """The largest number of a row and the first place where it is."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, dim: int, start: int, statistics: Statistics
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, place = widened(values).max(dim, keepdim=True)
        largest = statistics.largest(own.clone())
        # The largest negative place is the first; what has a smaller number has no place.
        nowhere = torch.iinfo(place.dtype).min
        first = -statistics.largest(torch.where(own == largest, -(place + start), nowhere))
        ctx.save_for_backward(first)
        ctx.dim, ctx.start, ctx.shape = dim, start, values.shape
        ctx.mark_non_differentiable(first)
        return largest.to(values.dtype), first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> _Tensors:
        (first,) = ctx.saved_tensors
        place = first - ctx.start
        inside = (place >= 0) & (place < ctx.shape[ctx.dim])
        made = gradient.new_zeros(ctx.shape)
        made.scatter_(ctx.dim, place.masked_fill(~inside, 0), gradient * inside)
        return made, None, None, None


class _Variance(torch.autograd.Function):
    """Settings are how many numbers a row has, the divisor, and whether a root is taken."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        dims: tuple[int, ...],
        settings: tuple[int, float, bool],
        statistics: Statistics,
    ) -> torch.Tensor:
        wide = widened(values)
        count, divisor, takes_root = settings
        mean = statistics.total(wide.sum(dims, keepdim=True)).div_(count)
        squares = (wide - mean).square_().sum(dims, keepdim=True)
        made = statistics.total(squares).div_(divisor)
        made = (made.sqrt_() if takes_root else made).to(values.dtype)
        ctx.save_for_backward(values, mean, made if takes_root else None)
        ctx.divisor = divisor
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        values, mean, root = ctx.saved_tensors
        if root is not None:
            gradient = (gradient / (2 * root)).masked_fill_(root == 0, 0)
        each = gradient * (2 / ctx.divisor)
        return (values - mean).mul_(each).to(values.dtype), None, None, None


class _Length(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, dims: tuple[int, ...], statistics: Statistics
    ) -> torch.Tensor:
        squares = widened(values).square().sum(dims, keepdim=True)
        made = statistics.total(squares).sqrt_().to(values.dtype)
        ctx.save_for_backward(values, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        values, made = ctx.saved_tensors
        each = (gradient / made).masked_fill_(made == 0, 0)
        return values * each, None, None
