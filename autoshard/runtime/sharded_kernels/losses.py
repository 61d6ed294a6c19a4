"""Losses over classes that are cut: no rank has all scores of a position.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: ranks exchange the largest score,
the sum of exponentials and the score of the label, one number per position each, instead of
the scores of all classes. Backward needs nothing from other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.graph import Argument
from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.operators import OperatorCall
from autoshard.runtime.sharded_kernels.softmax import sums_of_exponentials
from autoshard.runtime.sharded_kernels.statistics import Statistics, widened

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of `reduction`, as in `at::Reduction`."""
_IGNORED = -100
"""The default of `ignore_index`: no class has this number."""


def _classes_of(rank: int) -> int:
    """The dim of the classes in scores of this many dims."""
    return 1 if rank > 1 else 0


def bind_cross_entropy(local: LocalNode) -> LocalKernel | None:
    """A cross-entropy; None where its classes are whole."""
    dim = _classes_of(len(local.input_shapes[0]))
    statistics = Statistics.over(local, (dim,))
    if not statistics.axes:
        return None
    num_classes = local.input_shapes[0][dim]
    loss = _Loss(
        dim=dim,
        first=local.start(dim),
        num_classes=num_classes,
        num_all_classes=local.count((dim,)),
        reduction=_integer(local.node.argument("reduction", _MEAN)),
        ignored=_integer(local.node.argument("ignore_index", _IGNORED)),
        smoothing=_number(local.node.argument("label_smoothing", 0.0)),
        statistics=statistics,
    )

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        made = _CrossEntropy.apply(given["self"], given["target"], given.get("weight"), loss)  # type: ignore[no-untyped-call]  # torch
        return (made,)

    return run


def _integer(value: Argument) -> int:
    assert isinstance(value, int)
    return value


