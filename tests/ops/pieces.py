"""Whole tensors as the ranks hold them, and back."""

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from autoshard.layouts import Kind, Layout

Coordinate = tuple[int, ...]
Pieces = Mapping[Coordinate, torch.Tensor]

SAME, SUM, SLICE = "same", "sum", "slice"
VALUE = {Kind.INVARIANT: SAME, Kind.REPLICATE: SAME, Kind.SHARD: SLICE, Kind.PARTIAL: SUM}
GRADIENT = {Kind.INVARIANT: SAME, Kind.REPLICATE: SUM, Kind.SHARD: SLICE, Kind.PARTIAL: SAME}


def slice_of(
    layout: Layout, shape: tuple[int, ...], mesh: tuple[int, ...], at: Coordinate
) -> tuple[Any, ...]:
    """Where a rank's slices lie in the whole tensor, as indices."""
    held = []
    for dim, size in enumerate(shape):
        sub_shards = layout.sub_shards(dim) or (1,)
        ends = [size * n // sum(sub_shards) for n in np.cumsum(sub_shards)]
        places = np.split(np.arange(size), ends)
        for axis in layout.sharding_axes(dim):
            places = [share_of(sub_shard, mesh[axis], at[axis]) for sub_shard in places]
        held.append(np.concatenate(places))
    return np.ix_(*held)


def share_of(places: np.ndarray, num_ranks: int, rank: int) -> np.ndarray:
    """A rank's share as `torch.chunk` gives it; none is empty."""
    shares = torch.from_numpy(places).chunk(num_ranks)
    assert len(shares) == num_ranks
    return shares[rank].numpy()


PlaceOf = Callable[[Layout, tuple[int, ...], tuple[int, ...], Coordinate], tuple[Any, ...]]


def distribute(
    tensor: torch.Tensor,
    layout: Layout,
    mesh: tuple[int, ...],
    kinds: Mapping[Kind, str],
    place_of: PlaceOf = slice_of,
) -> dict[Coordinate, torch.Tensor]:
    """A whole tensor as the ranks hold it; what is to be summed is split at random."""
    split = [a for a, t in enumerate(layout.types) if kinds[t.kind] == SUM]
    terms = [torch.randn_like(tensor) for _ in range(prod(mesh[a] for a in split) - 1)]
    terms.append(tensor - sum(terms) if terms else tensor)
    by_term = dict(zip(product(*(range(mesh[a]) for a in split)), terms, strict=True))
    shape = tuple(tensor.shape)
    return {
        at: by_term[tuple(at[a] for a in split)][place_of(layout, shape, mesh, at)].clone()
        for at in product(*map(range, mesh))
    }


def assemble(
    pieces: Pieces,
    layout: Layout,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    kinds: Mapping[Kind, str],
    *,
    place_of: PlaceOf = slice_of,
) -> torch.Tensor:
    """The whole tensor that the ranks hold; copies are checked to agree."""
    whole = torch.zeros(shape, dtype=pieces[(0,) * len(mesh)].dtype)
    same = [a for a, t in enumerate(layout.types) if kinds[t.kind] == SAME]
    for at, piece in pieces.items():
        place = place_of(layout, shape, mesh, at)
        assert whole[place].shape == piece.shape, "a rank's result has another shape"
        first = tuple(0 if axis in same else i for axis, i in enumerate(at))
        assert_close(piece, pieces[first])
        if at == first:
            whole[place] += piece
    return whole


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual is expected or torch.equal(actual, expected):
        return
    assert actual.dtype.is_floating_point or actual.dtype.is_complex
    tolerance = 1e-4 if actual.dtype == torch.float32 else 1e-10
    assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
