"""Attention with sharded keys and values: each rank attends to its own keys.

Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867: a softmax
over all keys can be computed from the largest score and the sum of exponentials of each shard.
Ranks reduce these and the weighted sums of values. Backward needs no communication, since the
result and its gradient are replicated (Dao 2023, "FlashAttention-2", algorithm 2).

Scores are computed for one block of queries at a time, and recomputed in backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.runtime.program.sharded_kernels.base import (
    Gradients,
    ShardedKernel,
    Statistics,
    widened,
)

SCORES_AT_ONCE = 1 << 24
"""Maximum number of scores of a block of several queries."""


def bind_attention(local: LocalNode) -> LocalKernel | None:
    """Bind scaled_dot_product_attention; None if keys are not sharded."""
    rows, columns = (len(shape) - 2 for shape in local.input_shapes[:2])
    statistics = Statistics(local.place.ranks, local.axes_sharding((columns,), 1))
    if not statistics.axes:
        return None
    scale = local.node.argument("scale")
    assert scale is None or isinstance(scale, (int, float))
    attention = _Attention(
        scale=local.input_shapes[0][-1] ** -0.5 if scale is None else scale,
        lead=local.start(rows) - local.start(columns, 1),
        is_causal=bool(local.node.argument("is_causal")),
        statistics=statistics,
    )
    num_inner = 3 if local.node.argument("enable_gqa") else 2

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        heads, mask = tensors[:3], tensors[3] if len(tensors) > 3 else None  # noqa: PLR2004  a mask
        outer = torch.broadcast_shapes(*(tensor.shape[:-num_inner] for tensor in heads))  # type: ignore[no-untyped-call]  # torch
        heads = [tensor.expand(*outer, *tensor.shape[-num_inner:]) for tensor in heads]
        return (attention(*heads, mask),)

    return run


@dataclass(frozen=True, slots=True)
class _AttentionBlock:
    """A block of queries and the keys visible to them, as slices of the rank's shards."""

    rows: slice
    columns: slice

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block of a mask or of another tensor that broadcasts to the scores."""
        rows, columns = (
            slice(None) if size == 1 else part
            for size, part in zip(tensor.shape[-2:], (self.rows, self.columns), strict=True)
        )
        return tensor[..., rows, columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention(ShardedKernel):
    """Attention to a shard of the keys.

    Attributes:
        scale: factor of the scores.
        lead: global position of the rank's first query minus that of its first key.
        is_causal: True if a query attends only to keys up to its own position.
        statistics: reduces over the ranks with the other keys.
    """

    scale: float
    lead: int
    is_causal: bool
    statistics: Statistics

    def blocks(self, query: torch.Tensor, key: torch.Tensor) -> Iterator[_AttentionBlock]:
        """Blocks of the queries that attend to at least one of the rank's keys."""
        num_rows, num_columns = query.shape[-2], key.shape[-2]
        per_row = query.shape[:-2].numel() * num_columns
        length = max(SCORES_AT_ONCE // max(per_row, 1), 1)
        for first in range(0, num_rows, length):
            end = min(first + length, num_rows)
            seen = min(num_columns, end + self.lead) if self.is_causal else num_columns
            if seen > 0:
                yield _AttentionBlock(slice(first, end), slice(0, seen))

    def scores(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        block: _AttentionBlock,
    ) -> torch.Tensor:
        """Scores of a block, in at least float32, -inf for masked keys."""
        queries = query[..., block.rows, :]
        products = _grouped(queries, key) @ key[..., block.columns, :].mT
        scores = widened(products).mul_(self.scale).view(*queries.shape[:-1], -1)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~block.of(mask), -torch.inf)
        elif mask is not None:
            scores.add_(block.of(mask))
        if self.is_causal and block.rows.start + self.lead < block.columns.stop - 1:
            rows = torch.arange(block.rows.start, block.rows.stop, device=key.device)
            columns = torch.arange(block.columns.stop, device=key.device)
            scores.masked_fill_(rows.unsqueeze(-1) + self.lead < columns, -torch.inf)
        return scores

    def forward(
        self,
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention, and save the log-sum-exp of each row."""
        rows = query.shape[:-1]
        wide = widened(query[:0]).dtype
        largest = query.new_full((*rows, 1), -torch.inf, dtype=wide)
        # One more column for the sums of exponentials, so that one collective reduces both.
        sums = query.new_zeros((*rows, value.shape[-1] + 1), dtype=wide)
        for block in self.blocks(query, key):
            weights = self.scores(query, key, mask, block)
            top = largest[..., block.rows, :].copy_(weights.amax(-1, keepdim=True))
            weights.sub_(_finite(top)).exp_()
            made = _grouped(weights.to(value.dtype), key) @ value[..., block.columns, :]
            into = sums[..., block.rows, :]
            into[..., :-1] = made.view(*weights.shape[:-1], -1)
            into[..., -1] = weights.sum(-1)
        # Exponentials are relative to the maximum of this shard, and are rescaled to that of all
        # (Milakov and Gimelshein). A copy is reduced, since that is in place.
        shift = _finite(self.statistics.largest(largest.clone()))
        sums = self.statistics.total(sums.mul_(largest.sub_(shift).exp_()))
        total = sums[..., -1:]
        result = (sums[..., :-1] / total).masked_fill_(total == 0, 0).to(query.dtype)
        logarithms = shift.add_(_finite(total.log()))
        ctx.save_for_backward(query, key, value, mask, result, logarithms)
        return result

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        """Recompute the scores of each block, and their gradients."""
        query, key, value, mask, result, logarithms = ctx.saved_tensors
        # The gradient of a softmax needs the sum over all keys of weights times their gradients. It
        # equals this product, which every rank has, so that no collective is needed.
        inner = widened(gradient * result).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query)
        of_key, of_value = (torch.zeros_like(t, dtype=inner.dtype) for t in (key, value))
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for block in self.blocks(query, key):
            weights = self.scores(query, key, mask, block)
            weights.sub_(logarithms[..., block.rows, :]).exp_()
            given = _grouped(gradient[..., block.rows, :], key)
            seen = value[..., block.columns, :]
            of_value[..., block.columns, :] += _grouped(weights.to(value.dtype), key).mT @ given
            of_scores = widened(given @ seen.mT).view_as(weights)
            of_scores.sub_(inner[..., block.rows, :]).mul_(weights)
            if of_mask is not None:
                part = block.of(of_mask)
                part += of_scores.sum_to_size(part.shape)
            slopes = _grouped(of_scores.mul_(self.scale).to(query.dtype), key)
            made = slopes @ key[..., block.columns, :]
            of_query[..., block.rows, :] = made.view(*weights.shape[:-1], -1)
            of_key[..., block.columns, :] += slopes.mT @ _grouped(query[..., block.rows, :], key)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_mask


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Stack the query heads that share a key head along the rows of that head."""
    return tensor.reshape(*key.shape[:-2], -1, tensor.shape[-1])


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Replace infinite values by 0, so that nothing is subtracted in fully masked rows."""
    return tensor.masked_fill(tensor.isinf(), 0)