def _number(value: Argument) -> float:
    assert isinstance(value, (int, float))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """A cross-entropy over a slice of the classes.

    Attributes:
        dim: of the classes.
        first: number of the slice's first class.
        num_classes: in the slice.
        num_all_classes: in the whole.
        reduction: what is done with the losses of positions.
        ignored: the label of positions that do not count.
        smoothing: share of a label that all classes get alike.
        statistics: over the ranks that have the other classes.
    """

    dim: int
    first: int
    num_classes: int
    num_all_classes: int
    reduction: int
    ignored: int
    smoothing: float
    statistics: Statistics

    def probabilities(
        self, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """The weighted probability that the target gives to each class of the slice."""
        if target.is_floating_point():
            wanted = target * (1 - self.smoothing)
            wanted = wanted + self.smoothing / self.num_all_classes
        else:
            counts = (target != self.ignored).unsqueeze(self.dim)
            inside, places = self.places(target)
            wanted = torch.zeros_like(scores)
            wanted.scatter_(self.dim, places, inside.to(scores.dtype) * (1 - self.smoothing))
            wanted.add_(counts, alpha=self.smoothing / self.num_all_classes)
        return wanted if weight is None else wanted * self.along(weight, scores)

    def places(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether a label counts and is in the slice, and its place there, else 0."""
        labels = target.unsqueeze(self.dim)
        inside = (labels >= self.first) & (labels < self.first + self.num_classes)
        inside &= labels != self.ignored
        return inside, (labels - self.first).masked_fill_(~inside, 0)

    def along(self, weight: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Weights of classes in the shape in which they multiply scores."""
        return weight.view([-1 if d == self.dim else 1 for d in range(scores.ndim)])

    def picked(
        self, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the target makes of the scores of the slice, and of ones, per position."""
        if self.is_plain(target):
            inside, places = self.places(target)
            counts = self.weights(inside, places, weight, scores.dtype)
            return scores.gather(self.dim, places).masked_fill_(~inside, 0) * counts, counts
        wanted = self.probabilities(scores, target, weight)
        return (wanted * scores).sum(self.dim, keepdim=True), wanted.sum(self.dim, keepdim=True)

    def is_plain(self, target: torch.Tensor) -> bool:
        """Whether a position looks at one class only."""
        return not target.is_floating_point() and self.smoothing == 0

    def weights(
        self,
        inside: torch.Tensor,
        places: torch.Tensor,
        weight: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """What each position's label counts on this rank."""
        return inside.to(dtype) if weight is None else weight.to(dtype)[places] * inside

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss of a rank's positions."""
        if self.reduction == _NONE:
            return losses.squeeze(self.dim)
        return losses.sum() if self.reduction == _SUM else losses.mean()

    def spread(self, gradient: torch.Tensor, num_positions: int) -> torch.Tensor:
        """The gradient of each position's loss."""
        if self.reduction == _NONE:
            return gradient.unsqueeze(self.dim)
        return gradient if self.reduction == _SUM else gradient / num_positions


class _CrossEntropy(torch.autograd.Function):
    """Keeps logarithms of probabilities, as the operator does where classes are whole."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        loss: _Loss,
    ) -> torch.Tensor:
        wide = widened(scores)
        sums, shift = sums_of_exponentials(wide, (loss.dim,), loss.statistics)
        shifted = wide - shift
        picked, counts = loss.picked(shifted, target, weight)
        is_counted = weight is None and not target.is_floating_point()
        parts = [sums, picked] if is_counted else [sums, picked, counts]
        sums, picked, *rest = loss.statistics.total(torch.stack(parts))
        if is_counted:
            counts = (target != loss.ignored).unsqueeze(loss.dim).to(wide.dtype)
        else:
            (counts,) = rest
        sums.log_()
        losses = (sums * counts).masked_fill_(counts == 0, 0) - picked
        logarithms = shifted.sub_(sums).to(scores.dtype)
        ctx.save_for_backward(logarithms, target, weight, None if is_counted else counts)
        ctx.loss = loss
        return loss.reduced(losses).to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logarithms, target, weight, counts = ctx.saved_tensors
        loss: _Loss = ctx.loss
        if counts is None:
            counts = (target != loss.ignored).unsqueeze(loss.dim)
        each = loss.spread(gradient, counts.numel())
        of_scores = of_target = None
        if ctx.needs_input_grad[0]:
            of_scores = logarithms.exp().mul_(each * counts)
            if loss.is_plain(target):
                inside, places = loss.places(target)
                weights = loss.weights(inside, places, weight, logarithms.dtype)
                of_scores.scatter_add_(loss.dim, places, -each * weights)
            else:
                of_scores.sub_(each * loss.probabilities(logarithms, target, weight))
        if ctx.needs_input_grad[1]:
            of_target = logarithms * each * (loss.smoothing - 1)
            if weight is not None:
                of_target *= loss.along(weight, logarithms)
        return of_scores, of_target, None, None


def bind_labels(local: LocalNode) -> LocalKernel | None:
    """The losses of labels, given logarithms; None where neither classes nor a mean are cut.

    A rank adds up the labels in its slice of the classes. A mean divides by what all labels
    count: with weights of classes, each rank knows those of its slice.
    """
    scores = local.input_shapes[0]
    dim = _classes_of(len(scores))
    positions = tuple(d for d in range(len(scores)) if d != dim)
    is_mean = local.node.argument("reduction", _MEAN) == _MEAN
    is_weighted = len(local.inputs) > 2  # noqa: PLR2004  scores and target
    statistics = Statistics.over(local, (*positions, dim) if is_weighted else positions)
    if not local.axes_cutting((dim,)) and not (is_mean and statistics.axes):
        return None
    first, num_classes = local.start(dim), scores[dim]
    ignored = _integer(local.node.argument("ignore_index", _IGNORED))
    replaced: dict[str, Argument] = {"ignore_index": _IGNORED}
    if is_mean:
        replaced["reduction"] = _SUM
    call = OperatorCall(local.node, local.place.device, replaced=replaced)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        values, target, *weights = tensors
        counts = target != ignored
        inside = counts & (target >= first) & (target < first + num_classes)
        labels = (target - first).masked_fill(~inside, _IGNORED)
        (total,) = call((values, labels, *weights))
        if not is_mean:
            return (total,)
        if weights:
            counts = weights[0][labels.clamp_min(0)] * inside
        count = statistics.total(counts.sum(dtype=widened(values[:0]).dtype))
        return (total / count.to(total.dtype),)

    return run
