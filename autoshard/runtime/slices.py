"""Which slice of a tensor a rank holds."""

from collections.abc import Sequence

import torch

from autoshard.layouts import Layout


def local_slice(
    tensor: torch.Tensor, layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """A rank's slice of a whole tensor; differentiable.

    A view, except where chunks of a dim are cut one by one.

    Raises:
        LayoutError: an axis does not divide the dim it cuts, or a chunk of it.
    """
    for dim, parts in enumerate(layout.local_slices(tensor.shape, axis_sizes, coordinate)):
        if sum(part.stop - part.start for part in parts) < tensor.shape[dim]:
            held = [tensor.narrow(dim, part.start, part.stop - part.start) for part in parts]
            tensor = held[0] if len(held) == 1 else torch.cat(held, dim)
    return tensor
