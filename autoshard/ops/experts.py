"""Mixtures of experts: rows of tokens ordered by expert (`autoshard.graph.experts`).

An axis has three ways to share the work. It may shard tokens: each rank has its tokens, their
ids, and their rows for all experts. It may shard experts: each rank takes the rows of its experts
out of replicated tokens, and returns a partial sum. Or tokens on one side and experts on the
other (expert parallelism): an all-to-all inside then sends rows to their experts, or back. Ids
are replicated in that case, and determine the destination of each row.
"""

from dataclasses import replace
from math import gcd

from autoshard.graph import DType, Tensor
from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.ops.rules.collectives import Reductions
from autoshard.ops.rules.index_space import IndexSpace
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import (
    Call,
    ExtraTensor,
    Gradients,
    Kernel,
    OperatorSpec,
    SavedByAutograd,
    like,
    saved_by_name,
)

_EXCHANGE = "move | move"


class _ExpertRows:
    """The letters of a call on rows ordered by expert.

    Args:
        call: the call, with an argument `ids`.
        ragged: its rows.

    Attributes:
        space: allocates the letters.
        experts: letters of groups of experts.
        ids: dims of the ids.
        rows: the first two dims of the rows, which share a letter for tokens with the ids.
    """

    def __init__(self, call: Call, ragged: Tensor) -> None:
        self.space = space = IndexSpace(call)
        num_tokens, slots = call.inputs[call.positions("ids")[0]].shape
        groups, share = ragged.shape[:2]
        common = gcd(num_tokens, share)
        self._tokens = space.in_order(space.free(common))
        self._num_tokens = num_tokens
        self.experts = space.in_order(space.free(groups))
        self.ids: Dims = (
            (*self._tokens, *space.fixed(num_tokens // common)),
            space.fixed(slots),
        )
        self.rows: Dims = (self.experts, (*self._tokens, *space.fixed(share // common)))

    def whole_tokens(self) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """The letters of tokens other than ids, and the letters that are sharded together."""
        space = self.space
        new = space.free if self.experts else space.fixed
        tokens = space.in_order(new(self._num_tokens))
        follows = {self._tokens[0]: tokens} if self._tokens else {}
        return tokens, follows | ({tokens[0]: self.experts} if tokens else {})

    def exchange(
        self, tokens: tuple[str, ...], width: tuple[str, ...], itemsize: int
    ) -> Reductions:
        """The all-to-all if tokens are sharded on one side and experts on the other."""
        per = (*self.experts, *self.rows[1], *width)
        return Reductions.of(_EXCHANGE, over=tokens, per=per, itemsize=itemsize)


def _dispatch(call: Call) -> OperatorRule:
    """tokens[t, d], ids[t, s] -> rows[a, b, d]."""
    made = call.outputs[0]
    at = _ExpertRows(call, made)
    tokens, follows = at.whole_tokens()
    width = at.space.free(made.shape[2])
    rule = at.space.rule(
        [(tokens, width), at.ids],
        [(*at.rows, width)],
        linear=[{0}],
        reduced=at.exchange(tokens, width, made.dtype.itemsize),
    )
    return replace(rule, follows=follows, uneven=frozenset())


def _combine(call: Call) -> OperatorRule:
    """rows[a, b, d], ids[t, s], weights[t, s] -> [t, d], for each token a sum over its slots."""
    rows = call.inputs[0]
    at = _ExpertRows(call, rows)
    tokens, follows = at.whole_tokens()
    width = at.space.free(rows.shape[2])
    rule = at.space.rule(
        [(*at.rows, width), at.ids, (tokens, at.ids[1])],
        [(tokens, width)],
        contracted=at.experts,
        linear=[{0}, {2}],
        reduced=at.exchange(tokens, width, rows.dtype.itemsize),
    )
    return replace(rule, follows=follows, uneven=frozenset())


def _grouped_mm(call: Call) -> OperatorRule:
    """rows[a, b, k], matrices[(a m), k, n], ids[t, s] -> [a, b, n]; a row meets one matrix."""
    rows, matrices = call.inputs[:2]
    at = _ExpertRows(call, rows)
    summed, made = (at.space.free(size) for size in matrices.shape[1:])
    members = at.space.fixed(matrices.shape[0] // rows.shape[0])
    rule = at.space.rule(
        [(*at.rows, summed), ((*at.experts, *members), summed, made), at.ids],
        [(*at.rows, made)],
        contracted=summed,
        linear=[{0}, {1}],
        flops=2.0 * rows.numel * matrices.shape[2],
    )
    return replace(rule, uneven=frozenset())


def _expert_bias(call: Call) -> OperatorRule:
    """bias[(a m), n], ids[t, s] -> [a, b, n]."""
    bias, made = call.inputs[0], call.outputs[0]
    at = _ExpertRows(call, made)
    members = at.space.fixed(bias.shape[0] // made.shape[0])
    width = at.space.free(made.shape[2])
    rule = at.space.rule(
        [((*at.experts, *members), width), at.ids], [(*at.rows, width)], linear=[{0}]
    )
    return replace(rule, uneven=frozenset())


def _row_indices(ids: int) -> ExtraTensor:
    """An index for each row; `ids` counts inputs, then outputs."""
    return ExtraTensor(((ids, 0), (ids, 1)), DType.INT64.itemsize)


def _dispatch_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    return saved_by_name("", call, gradients, _row_indices(len(call.inputs)))


def _combine_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """Rows are saved in the order of their tokens."""
    rows = (like(call, 0, call.inputs[0].dtype.itemsize),) if gradients[2] else ()
    return saved_by_name("weights:rows", call, gradients, _row_indices(0), *rows)


def _combine_workspace(call: Call, gradients: Gradients) -> tuple[ExtraTensor, ...]:
    """The gradient of the sum for each row, and its product with rows or weights."""
    itemsize = call.outputs[0].dtype.itemsize
    return (like(call, 0, itemsize, times=2),) if any(gradients) else ()


SPECS = (
    OperatorSpec(
        DISPATCH,
        _dispatch,
        saves=_dispatch_saves,
        kernel=Kernel.ROUTED,
        examples="""
            tokens[tokens,d] ids:int64[tokens,slots] num_experts=experts \
                -> [experts,share,d]
        """,
    ),
    OperatorSpec(
        GROUPED_MM,
        _grouped_mm,
        saves="rows:matrices matrices:rows",
        kernel=Kernel.ROUTED,
        examples="""
            rows[experts,share,k] matrices[experts,k,n] ids:int64[tokens,slots] \
                -> [experts,share,n]
        """,
    ),
    OperatorSpec(
        EXPERT_BIAS,
        _expert_bias,
        saves=_dispatch_saves,
        kernel=Kernel.ROUTED,
        examples="bias[experts,n] ids:int64[tokens,slots] -> [experts,share,n]",
    ),
    OperatorSpec(
        COMBINE,
        _combine,
        saves=_combine_saves,
        backward_workspace=_combine_workspace,
        kernel=Kernel.ROUTED,
        examples="""
            rows[experts,share,d] ids:int64[tokens,slots] weights[tokens,slots] \
                num_experts=experts -> [tokens,d]
        """,
    ),
)
