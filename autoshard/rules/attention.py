"""Scaled dot-product attention as one operator."""

from collections.abc import Mapping
from math import prod

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import Dims, OperatorRule
from autoshard.rules.space import Space, broadcast


def _attention(call: Call) -> OperatorRule:
    """query[*,h,l,d], key[*,h,s,d], value[*,h,s,e] -> [*,h,l,e], mask broadcast to [*,h,l,s].

    Batch and heads are independent, and so are queries; where `is_causal` derives the mask
    from a query's place, a rank is told the place of its own (`Kernel.CAUSAL`). A softmax runs
    over s, scores are summed over d before it; cutting e would repeat the scores on every rank
    and is not offered. With grouped queries a query head is (group, member), and keys and values
    have the groups alone.

    The flops are 2 b h l s (d + e), forward.
    """
    query, key, value = (tensor.shape for tensor in call.inputs[:3])
    space = Space(call)
    sequence, depth = space.fixed(key[-2]), space.fixed(key[-1])
    value_depth = space.fixed(value[-1])
    # Queries behind the last key would see all keys, as no slice of keys says.
    ordered = not call.flag("is_causal") or query[-2] <= key[-2]
    rows = space.in_order((space.free if ordered else space.fixed)(query[-2]))
    queries, keys = _leading(space, call)
    inputs = [
        (*broadcast(queries, query[:-2]), rows, depth),
        (*broadcast(keys, key[:-2]), sequence, depth),
        (*broadcast(keys, value[:-2]), sequence, value_depth),
    ]
    scores = (*queries, rows, sequence)
    inputs.extend(broadcast(scores, mask.shape) for mask in call.inputs[3:])
    return space.rule(
        inputs,
        [(*queries, rows, value_depth)],
        linear=[call.positions("value")],
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
