"""Mixtures of experts on a rank: the operators of `autoshard.graph.experts`.

Local rows are one tensor [1, n, d], ordered by expert and then by token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.runtime.local_node import LocalKernel, LocalNode, Ranks
from autoshard.runtime.sharded_kernels.routes import Exchange, Router, Routes

_Tensors = tuple[torch.Tensor | None, ...]
_ALIGNMENT = 16
"""Bytes of which grouped kernels take rows of a multiple only."""


def bind_experts(local: LocalNode) -> LocalKernel:
    """What a rank runs for an operator on rows."""
    return _BINDERS[local.node.operator](local)


def _dispatch(local: LocalNode) -> LocalKernel:
    router = Router.of(local, rows=2, tokens=0, num_experts=_num_experts(local))
    ranks = local.place.ranks

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        tokens, ids = tensors
        return (_Dispatch.apply(tokens, ids.shape[1], router.routes(ids), ranks),)  # type: ignore[no-untyped-call]  # torch

    return run


def _combine(local: LocalNode) -> LocalKernel:
    router = Router.of(local, rows=0, tokens=3, num_experts=_num_experts(local))
    ranks = local.place.ranks

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        rows, ids, weights = tensors
        return (_Combine.apply(rows, weights, router.routes(ids, back=True), ranks),)  # type: ignore[no-untyped-call]  # torch

    return run


def _grouped_mm(local: LocalNode) -> LocalKernel:
    router = _by_matrices(local, tensor=1, rows=0)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        rows, matrices, ids = tensors
        product = _products(rows.squeeze(0), matrices, router.counts(ids))
        return (product.unsqueeze(0),)

    return run


def _products(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows times the matrices of their experts; one by one where no kernel takes them together."""
    aligned = all(size * rows.itemsize % _ALIGNMENT == 0 for size in matrices.shape[1:])
    if rows.dtype is torch.bfloat16 and len(rows) and aligned:
        return grouped_mm(rows, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    groups = torch.split(rows, counts.tolist())
    return torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])


def _expert_bias(local: LocalNode) -> LocalKernel:
    router = _by_matrices(local, tensor=0, rows=2)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        bias, ids = tensors
        experts = torch.repeat_interleave(router.counts(ids))
        return (bias.index_select(0, experts).unsqueeze(0),)

    return run


def _num_experts(local: LocalNode) -> int:
    number = local.node.argument("num_experts")
    assert isinstance(number, int)
    return number


def _by_matrices(local: LocalNode, *, tensor: int, rows: int) -> Router:
    """The router of an operator that has something of each expert."""
    return Router.of(local, rows=rows, tokens=rows, num_experts=local.shapes[tensor][0])


_BINDERS: Mapping[str, Callable[[LocalNode], LocalKernel]] = {
    DISPATCH: _dispatch,
    GROUPED_MM: _grouped_mm,
    EXPERT_BIAS: _expert_bias,
    COMBINE: _combine,
}


def _to_experts(rows: torch.Tensor, exchange: Exchange, ranks: Ranks) -> torch.Tensor:
    """The rows that an exchange brings, by expert."""
    order = exchange.order
    sent = rows if order is None else rows.index_select(0, order)
    arrived = ranks.all_to_all(sent, exchange.axis, exchange.sent, exchange.received)
    return torch.empty_like(arrived).index_copy_(0, exchange.arrival, arrived)


def _to_tokens(rows: torch.Tensor, exchange: Exchange, ranks: Ranks) -> torch.Tensor:
    """The rows that went away with an exchange, as they were before it."""
    sent = rows.index_select(0, exchange.arrival)
    arrived = ranks.all_to_all(sent, exchange.axis, exchange.received, exchange.sent)
    order = exchange.order
    return arrived if order is None else torch.empty_like(arrived).index_copy_(0, order, arrived)


