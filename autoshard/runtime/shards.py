"""Shards of global tensors, and their sub-shards if a dim is interleaved.

A shard usually is one slice of the global tensor. If a dim is sharded in interleaved sub-shards
(fused QKV), the shard consists of several slices, one after the other in local memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import LayoutError
from autoshard.layouts import AxisType, Layout, from_placements

DimSlices = Sequence[Sequence[slice]]
"""For each dim of a global tensor, the slices of which a shard consists."""


def local_shard(
    tensor: torch.Tensor, layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """A rank's shard of a global tensor; differentiable.

    It is a view, unless a dim is sharded in interleaved sub-shards.

    Raises:
        LayoutError: the layout cannot shard the tensor.
    """
    for dim, slices in enumerate(layout.local_slices(tensor.shape, axis_sizes, coordinate)):
        if _length(slices) < tensor.shape[dim]:
            parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in slices]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def local_shape(
    shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape of a rank's shard, from the global shape.

    Raises:
        LayoutError: the layout cannot shard the tensor.
    """
    return shape_of(layout.local_slices(shape, axis_sizes, coordinate))


def shape_of(slices: DimSlices) -> tuple[int, ...]:
    """The shape of a shard with these slices."""
    return tuple(map(_length, slices))


def _length(slices: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in slices)


@dataclass(frozen=True, slots=True)
class SubShard:
    """A slice of a global tensor in a rank's memory.

    Attributes:
        index: the slice of each dim of the global tensor.
        local: a view of the rank's memory.
    """

    index: tuple[slice, ...]
    local: torch.Tensor

    def pieces(self, num_bytes: int) -> Iterator["SubShard"]:
        """Split along dim 0 into pieces of at most `num_bytes` bytes, but at least one row."""
        if not self.local.nbytes:
            return
        if self.local.nbytes <= num_bytes or not self.index:
            yield self
            return
        rows, *others = self.index
        step = max(1, num_bytes // self.local[0].nbytes)
        for begin in range(0, len(self.local), step):
            piece = self.local[begin : begin + step]
            start = rows.start + begin
            yield SubShard((slice(start, start + len(piece)), *others), piece)


def sub_shards(local: torch.Tensor, slices: DimSlices) -> Iterator[SubShard]:
    """The sub-shards of a shard.

    Args:
        local: the shard.
        slices: slices of each dim of the global tensor of which the shard consists.
    """
    offsets = [accumulate((p.stop - p.start for p in parts), initial=0) for parts in slices]
    dims = [list(zip(*pair, strict=False)) for pair in zip(slices, offsets, strict=True)]
    for chosen in product(*dims):
        view = local
        for dim, (part, offset) in enumerate(chosen):
            view = view.narrow(dim, offset, part.stop - part.start)
        yield SubShard(tuple(part for part, _ in chosen), view)


def local_sub_shards(tensor: torch.Tensor) -> Iterator[SubShard]:
    """This rank's sub-shards of a DTensor; of a plain tensor, the tensor itself.

    Raises:
        LayoutError: no layout has the tensor's placements.
    """
    if not isinstance(tensor, DTensor):
        yield SubShard(tuple(slice(0, size) for size in tensor.shape), tensor)
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is not None:
        yield from sub_shards(tensor.to_local(), dtensor_slices(tensor, coordinate))


def dtensor_slices(tensor: DTensor, coordinate: Sequence[int]) -> DimSlices:
    """The slices of each dim of a DTensor on the rank at a mesh coordinate.

    Raises:
        LayoutError: no layout has the tensor's placements, or the tensor is partial.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise LayoutError(
            f"a tensor placed {tensor.placements} is a sum over ranks, so none has a slice of it; "
            f"redistribute it first"
        )
    sizes = tuple(tensor.device_mesh.shape)
    layout = from_placements(tensor.placements, sizes)
    return layout.local_slices(tensor.shape, sizes, coordinate)


def to_rank_major(tensor: torch.Tensor, shard: AxisType, num_ranks: int) -> torch.Tensor:
    """Reorder a dim with interleaved sub-shards so that those of each rank are contiguous.

    For Q, K, V on two ranks: `Q0 Q1 K0 K1 V0 V1` becomes `Q0 K0 V0 Q1 K1 V1`.
    """
    dim = shard.dim
    unit = tensor.shape[dim] // sum(shard.sub_shards)
    parts = torch.split(tensor, [unit * size for size in shard.sub_shards], dim)
    slices = [torch.unflatten(part, dim, (num_ranks, -1)) for part in parts]
    return torch.cat(slices, dim + 1).flatten(dim, dim + 1)


def from_rank_major(tensor: torch.Tensor, shard: AxisType, num_ranks: int) -> torch.Tensor:
    """The inverse of `to_rank_major`."""
    dim = shard.dim
    unit = tensor.shape[dim] // (num_ranks * sum(shard.sub_shards))
    ranks = torch.unflatten(tensor, dim, (num_ranks, -1))
    slices = torch.split(ranks, [unit * size for size in shard.sub_shards], dim + 1)
    return torch.cat([part.flatten(dim, dim + 1) for part in slices], dim)
