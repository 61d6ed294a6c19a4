"""Mixture of experts: local kernels of the operators of `autoshard.graph.experts`.

A rank's rows are a tensor of shape [1, n, d], ordered by expert and then by token. The position
of a row is the index of its expert id: token times experts per token plus choice. A rank has the
expert ids of all tokens whose rows it may receive, so it can compute the rows of all other ranks,
and only the rows themselves are communicated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Ranks, Step
from autoshard.runtime.program.sharded_kernels.base import Gradients, ShardedKernel

_ALIGNMENT = 16
"""Row sizes in bytes must be multiples of this for grouped kernels."""


def bind_experts(local: LocalNode) -> LocalKernel:
    """Bind an operator on rows of experts."""
    return _BINDERS[local.node.operator](local)


def _dispatch(local: LocalNode) -> LocalKernel:
    router = _Router.of(local, rows=2, tokens=0, num_experts=local.integer("num_experts", 0))
    ranks = local.place.ranks

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        tokens, ids = tensors
        return (_Dispatch(router.routes(ids), ids.shape[1], ranks)(tokens),)

    return run


def _combine(local: LocalNode) -> LocalKernel:
    router = _Router.of(local, rows=0, tokens=3, num_experts=local.integer("num_experts", 0))
    ranks = local.place.ranks

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        rows, ids, weights = tensors
        return (_Combine(router.routes(ids, back=True), ranks)(rows, weights),)

    return run


def _grouped_mm(local: LocalNode) -> LocalKernel:
    router = _by_matrices(local, tensor=1, rows=0)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        rows, matrices, ids = tensors
        product = _products(rows.squeeze(0), matrices, router.counts(ids))
        return (product.unsqueeze(0),)

    return run


def _products(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply rows by the matrices of their experts, in one grouped kernel if it supports them."""
    aligned = all(size * rows.itemsize % _ALIGNMENT == 0 for size in matrices.shape[1:])
    if rows.dtype is torch.bfloat16 and len(rows) and aligned:
        return grouped_mm(rows, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    groups = torch.split(rows, counts.tolist())
    return torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])


def _expert_bias(local: LocalNode) -> LocalKernel:
    router = _by_matrices(local, tensor=0, rows=2)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        bias, ids = tensors
        experts = torch.repeat_interleave(router.counts(ids))
        return (bias.index_select(0, experts).unsqueeze(0),)

    return run


def _by_matrices(local: LocalNode, *, tensor: int, rows: int) -> "_Router":
    """The router of an operator with a parameter per expert."""
    return _Router.of(local, rows=rows, tokens=rows, num_experts=local.shapes[tensor][0])


_BINDERS: Mapping[str, Callable[[LocalNode], LocalKernel]] = {
    DISPATCH: _dispatch,
    GROUPED_MM: _grouped_mm,
    EXPERT_BIAS: _expert_bias,
    COMBINE: _combine,
}


def _to_experts(rows: torch.Tensor, exchange: "_Exchange", ranks: Ranks) -> torch.Tensor:
    """Send rows in an exchange; return the received rows, ordered by expert."""
    order = exchange.order
    sent = rows if order is None else rows.index_select(0, order)
    arrived = ranks.all_to_all(sent, exchange.axis, exchange.sent, exchange.received)
    return torch.empty_like(arrived).index_copy_(0, exchange.arrival, arrived)


def _to_tokens(rows: torch.Tensor, exchange: "_Exchange", ranks: Ranks) -> torch.Tensor:
    """Send the rows of an exchange back; the inverse of `_to_experts`."""
    sent = rows.index_select(0, exchange.arrival)
    arrived = ranks.all_to_all(sent, exchange.axis, exchange.received, exchange.sent)
    order = exchange.order
    return arrived if order is None else torch.empty_like(arrived).index_copy_(0, order, arrived)


def _save(ctx: Any, exchanges: Sequence["_Exchange"], *tensors: torch.Tensor | None) -> None:
    """Save tensors for backward, followed by those of exchanges."""
    ctx.counts = [(e.axis, e.sent, e.received) for e in exchanges]
    ctx.save_for_backward(*tensors, *(t for e in exchanges for t in (e.order, e.arrival)))


def _saved(ctx: Any, count: int) -> tuple[list["_Exchange"], Sequence[Any]]:
    """The saved exchanges, and the given number of tensors saved before them."""
    kept = ctx.saved_tensors
    pairs = zip(kept[count::2], kept[count + 1 :: 2], strict=True)
    exchanges = [
        _Exchange(axis, sent, received, order, arrival)
        for (axis, sent, received), (order, arrival) in zip(ctx.counts, pairs, strict=True)
    ]
    return exchanges, kept[:count]


