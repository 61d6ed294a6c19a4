"""Which slice of a tensor a rank holds."""

from collections.abc import Sequence
from math import prod

import torch

from autoshard.layouts import Layout


def slice_index(
    layout: Layout, dim: int, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, int]:
    """Number of a rank's slice of one dim, and how many slices there are.

    Args:
        layout: of the tensor.
        dim: the dim that is asked about.
        axis_sizes: size of each mesh axis.
        coordinate: the rank's place on each mesh axis.
    """
    index = 0
    axes = layout.cutting_axes(dim)
    for axis in axes:
        index = index * axis_sizes[axis] + coordinate[axis]
    return index, prod(axis_sizes[axis] for axis in axes)


def local_slice(
    tensor: torch.Tensor, layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """A rank's slice of a whole tensor, as a view of it; differentiable.

    Raises:
        LayoutError: an axis does not divide the dim it cuts.
    """
    shape = layout.local_shape(tensor.shape, axis_sizes)
    for dim, size in enumerate(shape):
        index, num_slices = slice_index(layout, dim, axis_sizes, coordinate)
        if num_slices > 1:
            tensor = tensor.narrow(dim, index * size, size)
    return tensor
