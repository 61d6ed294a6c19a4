"""Letters of the dims of calls, for the rules of functions of torch."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from autoshard.runtime.global_tensors.on_shards import Letters
from autoshard.runtime.global_tensors.placed import Placed, Shape


def numbered(num_dims: int, whole: Collection[int] = ()) -> Letters:
    """A letter for each dim but those that must be whole."""
    return tuple(None if dim in whole else str(dim) for dim in range(num_dims))


def broadcast(
    tensors: Sequence[Placed], whole: Collection[int] = ()
) -> tuple[Shape, list[Letters]] | None:
    """The shape that tensors broadcast to, and their letters; None if they do not fit.

    Args:
        tensors: the tensors.
        whole: dims of the shape that must be whole.
    """
    try:
        shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))  # type: ignore[no-untyped-call]  # torch
    except RuntimeError:
        return None
    return shape, [_aligned(tensor.shape, shape, whole) for tensor in tensors]


def _aligned(shape: Shape, to: Shape, whole: Collection[int]) -> Letters:
    """Letters of a tensor that is broadcast to a shape: its dims are aligned at the last one."""
    missing = len(to) - len(shape)
    return tuple(
        str(missing + dim) if size == to[missing + dim] and missing + dim not in whole else None
        for dim, size in enumerate(shape)
    )


def dims_of(value: Any, num_dims: int) -> tuple[int, ...] | None:
    """Dims of an argument, counted from the first; None if it has other than valid dims."""
    dims = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(dim) is int and -num_dims <= dim < num_dims for dim in dims):
        return None
    return tuple(dim % num_dims for dim in dims)
