"""Scaled dot-product attention as one operator."""

from itertools import chain
from math import prod

from autoshard.graph import DType
from autoshard.ops.rules.collectives import Reductions, statistic_bytes
from autoshard.ops.rules.index_space import IndexSpace, broadcast, replicated
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
    statistic,
)

_PASSES = 10
"""Reads and writes of the scores if keys are sharded: a product writes them, two passes compute
the maximum and the sum, three transform them, and a product reads them."""


def _attention(call: Call) -> OperatorRule:
    """query[*,h,l,d], key[*,h,s,d], value[*,h,s,e] -> [*,h,l,e], mask broadcast to [*,h,l,s].

    Batch, heads and queries are independent; with `is_causal` a rank needs the global position
    of its queries (`Kernel.ATTENTION`). If keys are sharded, ranks combine per query the maximal
    score, then the sum of exponentials with the values that they weigh. Scores are summed over d
    before that; sharding e would repeat them on every rank and is not offered. With grouped
    queries a query head is (group, member), and keys and values have the groups alone.

    The flops are 2 b h l s (d + e), forward; a causal kernel computes only those scores that
    its queries see.
    """
    query, key, value = (tensor.shape for tensor in call.inputs[:3])
    space = IndexSpace(call)
    causal = call.flag("is_causal")
    # With dropout, ranks would have to draw the mask of the global scores.
    drops = call.number("dropout_p", 0.0) != 0
    sequence = (space.fixed if drops else space.free)(key[-2])
    depth, value_depth = space.fixed(key[-1]), space.fixed(value[-1])
    # Queries after the last key see all keys, which a shard of the keys cannot know.
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
            over=() if drops else sequence,
            per=chain(*queries, rows),
            itemsize=number,
            spilled=chain(*scores),
            spilled_bytes=_PASSES * number,
        ),
        causal=(rows, sequence) if causal else ((), ()),
        flops=2.0 * prod(call.outputs[0].shape[:-1]) * key[-2] * (key[-1] + value[-1]),
    )


def _leading(space: IndexSpace, call: Call) -> tuple[Dims, Dims]:
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


def _saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """Also a log-sum-exp per query; a boolean mask is converted to one that is added."""
    rank = len(call.inputs[0].shape)
    extras = [statistic(call, range(rank - 1))]
    names = "query key value out"
    mask = call.tensor("attn_mask")
    if mask is not None and mask.dtype.is_differentiable:
        names += " attn_mask"
    elif mask is not None:
        extras.append(like(call, 3, call.inputs[0].dtype.itemsize))
    return saved_by_name(names, call, gradients, *extras)


def _workspace(call: Call, _: Gradients) -> tuple[ExtraTensor, ...]:
    """Dao 2023, algorithm 2: the gradient of the queries is accumulated in float32.

    Gradients of grouped keys and values are made per query head, and summed.
    """
    query, key = call.inputs[:2]
    sums = [like(call, 0, DType.FLOAT32.itemsize)]
    if call.flag("enable_gqa"):
        ratio = query.shape[-3] // key.shape[-3]
        sums.extend(like(call, i, key.dtype.itemsize, times=ratio) for i in (1, 2))
    return tuple(sums)


SPECS = (
    OperatorSpec(
        "scaled_dot_product_attention.default",
        _attention,
        saves=_saves,
        backward_workspace=_workspace,
        keeps_memory_order=True,
        kernel=Kernel.ATTENTION,
        kernel_argument="is_causal",
        draws="dropout_p",
        unsharded="Keys, with dropout of the scores.",
        examples="""
            query[b,h,s,d] key[b,h,t,d] value[b,h,t,d] attn_mask:bool[b,1,s,t] -> [b,h,s,d]
            query[b,(g m),s,d] key[b,g,s,d] value[b,g,s,d] is_causal=True \
                enable_gqa=True -> [b,(g m),s,d]
        """,
    ),
    # The fused kernels themselves, which exports hardly contain.
    OperatorSpec(
        "_scaled_dot_product_flash_attention",
        replicated,
        saves="query key value out out1",
        draws="",
    ),
    OperatorSpec(
        "_scaled_dot_product_flash_attention_for_cpu",
        replicated,
        saves="query key value attn_mask out out1",
        draws="",
    ),
    OperatorSpec(
        "_scaled_dot_product_efficient_attention",
        replicated,
        saves="query key value attn_bias out out1",
        draws="",
    ),
)
