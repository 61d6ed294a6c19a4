"""Statistics that ranks put together inside an operator."""

from dataclasses import dataclass

import torch

from autoshard.ops import Operation
from autoshard.runtime.local_node import LocalNode, Ranks

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Puts statistics together over the ranks that have slices of the same rows.

    Attributes:
        ranks: the others.
        axes: the mesh axes that cut what statistics are taken over, one after the other.
    """

    ranks: Ranks
    axes: tuple[int, ...]

    @classmethod
    def over(cls, local: LocalNode, dims: tuple[int, ...]) -> "Statistics":
        """Over the ranks among which dims of the first input are cut."""
        return cls(local.place.ranks, local.axes_cutting(dims))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; what is given is overwritten where it is contiguous."""
        return self._reduced(tensor, Operation.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The maximum over ranks; what is given is overwritten where it is contiguous."""
        return self._reduced(tensor, Operation.MAX)

    def _reduced(self, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
        tensor = tensor.contiguous()
        for axis in self.axes:
            self.ranks.all_reduce(tensor, axis, operation)
        return tensor


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in 32 bits at least, in which statistics are taken."""
    return tensor.float() if tensor.dtype in _HALF else tensor
