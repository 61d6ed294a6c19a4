"""The blocks of whole tensors that a rank holds.

A rank holds one block of nearly every tensor. Of a dim that is cut in chunks it holds a part of
each chunk, and so several blocks, which lie one behind the other in its own memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import LayoutError
from autoshard.layouts import from_placements


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a whole tensor.

    Attributes:
        parts: where it lies in the whole tensor, one slice per dim.
        local: the rank's own memory of it, as a view.
    """

    parts: tuple[slice, ...]
    local: torch.Tensor

    def pieces(self, num_bytes: int) -> Iterator["Block"]:
        """The block row by row, in pieces of at most so many bytes, or of one row."""
        if not self.local.nbytes:
            return
        if self.local.nbytes <= num_bytes or not self.parts:
            yield self
            return
        rows, *others = self.parts
        step = max(1, num_bytes // self.local[0].nbytes)
        for begin in range(0, len(self.local), step):
            piece = self.local[begin : begin + step]
            start = rows.start + begin
            yield Block((slice(start, start + len(piece)), *others), piece)


def held_parts(tensor: DTensor, coordinate: Sequence[int]) -> tuple[tuple[slice, ...], ...]:
    """For each dim of a tensor the parts of it that a rank holds.

    Args:
        tensor: the tensor.
        coordinate: the rank's place on the tensor's mesh.

    Raises:
        LayoutError: no layout gives the tensor's placements, or it is not summed yet.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise LayoutError(
            f"a tensor placed {tensor.placements} is a sum over ranks, so none holds a part of it; "
            f"redistribute it first"
        )
    sizes = tuple(tensor.device_mesh.shape)
    layout = from_placements(tensor.placements, sizes)
    return layout.local_slices(tensor.shape, sizes, coordinate)


def blocks_of(local: torch.Tensor, dims: Sequence[Sequence[slice]]) -> Iterator[Block]:
    """Each block that a rank holds.

    Args:
        local: the rank's own tensor.
        dims: for each dim of the whole tensor the parts of it that the rank holds.
    """
    lengths = [[part.stop - part.start for part in parts] for parts in dims]
    starts = [accumulate(row, initial=0) for row in lengths]
    held = [list(zip(*row, strict=False)) for row in zip(dims, starts, lengths, strict=True)]
    for parts in product(*held):
        block = local
        for dim, (_, start, length) in enumerate(parts):
            block = block.narrow(dim, start, length)
        yield Block(tuple(part for part, _, _ in parts), block)


def local_blocks(tensor: torch.Tensor) -> Iterator[Block]:
    """The blocks that this rank holds of a tensor; all of one that is not distributed.

    Raises:
        LayoutError: no layout gives the tensor's placements.
    """
    if not isinstance(tensor, DTensor):
        yield Block(tuple(slice(0, size) for size in tensor.shape), tensor)
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is not None:
        yield from blocks_of(tensor.to_local(), held_parts(tensor, coordinate))
