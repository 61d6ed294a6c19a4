"""Losses over a sharded class dim.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: instead of gathering the scores of all
classes, ranks reduce three numbers per position: the largest score, the sum of exponentials and
the score of the label. Backward needs no communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph import Argument
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.runtime.program.operators import OperatorCall
from autoshard.runtime.program.sharded_kernels.base import (
    Gradients,
    ShardedKernel,
    Statistics,
    widened,
)
from autoshard.runtime.program.sharded_kernels.reductions import sums_of_exponentials

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of `reduction`, as in `at::Reduction`."""
_IGNORED = -100
"""The default of `ignore_index`, which is not the index of a class."""


def _class_dim(rank: int) -> int:
    """The class dim of scores with this number of dims."""
    return 1 if rank > 1 else 0


def bind_cross_entropy(local: LocalNode) -> LocalKernel | None:
    """Bind cross_entropy_loss; None if its classes are not sharded."""
    dim = _class_dim(len(local.input_shapes[0]))
    statistics = Statistics.over(local, (dim,))
    if not statistics.axes:
        return None
    loss = _CrossEntropy(
        dim=dim,
        first=local.start(dim),
        num_classes=local.input_shapes[0][dim],
        num_all_classes=local.count((dim,)),
        reduction=local.integer("reduction", _MEAN),
        ignored=local.integer("ignore_index", _IGNORED),
        smoothing=local.number("label_smoothing", 0.0),
        statistics=statistics,
    )

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        return (loss(given["self"], given["target"], given.get("weight")),)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossEntropy(ShardedKernel):
    """A cross-entropy over a shard of the classes.

    Attributes:
        dim: the class dim.
        first: global index of the shard's first class.
        num_classes: number of classes in the shard.
        num_all_classes: global number of classes.
        reduction: none, mean or sum over positions, as in `at::Reduction`.
        ignored: `ignore_index`, the label of positions without a loss.
        smoothing: `label_smoothing`.
        statistics: reduces over the ranks with the other classes.
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
        """The weighted target probability of each class of the shard."""
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
        """A mask of the labels that are in the shard and not ignored, and their indices there."""
        labels = target.unsqueeze(self.dim)
        inside = (labels >= self.first) & (labels < self.first + self.num_classes)
        inside &= labels != self.ignored
        return inside, (labels - self.first).masked_fill_(~inside, 0)

    def along(self, weight: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Reshape class weights so that they broadcast to scores."""
        return weight.view([-1 if d == self.dim else 1 for d in range(scores.ndim)])

    def picked(
        self, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per position, the target-weighted sum of the scores, and the sum of the weights."""
        if self.is_plain(target):
            inside, places = self.places(target)
            counts = self.weights(inside, places, weight, scores.dtype)
            return scores.gather(self.dim, places).masked_fill_(~inside, 0) * counts, counts
        wanted = self.probabilities(scores, target, weight)
        return (wanted * scores).sum(self.dim, keepdim=True), wanted.sum(self.dim, keepdim=True)

    def is_plain(self, target: torch.Tensor) -> bool:
        """True if targets are labels, without smoothing."""
        return not target.is_floating_point() and self.smoothing == 0

    def weights(
        self,
        inside: torch.Tensor,
        places: torch.Tensor,
        weight: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The class weight of each position's label; 0 if the label is not in the shard."""
        return inside.to(dtype) if weight is None else weight.to(dtype)[places] * inside

    def reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """Reduce the losses of the rank's positions."""
        if self.reduction == _NONE:
            return losses.squeeze(self.dim)
        return losses.sum() if self.reduction == _SUM else losses.mean()

    def spread(self, gradient: torch.Tensor, num_positions: int) -> torch.Tensor:
        """The gradient of each position's loss."""
        if self.reduction == _NONE:
            return gradient.unsqueeze(self.dim)
        return gradient if self.reduction == _SUM else gradient / num_positions

    def forward(
        self,
        ctx: Any,
        scores: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the loss, and save log-probabilities, as the unsharded operator does."""
        wide = widened(scores)
        sums, shift = sums_of_exponentials(wide, (self.dim,), self.statistics)
        shifted = wide - shift
        picked, counts = self.picked(shifted, target, weight)
        is_counted = weight is None and not target.is_floating_point()
        parts = [sums, picked] if is_counted else [sums, picked, counts]
        sums, picked, *rest = self.statistics.total(torch.stack(parts))
        if is_counted:
            counts = (target != self.ignored).unsqueeze(self.dim).to(wide.dtype)
        else:
            (counts,) = rest
        sums.log_()
        losses = (sums * counts).masked_fill_(counts == 0, 0) - picked
        logarithms = shifted.sub_(sums).to(scores.dtype)
        ctx.save_for_backward(logarithms, target, weight, None if is_counted else counts)
        return self.reduced(losses).to(scores.dtype)

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradients of the scores, and of the target if it is probabilities."""
        logarithms, target, weight, counts = ctx.saved_tensors
        if counts is None:
            counts = (target != self.ignored).unsqueeze(self.dim)
        each = self.spread(gradient, counts.numel())
        of_scores = of_target = None
        if ctx.needs_input_grad[0]:
            of_scores = logarithms.exp().mul_(each * counts)
            if self.is_plain(target):
                inside, places = self.places(target)
                weights = self.weights(inside, places, weight, logarithms.dtype)
                of_scores.scatter_add_(self.dim, places, -each * weights)
            else:
                of_scores.sub_(each * self.probabilities(logarithms, target, weight))
        if ctx.needs_input_grad[1]:
            of_target = logarithms * each * (self.smoothing - 1)
            if weight is not None:
                of_target *= self.along(weight, logarithms)
        return of_scores, of_target, None


def bind_nll_loss(local: LocalNode) -> LocalKernel | None:
    """Bind nll_loss; None if neither classes nor the positions of a mean are sharded.

    A rank sums the losses of the labels in its shard of the classes. A mean divides by the total
    weight of all labels, which is summed over ranks.
    """
    scores = local.input_shapes[0]
    dim = _class_dim(len(scores))
    positions = tuple(d for d in range(len(scores)) if d != dim)
    is_mean = local.node.argument("reduction", _MEAN) == _MEAN
    is_weighted = len(local.inputs) > 2  # noqa: PLR2004  scores and target
    statistics = Statistics.over(local, (*positions, dim) if is_weighted else positions)
    if not local.axes_sharding((dim,)) and not (is_mean and statistics.axes):
        return None
    first, num_classes = local.start(dim), scores[dim]
    ignored = local.integer("ignore_index", _IGNORED)
    replaced: dict[str, Argument] = {"ignore_index": _IGNORED}
    if is_mean:
        replaced["reduction"] = _SUM
    call = OperatorCall(local.node, local.place.device, replaced=replaced)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
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