# Equal by identity: `torch.compile` of PyTorch 2.11 hashes an object before its fields are set.
@dataclass(frozen=True, slots=True, eq=False)
class _Dispatch(ShardedKernel):
    """Send rows of tokens to the ranks of their experts."""

    routes: "_Routes"
    experts_per_token: int
    ranks: Ranks

    def forward(self, ctx: Any, tokens: torch.Tensor) -> torch.Tensor:
        index = self.routes.positions // self.experts_per_token
        rows = tokens.index_select(0, index)
        for exchange in self.routes.exchanges:
            rows = _to_experts(rows, exchange, self.ranks)
        _save(ctx, self.routes.exchanges, index)
        ctx.shape = tokens.shape
        return rows.unsqueeze(0)

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        exchanges, (index,) = _saved(ctx, 1)
        rows = gradient.squeeze(0)
        for exchange in reversed(exchanges):
            rows = _to_tokens(rows, exchange, self.ranks)
        return (rows.new_zeros(ctx.shape).index_add_(0, index, rows),)


@dataclass(frozen=True, slots=True, eq=False)  # as above
class _Combine(ShardedKernel):
    """Send rows back to the ranks of their tokens, and compute each token's weighted sum."""

    routes: "_Routes"
    ranks: Ranks

    def forward(self, ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        exchanges = self.routes.exchanges
        back = rows.squeeze(0)
        for exchange in reversed(exchanges):
            back = _to_tokens(back, exchange, self.ranks)
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        # Without exchanges, the input itself is saved.
        kept = (back if exchanges else rows) if needs_weights else None
        _save(ctx, exchanges, kept, weights if needs_rows else None, self.routes.positions)
        ctx.dtype, ctx.weights_shape, ctx.weights_dtype = rows.dtype, weights.shape, weights.dtype
        return _weighted_sum(back, weights, self.routes)

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        exchanges, (rows, weights, positions) = _saved(ctx, 3)
        each = gradient.index_select(0, positions // ctx.weights_shape[1])
        to_rows = to_weights = None
        if rows is not None:
            products = (each * rows.view(each.shape)).sum(1).to(ctx.weights_dtype)
            to_weights = products.new_zeros(ctx.weights_shape)
            to_weights.view(-1).index_copy_(0, positions, products)
        if weights is not None:
            to_rows = (each * weights.view(-1)[positions].unsqueeze(1)).to(ctx.dtype)
            for exchange in exchanges:
                to_rows = _to_experts(to_rows, exchange, self.ranks)
            to_rows = to_rows.unsqueeze(0)
        return to_rows, to_weights


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor, routes: "_Routes") -> torch.Tensor:
    """The weighted sum of the rows of each token that are on this rank."""
    num_tokens, experts_per_token = weights.shape
    dtype = torch.promote_types(rows.dtype, weights.dtype)
    result = rows.new_zeros((num_tokens, rows.shape[1]), dtype=dtype)
    weights = weights.to(dtype)
    if not routes.is_complete:
        each = weights.reshape(-1)[routes.positions].unsqueeze(1)
        return result.index_add_(0, routes.positions // experts_per_token, rows * each)
    numbers = torch.arange(len(routes.positions), device=rows.device)
    row_of = torch.empty_like(numbers).index_copy_(0, routes.positions, numbers)
    for choice, index in enumerate(row_of.view(num_tokens, experts_per_token).unbind(1)):
        result.addcmul_(rows.index_select(0, index).to(dtype), weights[:, choice, None])
    return result


@dataclass(frozen=True, slots=True)
class _Exchange:
    """An all-to-all of rows over one mesh axis.

    Attributes:
        axis: the mesh axis.
        sent: number of rows to each rank of the axis.
        received: number of rows from each rank of the axis.
        order: permutation that orders the rows by target rank; None if they are ordered already.
        arrival: index of each received row in the result.
    """

    axis: int
    sent: list[int]
    received: list[int]
    order: torch.Tensor | None
    arrival: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Routes:
    """Routes of rows from the rank of their token to the rank of their expert.

    Attributes:
        positions: positions of rows, relative to the rank's own tokens; ordered by expert, or as
            the first exchange sends them.
        exchanges: the exchanges from tokens to experts, in order.
        is_complete: True if all rows of the rank's tokens are among them.
    """

    positions: torch.Tensor
    exchanges: tuple[_Exchange, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class _Router:
    """Computes routes from expert ids.

    Attributes:
        num_experts: global number of experts.
        expert_axes: axes that shard experts, outermost first.
        moved_axes: the expert axes that also shard tokens, so that rows are exchanged over them;
            outermost first.
        axis_sizes: size of each mesh axis.
        coordinate: the rank's coordinate on the mesh.
    """

    num_experts: int
    expert_axes: tuple[int, ...]
    moved_axes: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    @classmethod
    def of(cls, local: LocalNode, *, rows: int, tokens: int, num_experts: int) -> "_Router":
        """The router of an operator.

        Args:
            local: the operator.
            rows: index of its ragged tensor among inputs and outputs.
            tokens: index of a tensor that is sharded like the tokens.
            num_experts: global number of experts.
        """
        layouts = (*local.inputs, *local.outputs)
        sizes = local.place.axis_sizes
        experts = tuple(axis for axis in layouts[rows].sharding_axes(0) if sizes[axis] > 1)
        moved = tuple(axis for axis in layouts[tokens].sharding_axes(0) if axis in experts)
        return cls(num_experts, experts, moved, sizes, local.place.coordinate)

    def routes(self, ids: torch.Tensor, *, back: bool = False) -> _Routes:
        """The routes of the rows of some tokens.

        Forward exchanges over the axes in ascending order, as `Reductions.collectives` lists them.

        Args:
            ids: expert ids of each token, shape [tokens, experts per token].
            back: True if forward runs the exchanges in reverse, from experts to tokens.
        """
        by_expert, positions = torch.sort(ids.reshape(-1), stable=True)
        own = ids.numel() // self._num_parts(self.moved_axes)
        targets = self._digits(by_expert // self._experts_each, self.expert_axes)
        sources = self._digits(positions // own, self.moved_axes)
        location = targets | sources  # coordinate of each row by axis
        present = self._here(location)
        own_positions = positions[present] % own
        exchanges: list[_Exchange] = []
        for axis in sorted(self.moved_axes, reverse=back):
            location[axis] = targets[axis]
            after = self._here(location)
            exchange = self._exchange(axis, targets[axis][present], sources[axis][after])
            if not exchanges:
                # Rows may be read from the tokens in any order: so they are read as the first
                # exchange sends them, and need not be ordered once more.
                own_positions = own_positions[exchange.order]
                exchange = replace(exchange, order=None)
            exchanges.append(exchange)
            present = after
        is_complete = len(self.moved_axes) == len(self.expert_axes)
        return _Routes(own_positions, tuple(exchanges), is_complete)

    def counts(self, ids: torch.Tensor) -> torch.Tensor:
        """Number of rows of each of the rank's experts, shape [local experts]."""
        index = 0
        for axis in self.expert_axes:
            index = index * self.axis_sizes[axis] + self.coordinate[axis]
        flat = ids.reshape(-1)
        # Unlike torch.bincount, this needs no synchronisation with the host.
        every = flat.new_zeros(self.num_experts).index_add_(0, flat, torch.ones_like(flat))
        return every.narrow(0, index * self._experts_each, self._experts_each)

    @property
    def _experts_each(self) -> int:
        return self.num_experts // self._num_parts(self.expert_axes)

    def _num_parts(self, axes: Sequence[int]) -> int:
        # A list: `torch.compile` does not trace `prod` of a generator.
        return prod([self.axis_sizes[axis] for axis in axes])

    def _digits(self, numbers: torch.Tensor, axes: Sequence[int]) -> dict[int, torch.Tensor]:
        """Coordinates of shard indices on each axis; the last axis is the innermost."""
        digits = {}
        for axis in reversed(axes):
            digits[axis] = numbers % self.axis_sizes[axis]
            numbers = numbers // self.axis_sizes[axis]
        return digits

    def _here(self, location: Mapping[int, torch.Tensor]) -> torch.Tensor | slice:
        """Indices of the rows that are on this rank."""
        here = [location[axis] == self.coordinate[axis] for axis in self.expert_axes]
        return torch.stack(here).all(0).nonzero().squeeze(1) if here else slice(None)

    def _exchange(self, axis: int, targets: torch.Tensor, sources: torch.Tensor) -> _Exchange:
        num_ranks = self.axis_sizes[axis]
        sent, received = (
            torch.bincount(ranks, minlength=num_ranks).tolist() for ranks in (targets, sources)
        )
        order, arrival = (torch.sort(ranks, stable=True).indices for ranks in (targets, sources))
        return _Exchange(axis, sent, received, order, arrival)
