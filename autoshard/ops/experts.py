"""Mixtures of experts: rows of tokens ordered by expert (`autoshard.graph.experts`).

An axis has three ways to share the work. It may cut tokens: each rank has its tokens, their ids,
and their rows for all experts. It may cut experts: each rank takes the rows of its experts out of
whole tokens, and what it gives back is part of a sum. Or tokens on the one side and experts on
the other: an all-to-all inside then brings rows to their experts, or back. Ids are whole in that
case, which is little, and from them follows which rows go where.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from autoshard.graph import Tensor
from autoshard.graph.experts import COMBINE, DISPATCH, EXPERT_BIAS, GROUPED_MM
from autoshard.ops.call import Call, Rule
from autoshard.ops.reduction import Reductions
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Space

_EXCHANGE = "move | move"


class _Rows:
    """The letters of a call on rows.

    Args:
        call: the call, with an argument `ids`.
        ragged: its rows.

    Attributes:
        space: where they are from.
        experts: groups of experts.
        ids: dims of the ids.
        rows: the first two dims of rows; ids and rows have a letter for tokens in common.
    """

    def __init__(self, call: Call, ragged: Tensor) -> None:
        self.space = space = Space(call)
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
        """The letters of tokens that are no ids, and which letters are cut along with which."""
        space = self.space
        new = space.free if self.experts else space.fixed
        tokens = space.in_order(new(self._num_tokens))
        follows = {self._tokens[0]: tokens} if self._tokens else {}
        return tokens, follows | ({tokens[0]: self.experts} if tokens else {})

    def exchange(
        self, tokens: tuple[str, ...], width: tuple[str, ...], itemsize: int
    ) -> Reductions:
        """The all-to-all where tokens are cut on one side and experts on the other."""
        per = (*self.experts, *self.rows[1], *width)
        return Reductions.of(_EXCHANGE, over=tokens, per=per, itemsize=itemsize)


def _dispatch(call: Call) -> OperatorRule:
    """tokens[t, d], ids[t, s] -> rows[a, b, d]."""
    made = call.outputs[0]
    at = _Rows(call, made)
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
    at = _Rows(call, rows)
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
    at = _Rows(call, rows)
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
    at = _Rows(call, made)
    members = at.space.fixed(bias.shape[0] // made.shape[0])
    width = at.space.free(made.shape[2])
    rule = at.space.rule(
        [((*at.experts, *members), width), at.ids], [(*at.rows, width)], linear=[{0}]
    )
    return replace(rule, uneven=frozenset())


RULES: Mapping[str, Rule] = {
    DISPATCH: _dispatch,
    GROUPED_MM: _grouped_mm,
    EXPERT_BIAS: _expert_bias,
    COMBINE: _combine,
}
