"""Convolutions and pooling: samples and channels may be cut, places may not."""

from collections.abc import Mapping
from functools import partial
from math import prod

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import Space


def _convolution(call: Call, *, transposed: bool = False) -> OperatorRule:
    """input[n,c,*], weight[o,c,*] or transposed [c,o,*], bias[o] -> [n,o,*], summed over c.

    Grouped channels stay whole, because the number of groups is an argument. The flops are
    two per sample, pair of channels, kernel element and place: of the output, or of the
    input when transposed.
    """
    image, weight = (tensor.shape for tensor in call.inputs[:2])
    result = call.outputs[0].shape
    batch = len(image) - (len(weight) - 1)
    space = Space(call)
    samples = space.free_dims(image[:batch])
    grouped = call.integer("groups", 1) != 1
    channel = space.fixed if grouped else space.free
    inner, outer = channel(image[batch]), channel(result[batch])
    weight_inner = space.fixed(weight[0 if transposed else 1]) if grouped else inner
    weight_outer = space.fixed(weight[1 if transposed else 0]) if grouped else outer
    pair = (weight_inner, weight_outer) if transposed else (weight_outer, weight_inner)
    biases = call.positions("bias")
    # whole letters that are in the index space beside those that the flops are counted over
    repeated = prod(result[batch + 1 :] if transposed else image[batch + 1 :])
    if grouped:
        repeated *= image[batch] * result[batch]
    return space.rule(
        [
            (*samples, inner, *space.fixed_dims(image[batch + 1 :])),
            (*pair, *space.fixed_dims(weight[2:])),
            *[(outer,) for _ in biases],
        ],
        [(*samples, outer, *space.fixed_dims(result[batch + 1 :]))],
        contracted=() if grouped else inner,
        linear=[{0, *biases}, {1, *biases}],
        addends=biases,
        flops_per_point=2.0 / max(repeated, 1),
    )


def _pool(call: Call, *, rank: int, linear: bool) -> OperatorRule:
    """Windows over the last `rank` dims; samples and channels are independent."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = Space(call)
    kept = space.free_dims(before[:-rank])
    return space.rule(
        [(*kept, *space.fixed_dims(before[-rank:]))],
        [(*kept, *space.fixed_dims(after[-rank:]))] * len(call.outputs),
        linear=[{0}] if linear else (),
    )


_transposed: Rule = partial(_convolution, transposed=True)

RULES: Mapping[str, Rule] = {
    "aten.conv1d.default": _convolution,
    "aten.conv2d": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.conv_transpose1d.default": _transposed,
    "aten.conv_transpose2d.input": _transposed,
    **{f"aten.max_pool{r}d.default": partial(_pool, rank=r, linear=False) for r in (1, 2, 3)},
    **{f"aten.avg_pool{r}d.default": partial(_pool, rank=r, linear=True) for r in (1, 2, 3)},
    **{
        f"aten.adaptive_avg_pool{r}d.default": partial(_pool, rank=r, linear=True)
        for r in (1, 2, 3)
    },
}
