"""Losses: one term per position, then a sum."""

from collections.abc import Mapping
from itertools import chain

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import Space, broadcast, replicated

MEAN, SUM = 1, 2
"""Values of `reduction`; 0 keeps every term."""


def _classification(call: Call) -> OperatorRule:
    """scores[n,c,*], target[n,*] or [n,c,*], weight[c]: whole in c, a term per position.

    The mean divides by what the targets count, so it does not follow from means of slices.
    """
    reduction = call.integer("reduction", MEAN)
    if reduction == MEAN:
        return replicated(call)
    scores, target = call.inputs[:2]
    classes = 1 if len(scores.shape) > 1 else 0
    space = Space(call)
    dims = space.free_dims(scores.shape, fixed={classes})
    positions = dims[:classes] + dims[classes + 1 :]
    target_dims = dims if target.dtype.is_differentiable else positions
    inputs = [dims, target_dims, *[(dims[classes],) for _ in call.inputs[2:]]]
    if reduction == SUM:
        return space.rule(inputs, [()], contracted=chain(*positions))
    return space.rule(inputs, [positions])


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
