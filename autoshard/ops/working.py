"""What backward of a call works on for its own use, beside what was kept for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoshard.graph import DType
from autoshard.graph.experts import COMBINE
from autoshard.ops.call import Call
from autoshard.ops.kept import Extra, like


def backward_working(call: Call, gradients: Sequence[bool]) -> tuple[Extra, ...]:
    """What backward of a call makes for its own use, beside the gradients that it hands on.

    Named are the operators where it is as large as the inputs: the gradient of the softmax of
    a loss, powers, products that broadcast, and what fused attention adds up in float32 and
    per query head.

    Args:
        call: the call.
        gradients: whether each input needs a gradient.
    """
    working = WORKING.get(call.operator)
    return () if working is None else working(call, gradients)


def _one_like_scores(call: Call, _: Sequence[bool]) -> tuple[Extra, ...]:
    return (like(call, 0, call.inputs[0].dtype.itemsize),)


def _two_like_base(call: Call, _: Sequence[bool]) -> tuple[Extra, ...]:
    return (replace(like(call, 0, call.inputs[0].dtype.itemsize), times=2),)


def _before_summing(call: Call, gradients: Sequence[bool]) -> tuple[Extra, ...]:
    """The gradient of what was broadcast, before it is summed."""
    output = call.outputs[0]
    broadcast = any(
        needed and tensor.shape != output.shape
        for tensor, needed in zip(call.inputs, gradients, strict=True)
    )
    return (like(call, len(call.inputs), output.dtype.itemsize),) if broadcast else ()


def _attention_sums(call: Call, _: Sequence[bool]) -> tuple[Extra, ...]:
    """Dao 2023, algorithm 2: the gradient of the queries is added up in float32.

    Gradients of grouped keys and values are made per query head, and summed.
    """
    query, key = call.inputs[:2]
    sums = [like(call, 0, DType.FLOAT32.itemsize)]
    if call.flag("enable_gqa"):
        ratio = query.shape[-3] // key.shape[-3]
        sums.extend(replace(like(call, i, key.dtype.itemsize), times=ratio) for i in (1, 2))
    return tuple(sums)


def _gradients_of_rows(call: Call, gradients: Sequence[bool]) -> tuple[Extra, ...]:
    """The gradient of the sum for each row, and its product with rows or weights."""
    each = like(call, 0, call.outputs[0].dtype.itemsize)
    return (replace(each, times=2),) if any(gradients) else ()


WORKING: Mapping[str, Callable[[Call, Sequence[bool]], tuple[Extra, ...]]] = {
    "aten.cross_entropy_loss.default": _one_like_scores,
    COMBINE: _gradients_of_rows,
    "aten.pow.Tensor_Scalar": _two_like_base,
    "aten.mul.Tensor": _before_summing,
    "aten.div.Tensor": _before_summing,
    "aten.scaled_dot_product_attention.default": _attention_sums,
}
"""Working memory of backward by operator."""
