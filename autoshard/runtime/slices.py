"""Which slice of a tensor a rank holds."""

from collections.abc import Sequence

import torch

from autoshard.layouts import Layout


def local_slice(
    tensor: torch.Tensor, layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """A rank's slice of a whole tensor, as a view of it; differentiable.

    Raises:
        LayoutError: an axis does not divide the dim it cuts.
    """
    for dim, part in enumerate(layout.local_slices(tensor.shape, axis_sizes, coordinate)):
        size = part.stop - part.start
        if size < tensor.shape[dim]:
            tensor = tensor.narrow(dim, part.start, size)
    return tensor
