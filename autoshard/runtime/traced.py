"""Steps of reshardings as `torch.compile` traces them: functional collectives, nothing else.

`spmd_types` looks at nodes of autograd, which a tracer does not have. What runs is the same,
the table's action forward and backward; the compiler decides what runs beside what.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.layouts import STEPS, Action, AxisType
from autoshard.runtime.shards import by_chunk, by_rank

_OPS: Any = torch.ops._c10d_functional  # noqa: SLF001  as torch.distributed's functions call them


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step on the ranks of an axis.

    Attributes:
        source: type before.
        target: type after.
        group: name of the process group.
        num_ranks: of the axis.
        rank: this one.
    """

    source: AxisType
    target: AxisType
    group: str
    num_ranks: int
    rank: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run the step; differentiable."""
        resharded: torch.Tensor = _Traced.apply(tensor, self)  # type: ignore[no-untyped-call]  # torch
        return resharded

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """What runs forward."""
        action, _ = STEPS[self.source.kind, self.target.kind]
        return _ACTIONS[action](self, tensor, self.source, self.target)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """What runs backward."""
        _, action = STEPS[self.source.kind, self.target.kind]
        return _ACTIONS[action](self, gradient, self.target, self.source)


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, step: TracedStep) -> torch.Tensor:
        ctx.step = step
        return step.forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.step.backward(gradient), None


def _nothing(
    _step: TracedStep, tensor: torch.Tensor, _source: AxisType, _target: AxisType
) -> torch.Tensor:
    return tensor.view_as(tensor)


def _slice(
    step: TracedStep, tensor: torch.Tensor, _source: AxisType, target: AxisType
) -> torch.Tensor:
    return _slices(step, tensor, target)[step.rank].contiguous()


def _pad(
    step: TracedStep, tensor: torch.Tensor, source: AxisType, _target: AxisType
) -> torch.Tensor:
    slices = tensor.new_zeros((step.num_ranks, *tensor.shape))
    slices[step.rank] = tensor
    return _joined(step, slices, source)


def _mask(
    step: TracedStep, tensor: torch.Tensor, _source: AxisType, _target: AxisType
) -> torch.Tensor:
    return tensor.clone() if step.rank == 0 else torch.zeros_like(tensor)


def _all_reduce(
    step: TracedStep, tensor: torch.Tensor, _source: AxisType, _target: AxisType
) -> torch.Tensor:
    return _waited(_OPS.all_reduce(tensor.contiguous(), "sum", step.group))


def _all_gather(
    step: TracedStep, tensor: torch.Tensor, source: AxisType, _target: AxisType
) -> torch.Tensor:
    rows = tensor.contiguous().unsqueeze(0)
    moved = _waited(_OPS.all_gather_into_tensor(rows, step.num_ranks, step.group))
    return _joined(step, moved, source)


def _reduce_scatter(
    step: TracedStep, tensor: torch.Tensor, _source: AxisType, target: AxisType
) -> torch.Tensor:
    slices = _slices(step, tensor, target).contiguous()
    moved = _OPS.reduce_scatter_tensor(slices, "sum", step.num_ranks, step.group)
    return _waited(moved).squeeze(0)


def _all_to_all(
    step: TracedStep, tensor: torch.Tensor, source: AxisType, target: AxisType
) -> torch.Tensor:
    slices = _slices(step, tensor, target).contiguous()
    ones = [1] * step.num_ranks
    moved = _waited(_OPS.all_to_all_single(slices, ones, ones, step.group))
    return _joined(step, moved, source)


def _slices(step: TracedStep, tensor: torch.Tensor, cut: AxisType) -> torch.Tensor:
    """The slice of each rank, one behind the other along a new dim 0."""
    if cut.chunks:
        tensor = by_rank(tensor, cut, step.num_ranks)
    return torch.unflatten(tensor, cut.dim, (step.num_ranks, -1)).movedim(cut.dim, 0)


def _joined(step: TracedStep, slices: torch.Tensor, cut: AxisType) -> torch.Tensor:
    """The whole of which these are the slices."""
    whole = slices.movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1).contiguous()
    return by_chunk(whole, cut, step.num_ranks) if cut.chunks else whole


def _waited(moved: Any) -> torch.Tensor:
    tensor: torch.Tensor = _OPS.wait_tensor(moved)
    return tensor


_ACTIONS: dict[Action, Callable[[TracedStep, torch.Tensor, AxisType, AxisType], torch.Tensor]] = {
    Action.NOTHING: _nothing,
    Action.SLICE: _slice,
    Action.PAD: _pad,
    Action.MASK: _mask,
    Action.ALL_REDUCE: _all_reduce,
    Action.ALL_GATHER: _all_gather,
    Action.REDUCE_SCATTER: _reduce_scatter,
    Action.ALL_TO_ALL: _all_to_all,
}
