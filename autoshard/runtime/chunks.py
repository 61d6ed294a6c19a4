"""Dims that are cut in chunks: between the order of the chunks and that of the ranks."""

import torch

from autoshard.layouts import AxisType


def by_rank(tensor: torch.Tensor, cut: AxisType, num_ranks: int) -> torch.Tensor:
    """Chunks one after the other -> what is each rank's, one rank after the other."""
    dim = cut.dim
    unit = tensor.shape[dim] // sum(cut.chunks)
    chunks = torch.split(tensor, [unit * size for size in cut.chunks], dim)
    slices = [torch.unflatten(chunk, dim, (num_ranks, -1)) for chunk in chunks]
    return torch.cat(slices, dim + 1).flatten(dim, dim + 1)


def by_chunk(tensor: torch.Tensor, cut: AxisType, num_ranks: int) -> torch.Tensor:
    """What is each rank's, one rank after the other -> chunks one after the other."""
    dim = cut.dim
    unit = tensor.shape[dim] // (num_ranks * sum(cut.chunks))
    ranks = torch.unflatten(tensor, dim, (num_ranks, -1))
    slices = torch.split(ranks, [unit * size for size in cut.chunks], dim + 1)
    return torch.cat([chunk.flatten(dim, dim + 1) for chunk in slices], dim)
