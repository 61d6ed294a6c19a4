"""A call of a module: its arguments, with descriptions of tensors in place of tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.torch_private import pytree


@dataclass(frozen=True, slots=True)
class TensorLike:
    """Shape, strides and element type of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLike":
        """Describe a tensor, of dynamic sizes by their examples."""
        shape = tuple(map(_size, tensor.shape))
        stride = tuple(map(_size, tensor.stride()))
        return cls(shape, stride, tensor.dtype, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        """A tensor like it on the meta device; no leaf of autograd, so that it may be written."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_().view_as(made) if self.requires_grad else made


def _size(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


@dataclass(frozen=True)
class ModuleCall:
    """The arguments of a call.

    Attributes:
        leaves: the arguments, flat.
        spec: their nesting.
        key: equal for calls that are alike.
    """

    leaves: tuple[Any, ...] = field(compare=False)
    spec: pytree.TreeSpec
    key: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "ModuleCall":
        """Describe the arguments of a call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        described = tuple(map(_described, leaves))
        return cls(described, spec, tuple(map(_key, described)))

    def make(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments for a call like it."""
        leaves = [x.make() if isinstance(x, TensorLike) else x for x in self.leaves]
        made: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_unflatten(leaves, self.spec)
        return made


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorLike.of(leaf)
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf.node.hint
    return leaf


def _key(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (TensorLike, bool, int, float, str)) else id(leaf)
