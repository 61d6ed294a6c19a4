"""Losses: one term per position, then a sum or mean.

Classes may be sharded (vocabulary parallel): ranks then exchange some numbers per position instead
of all scores.
"""

from itertools import chain

from autoshard.ops.rules.collectives import NO_REDUCTIONS, Reductions, statistic_bytes
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

_MEAN = 1
"""Value of `reduction`, as in `at::Reduction`; 2 is a sum, 0 no reduction."""


def _classification(call: Call) -> OperatorRule:
    """scores[n,c,*], target[n,*] or [n,c,*], weight[c]: a term per position.

    Per position ranks combine the maximal score, the sum of exponentials and the target's score;
    with class weights or probabilities also the sum of the target's weights.

    A mean over labels divides by the sum of their weights, so it does not follow from means of
    shards; a mean over probabilities divides by the number of positions (`Kernel.CLASSES`).
    """
    reduction = call.integer("reduction", _MEAN)
    target = call.inputs[1]
    of_labels = not target.dtype.is_differentiable
    if reduction == _MEAN and of_labels:
        return replicated(call)
    space = IndexSpace(call)
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
    """Log-probabilities selected by labels: a rank selects those of its shard of the classes.

    A mean divides by the sum of all labels' weights, which ranks all-reduce.
    """
    reduction = call.integer("reduction", _MEAN)
    space = IndexSpace(call)
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
        reduced=count if reduction == _MEAN else NO_REDUCTIONS,
    )


def _terms(call: Call, space: IndexSpace) -> tuple[list[Dims], tuple[str, ...], Dims]:
    """Dims of the inputs of a loss over classes, the letters of the classes, the positions."""
    scores, target = call.inputs[:2]
    at = 1 if len(scores.shape) > 1 else 0
    dims = space.free_dims(scores.shape)
    space.in_order(dims[at])  # labels are global class indices
    positions = dims[:at] + dims[at + 1 :]
    target_dims = dims if target.dtype.is_differentiable else positions
    return [dims, target_dims, *[(dims[at],) for _ in call.inputs[2:]]], dims[at], positions


def _elementwise(call: Call) -> OperatorRule:
    """A term per element, all inputs broadcast; a mean is scaled (`Kernel.SCALED`)."""
    shapes = [tensor.shape for tensor in call.inputs]
    rank = max(len(shape) for shape in shapes)
    shape = [max(s[i - rank] for s in shapes if len(s) >= rank - i) for i in range(rank)]
    space = IndexSpace(call)
    dims = space.free_dims(shape)
    inputs = [broadcast(dims, s) for s in shapes]
    if call.integer("reduction", _MEAN):
        return space.rule(inputs, [()], contracted=chain(*dims))
    return space.rule(inputs, [dims])


def _cross_entropy_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """The log-softmax; label smoothing also saves a mask of the positions that count."""
    scores, target = call.inputs[:2]
    log_softmax = like(call, 0, scores.dtype.itemsize)
    if target.dtype.is_differentiable:
        return saved_by_name("target:self weight:self", call, gradients, log_softmax)
    masks = [like(call, 1, 1)] if call.number("label_smoothing", 0.0) else []
    return saved_by_name("target weight", call, gradients, log_softmax, *masks)


def _compiled_cross_entropy_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """The scores, and per position the maximal score and the sum of exponentials."""
    scores = call.inputs[0]
    classes = 1 if len(scores.shape) > 1 else 0
    positions = [dim for dim in range(len(scores.shape)) if dim != classes]
    statistics = statistic(call, positions, times=2)
    return saved_by_name("self target weight", call, gradients, statistics)


def _scores_gradient(call: Call, _: Gradients) -> tuple[ExtraTensor, ...]:
    """The gradient of the log-softmax."""
    return (like(call, 0, call.inputs[0].dtype.itemsize),)


def _l1_saves(call: Call, _: Gradients) -> SavedByAutograd:
    """The difference."""
    larger = int(call.inputs[1].numel > call.inputs[0].numel)
    return SavedByAutograd(extras=(like(call, larger, call.inputs[0].dtype.itemsize),))


def _kl_div_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    if not call.flag("log_target"):
        return saved_by_name("target self:target", call, gradients)
    # The exponential of the target, and for its gradient the difference of the two.
    times = 2 if any(gradients[i] for i in call.positions("target")) else 1
    return SavedByAutograd(extras=(like(call, 1, call.inputs[1].dtype.itemsize, times=times),))


SPECS = (
    OperatorSpec(
        "cross_entropy_loss.default",
        _classification,
        saves=_cross_entropy_saves,
        backward_workspace=_scores_gradient,
        compiled_saves=_compiled_cross_entropy_saves,
        kernel=Kernel.CLASSES,
        kernel_argument="reduction",
        unsharded="Positions under a mean over labels, which divides by the sum of their weights. "
        "Such a loss is therefore planned as a sum divided by a count.",
        examples="""
            self[n,c] target:int64[n] reduction=2 -> []
            self[n,c] target[n,c] reduction=1 -> []
        """,
    ),
    OperatorSpec(
        "nll_loss_nd.default nll_loss.default nll_loss2d.default",
        _of_labels,
        saves="self target weight",
        kernel=Kernel.SHARDED_DIM,
        examples="self[n,c] target:int64[n] reduction=2 -> []",
    ),
    OperatorSpec(
        "mse_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default",
        _elementwise,
        saves="self target",
        kernel=Kernel.SCALED,
        kernel_argument="reduction",
        examples="self[n,h] target[n,h] -> []",
    ),
    OperatorSpec(
        "l1_loss.default",
        _elementwise,
        saves=_l1_saves,
        kernel=Kernel.SCALED,
        kernel_argument="reduction",
        examples="self[n,h] target[n,h] -> []",
    ),
    OperatorSpec(
        "kl_div.default",
        _elementwise,
        saves=_kl_div_saves,
        kernel=Kernel.SCALED,
        kernel_argument="reduction",
        examples="self[n,h] target[n,h] -> []",
    ),
    OperatorSpec(
        "binary_cross_entropy.default",
        _elementwise,
        saves="self target weight",
        kernel=Kernel.SCALED,
        kernel_argument="reduction",
        examples="self[n,h] target[n,h] -> []",
    ),
    OperatorSpec(
        "binary_cross_entropy_with_logits.default",
        _elementwise,
        saves="self target weight pos_weight",
        kernel=Kernel.SCALED,
        kernel_argument="reduction",
        examples="self[n,h] target[n,h] -> []",
    ),
)