def _save(ctx: Any, exchanges: Sequence[Exchange], *tensors: torch.Tensor | None) -> None:
    """Keep tensors for backward, and those of exchanges behind them."""
    ctx.legs = [(e.axis, e.sent, e.received) for e in exchanges]
    ctx.save_for_backward(*tensors, *(t for e in exchanges for t in (e.order, e.arrival)))


def _saved(ctx: Any, count: int) -> tuple[list[Exchange], Sequence[Any]]:
    """The exchanges that were kept, and so many tensors in front of them."""
    kept = ctx.saved_tensors
    pairs = zip(kept[count::2], kept[count + 1 :: 2], strict=True)
    found = [
        Exchange(axis, sent, received, order, arrival)
        for (axis, sent, received), (order, arrival) in zip(ctx.legs, pairs, strict=True)
    ]
    return found, kept[:count]


class _Dispatch(torch.autograd.Function):
    """Rows of tokens to the ranks of their experts."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, slots: int, routes: Routes, ranks: Ranks
    ) -> torch.Tensor:
        index = routes.places // slots
        rows = tokens.index_select(0, index)
        for exchange in routes.exchanges:
            rows = _to_experts(rows, exchange, ranks)
        _save(ctx, routes.exchanges, index)
        ctx.shape, ctx.ranks = tokens.shape, ranks
        return rows.unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        exchanges, (index,) = _saved(ctx, 1)
        rows = gradient.squeeze(0)
        for exchange in reversed(exchanges):
            rows = _to_tokens(rows, exchange, ctx.ranks)
        return rows.new_zeros(ctx.shape).index_add_(0, index, rows), None, None, None


class _Combine(torch.autograd.Function):
    """Rows back to the ranks of their tokens, and each token's weighted sum."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, routes: Routes, ranks: Ranks
    ) -> torch.Tensor:
        back = rows.squeeze(0)
        for exchange in reversed(routes.exchanges):
            back = _to_tokens(back, exchange, ranks)
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        # What nothing was done to is kept as it came in.
        kept = (back if routes.exchanges else rows) if needs_weights else None
        _save(ctx, routes.exchanges, kept, weights if needs_rows else None, routes.places)
        ctx.ranks, ctx.dtype, ctx.like_weights = ranks, rows.dtype, (weights.shape, weights.dtype)
        return _weighted_sum(back, weights, routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        exchanges, (rows, weights, places) = _saved(ctx, 3)
        shape, dtype = ctx.like_weights
        each = gradient.index_select(0, places // shape[1])
        to_rows = to_weights = None
        if rows is not None:
            products = (each * rows.view(each.shape)).sum(1).to(dtype)
            to_weights = products.new_zeros(shape).view(-1).index_copy_(0, places, products)
            to_weights = to_weights.view(shape)
        if weights is not None:
            to_rows = (each * weights.view(-1)[places].unsqueeze(1)).to(ctx.dtype)
            for exchange in exchanges:
                to_rows = _to_experts(to_rows, exchange, ctx.ranks)
            to_rows = to_rows.unsqueeze(0)
        return to_rows, to_weights, None, None


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor, routes: Routes) -> torch.Tensor:
    """The sum of each token's rows times their weights, of those rows that there are."""
    num_tokens, slots = weights.shape
    dtype = torch.promote_types(rows.dtype, weights.dtype)
    result = rows.new_zeros((num_tokens, rows.shape[1]), dtype=dtype)
    weights = weights.to(dtype)
    if not routes.is_complete:
        each = weights.reshape(-1)[routes.places].unsqueeze(1)
        return result.index_add_(0, routes.places // slots, rows * each)
    numbers = torch.arange(len(routes.places), device=rows.device)
    row_of = torch.empty_like(numbers).index_copy_(0, routes.places, numbers)
    for slot, index in enumerate(row_of.view(num_tokens, slots).unbind(1)):
        result.addcmul_(rows.index_select(0, index).to(dtype), weights[:, slot, None])
    return result
