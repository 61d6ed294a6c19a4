"""Scaled dot-product attention as one operator."""

from collections.abc import Mapping
from itertools import chain
from math import prod

from autoshard.ops.call import Call, Rule
from autoshard.ops.reduction import Reductions, statistic_bytes
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Space, broadcast

_PASSES = 10
"""How often scores are read or written where keys are cut: a product writes them, two passes
find the largest and the sum, three change them, and a product reads them."""


def _attention(call: Call) -> OperatorRule:
    """query[*,h,l,d], key[*,h,s,d], value[*,h,s,e] -> [*,h,l,e], mask broadcast to [*,h,l,s].

    Batch and heads are independent, and so are queries; where `is_causal` derives the mask
    from a query's place, a rank is told the place of its own (`Kernel.ATTENTION`). A softmax
    runs over s: where keys are cut, ranks share per query the largest score, then the sum of
    exponentials with the sum of values that these weigh. Scores are summed over d before that;
    cutting e would repeat them on every rank and is not offered. With grouped queries a query
    head is (group, member), and keys and values have the groups alone.

    The flops are 2 b h l s (d + e), forward; a causal kernel computes those scores only that
    its queries see.
    """
    query, key, value = (tensor.shape for tensor in call.inputs[:3])
    space = Space(call)
    causal = call.flag("is_causal")
    # Ranks would have to drop the same weights out of other slices than the whole program does.
    is_cuttable = call.number("dropout_p", 0.0) == 0
    sequence = (space.free if is_cuttable else space.fixed)(key[-2])
    depth, value_depth = space.fixed(key[-1]), space.fixed(value[-1])
    # Queries behind the last key would see all keys, as no slice of keys says.
    ordered = not causal or query[-2] <= key[-2]
    rows = space.in_order((space.free if ordered else space.fixed)(query[-2]))
    if causal:
        space.in_order(sequence)
    queries, keys = _leading(space, call)
    inputs = [
        (*broadcast(queries, query[:-2]), rows, depth),
        (*broadcast(keys, key[:-2]), sequence, depth),
        (*broadcast(keys, value[:-2]), sequence, value_depth),
    ]
    scores = (*queries, rows, sequence)
    inputs.extend(broadcast(scores, mask.shape) for mask in call.inputs[3:])
    number = statistic_bytes(call.inputs[0])
    return space.rule(
        inputs,
        [(*queries, rows, value_depth)],
        linear=[call.positions("value")],
        reduced=Reductions.of(
            f"max sum*{value[-1] + 1}",
            over=sequence if is_cuttable else (),
            per=chain(*queries, rows),
            itemsize=number,
            spilled=chain(*scores),
            spilled_bytes=_PASSES * number,
        ),
        causal=(rows, sequence) if causal else ((), ()),
        flops=2.0 * prod(call.outputs[0].shape[:-1]) * key[-2] * (key[-1] + value[-1]),
    )


def _leading(space: Space, call: Call) -> tuple[Dims, Dims]:
    """Letters of the batch and head dims of the queries, and of the keys and values."""
    *batch, _, _ = call.outputs[0].shape
    if not call.flag("enable_gqa"):
        dims = space.free_dims(batch)
        return dims, dims
    *batch, heads = batch
    groups = call.inputs[1].shape[-3]
    outer = space.free_dims(batch)
    group, member = space.free(groups), space.free(heads // groups)
    return (*outer, (*group, *member)), (*outer, group)


RULES: Mapping[str, Rule] = {
    "aten.scaled_dot_product_attention.default": _attention,
}
