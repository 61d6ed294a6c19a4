"""Losses of `torch.nn.functional`: sums over shards, divided by what the global tensors count."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature

import torch

from autoshard.runtime.global_tensors.letters import broadcast, numbered
from autoshard.runtime.global_tensors.on_shards import Letters, Rule, ShardedCall, TorchCall
from autoshard.runtime.global_tensors.placed import Placed

_ELEMENT_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
"""Losses of elements, whose mean is over all of them."""

_HALF = (torch.float16, torch.bfloat16)


def _bound(call: TorchCall) -> TorchCall | None:
    """The call with all arguments by name; None if it has a deprecated one."""
    bound = signature(call.function).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    legacy = (arguments.pop(name, None) for name in ("size_average", "reduce"))
    if any(value is not None for value in legacy):
        return None
    return TorchCall(call.function, (), arguments)


def _reduced(
    call: TorchCall,
    letters: Sequence[Letters],
    elements: Letters,
    count: Callable[[Sequence[torch.Tensor]], torch.Tensor] | int,
) -> ShardedCall | None:
    """A loss as the sum of its elements over shards.

    Args:
        call: of the loss, with all arguments by name.
        letters: of its tensors.
        elements: letters of the loss without a reduction.
        count: the number by which a mean divides, or what computes the part of it that belongs to
            a rank's tensors.
    """
    reduction = call.kwargs["reduction"]
    if reduction == "none":
        return ShardedCall(call.tensors, letters, call.compute, lambda *_: elements)
    if reduction not in {"mean", "sum"}:
        return None
    dtypes: list[torch.dtype] = []  # of the loss without a reduction

    def compute(locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        loss = call.compute(locals_, reduction="none")
        dtypes.append(loss.dtype)
        # Sums in 16 bits would overflow, or lose digits, before ranks add them.
        total = torch.sum(loss, dtype=torch.float32 if loss.dtype in _HALF else None)
        if reduction == "sum" or isinstance(count, int):
            return [total]
        return [total, count(locals_)]

    def finish(total: torch.Tensor, *counted: torch.Tensor) -> torch.Tensor:
        if reduction == "mean":
            total = total / (count if isinstance(count, int) else counted[0])
        return total.to(dtypes[0])

    return ShardedCall(call.tensors, letters, compute, lambda *_: (), sums=True, finish=finish)


def element_loss(call: TorchCall) -> ShardedCall | None:
    """The rule of losses of elements of tensors that broadcast."""
    bound = _bound(call)
    if bound is None or (bound.kwargs.get("weight") is not None and not _is_bce(call)):
        return None
    found = broadcast(bound.tensors)
    if found is None:
        return None
    shape, letters = found
    count = torch.Size(shape).numel()
    if bound.kwargs["reduction"] == "batchmean":
        count = bound.tensors[0].shape[0]
        bound = TorchCall(bound.function, (), {**bound.kwargs, "reduction": "mean"})
    return _reduced(bound, letters, numbered(len(shape)), count)


def _is_bce(call: TorchCall) -> bool:
    """True for the losses whose weights do not change what the mean divides by."""
    return call.function.__name__.startswith("binary_cross_entropy")


def class_loss(call: TorchCall) -> ShardedCall | None:
    """The rule of losses of classes, whose mean is over labels that are not ignored."""
    bound = _bound(call)
    scores, labels = (bound.kwargs[name] if bound else None for name in ("input", "target"))
    if bound is None or not isinstance(scores, Placed) or not isinstance(labels, Placed):
        return None
    if len(scores.shape) < 2:  # noqa: PLR2004  one row, of classes alone
        return None
    letters = numbered(len(scores.shape), [1])
    rows = (letters[0], *letters[2:])
    weight = bound.kwargs["weight"]
    has_classes = labels.local.is_floating_point()
    given = bound.letters(
        (scores, letters), (labels, letters if has_classes else rows), (weight, (None,))
    )
    if given is None or labels.shape != (scores.shape if has_classes else _rows(scores.shape)):
        return None
    if has_classes:
        return _reduced(bound, given, rows, torch.Size(_rows(scores.shape)).numel())
    ignored = bound.kwargs["ignore_index"]
    place = next(n for n, x in enumerate(bound.tensors) if x is labels)
    weight_place = next((n for n, x in enumerate(bound.tensors) if x is weight), None)

    def count(locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        counted = locals_[place] != ignored
        if weight_place is None:
            return torch.sum(counted)
        of_labels = locals_[weight_place][locals_[place].masked_fill(~counted, 0)]
        return torch.sum(of_labels * counted)

    return _reduced(bound, given, rows, count)


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without the dim of classes."""
    return (shape[0], *shape[2:])


LOSSES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENT_LOSSES, element_loss),
    **dict.fromkeys(["cross_entropy", "nll_loss"], class_loss),
}
"""Rules by name of function."""
