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
        LayoutError: axes may not cut the dims so.
    """
    for dim, parts in enumerate(layout.local_slices(tensor.shape, axis_sizes, coordinate)):
        if sum(part.stop - part.start for part in parts) < tensor.shape[dim]:
            held = [tensor.narrow(dim, part.start, part.stop - part.start) for part in parts]
            tensor = held[0] if len(held) == 1 else torch.cat(held, dim)
    return tensor


def own_shape(
    shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Shape of a rank's slice of a tensor of a global shape.

    Raises:
        LayoutError: axes may not cut the dims so.
    """
    dims = layout.local_slices(shape, axis_sizes, coordinate)
    return tuple(sum(part.stop - part.start for part in parts) for parts in dims)
