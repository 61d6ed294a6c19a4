"""Losses: one term per position, then a sum."""

from collections.abc import Mapping
from itertools import chain

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import Space, broadcast, replicated

MEAN = 1
"""Value of `reduction`; 2 sums, 0 keeps every term."""


def _classification(call: Call) -> OperatorRule:
    """scores[n,c,*], target[n,*] or [n,c,*], weight[c]: whole in c, a term per position.

    A mean over labels divides by what they count, so it does not follow from means of
    slices; one over probabilities divides by the positions (`Kernel.SCALED`).
    """
    reduction = call.integer("reduction", MEAN)
    scores, target = call.inputs[:2]
    if reduction == MEAN and not target.dtype.is_differentiable:
        return replicated(call)
    classes = 1 if len(scores.shape) > 1 else 0
    space = Space(call)
    dims = space.free_dims(scores.shape, fixed={classes})
    positions = dims[:classes] + dims[classes + 1 :]
    target_dims = dims if target.dtype.is_differentiable else positions
    inputs = [dims, target_dims, *[(dims[classes],) for _ in call.inputs[2:]]]
    smooth = call.number("label_smoothing", 0.0)
    linear = [{1}] if target.dtype.is_differentiable and not smooth else []
    if reduction:
        return space.rule(inputs, [()], contracted=chain(*positions), linear=linear)
    return space.rule(inputs, [positions], linear=linear)


def _elementwise(call: Call) -> OperatorRule:
    """A term per element, all inputs broadcast; a mean is scaled (`Kernel.SCALED`)."""
    shapes = [tensor.shape for tensor in call.inputs]
    rank = max(len(shape) for shape in shapes)
    shape = [max(s[i - rank] for s in shapes if len(s) >= rank - i) for i in range(rank)]
    space = Space(call)
    dims = space.free_dims(shape)
    inputs = [broadcast(dims, s) for s in shapes]
    if call.integer("reduction", MEAN):
        return space.rule(inputs, [()], contracted=chain(*dims))
    return space.rule(inputs, [dims])


RULES: Mapping[str, Rule] = {
    "aten.cross_entropy_loss.default": _classification,
    "aten.nll_loss_nd.default": _classification,
    "aten.nll_loss.default": _classification,
    "aten.nll_loss2d.default": _classification,
    "aten.mse_loss.default": _elementwise,
    "aten.l1_loss.default": _elementwise,
    "aten.smooth_l1_loss.default": _elementwise,
    "aten.huber_loss.default": _elementwise,
    "aten.kl_div.default": _elementwise,
    "aten.soft_margin_loss.default": _elementwise,
    "aten.binary_cross_entropy.default": _elementwise,
    "aten.binary_cross_entropy_with_logits.default": _elementwise,
}
