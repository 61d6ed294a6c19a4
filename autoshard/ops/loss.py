"""Losses: one term per position, then a sum.

Classes may be cut: ranks then exchange some numbers per position instead of all scores.
"""

from collections.abc import Mapping
from itertools import chain

from autoshard.ops.call import Call, Rule
from autoshard.ops.reduction import NO_REDUCTIONS, Reductions, statistic_bytes
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Space, broadcast, replicated

MEAN = 1
"""Value of `reduction`; 2 sums, 0 keeps every term."""


def _classification(call: Call) -> OperatorRule:
    """scores[n,c,*], target[n,*] or [n,c,*], weight[c]: a term per position.

    Per position ranks share the largest score, the sum of exponentials and what the target
    picks; with weights of classes, or probabilities, also the sum of what picks.

    A mean over labels divides by what they count, so it does not follow from means of
    slices; one over probabilities divides by the positions (`Kernel.CLASSES`).
    """
    reduction = call.integer("reduction", MEAN)
    target = call.inputs[1]
    of_labels = not target.dtype.is_differentiable
    if reduction == MEAN and of_labels:
        return replicated(call)
    space = Space(call)
    inputs, classes, positions = _terms(call, space)
    smooth = call.number("label_smoothing", 0.0)
    linear = [] if of_labels or smooth else [{1}]
    is_counted = of_labels and len(call.inputs) == 2  # noqa: PLR2004  scores and labels
    per = tuple(chain(*positions))
    return space.rule(
        inputs,
        [() if reduction else positions],
        contracted=per if reduction else (),
        linear=linear,
        reduced=Reductions.of(
            "max sum*2" if is_counted else "max sum*3",
            over=classes,
            per=per,
            itemsize=statistic_bytes(call.inputs[0]),
        ),
    )


def _of_labels(call: Call) -> OperatorRule:
    """Logarithms picked by labels: a rank picks those of its slice of the classes.

    A mean divides by what all labels count, which ranks add up.
    """
    reduction = call.integer("reduction", MEAN)
    space = Space(call)
    inputs, classes, positions = _terms(call, space)
    per = tuple(chain(*positions))
    is_weighted = len(call.inputs) > 2  # noqa: PLR2004  logarithms and labels
    count = Reductions.of(
        "sum",
        over=(*per, *(classes if is_weighted else ())),
        per=(),
        itemsize=statistic_bytes(call.inputs[0]),
    )
    return space.rule(
        inputs,
        [() if reduction else positions],
        contracted=(*classes, *(per if reduction else ())),
        reduced=count if reduction == MEAN else NO_REDUCTIONS,
    )


def _terms(call: Call, space: Space) -> tuple[list[Dims], tuple[str, ...], Dims]:
    """Dims of the inputs of a loss over classes, the letters of the classes, the positions."""
    scores, target = call.inputs[:2]
    at = 1 if len(scores.shape) > 1 else 0
    dims = space.free_dims(scores.shape)
    space.in_order(dims[at])  # labels count classes from the start of the whole
    positions = dims[:at] + dims[at + 1 :]
    target_dims = dims if target.dtype.is_differentiable else positions
    return [dims, target_dims, *[(dims[at],) for _ in call.inputs[2:]]], dims[at], positions


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
    "aten.nll_loss_nd.default": _of_labels,
    "aten.nll_loss.default": _of_labels,
    "aten.nll_loss2d.default": _of_labels,
    "aten.mse_loss.default": _elementwise,
    "aten.l1_loss.default": _elementwise,
    "aten.smooth_l1_loss.default": _elementwise,
    "aten.huber_loss.default": _elementwise,
    "aten.kl_div.default": _elementwise,
    "aten.soft_margin_loss.default": _elementwise,
    "aten.binary_cross_entropy.default": _elementwise,
    "aten.binary_cross_entropy_with_logits.default": _elementwise,
}
