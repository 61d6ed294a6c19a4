"""Base class of sharded kernels, and reductions of statistics over ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.ops import Operation
from autoshard.runtime.program.local_node import LocalNode, Ranks

Gradients = tuple[torch.Tensor | None, ...]
"""The gradient of each tensor argument of a kernel; None if it is not needed."""

_HALF = (torch.float16, torch.bfloat16)


class ShardedKernel(ABC):
    """An operator on a shard, differentiable once.

    An instance stores the constant arguments, and is called with tensors. `ctx` is that of
    `torch.autograd.Function`; `ctx.needs_input_grad` has one entry per tensor.
    """

    @abstractmethod
    def forward(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs, and save what backward needs in `ctx`."""

    @abstractmethod
    def backward(self, ctx: Any, *args: Any, **kwargs: Any) -> Gradients:
        """Compute the gradients of all tensors of forward from those of its outputs."""

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        """Run forward and record backward with autograd."""
        return _Function.apply(*tensors, self)  # type: ignore[no-untyped-call]  # torch


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *tensors, ctx.kernel = args
        return ctx.kernel.forward(ctx, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        return *ctx.kernel.backward(ctx, *gradients), None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Reduces statistics over the ranks that have the other shards of the same rows.

    Attributes:
        ranks: communication with the other ranks.
        axes: the mesh axes that shard the reduced dims; reduced one after the other.
    """

    ranks: Ranks
    axes: tuple[int, ...]

    @classmethod
    def over(cls, local: LocalNode, dims: tuple[int, ...]) -> "Statistics":
        """Statistics over some dims of the first input."""
        return cls(local.place.ranks, local.axes_sharding(dims))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; overwrites the tensor if it is contiguous."""
        return self._reduced(tensor, Operation.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks; overwrites the tensor if it is contiguous."""
        return self._reduced(tensor, Operation.MAX)

    def _reduced(self, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
        tensor = tensor.contiguous()
        for axis in self.axes:
            self.ranks.all_reduce(tensor, axis, operation)
        return tensor


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Convert float16 and bfloat16 to float32, in which statistics are computed."""
    return tensor.float() if tensor.dtype in _HALF else tensor
