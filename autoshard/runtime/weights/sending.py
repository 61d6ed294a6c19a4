"""Bringing a distributed tensor to one rank, block by block."""

from collections.abc import Iterator
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.runtime.blocks import Block, blocks_of, held_parts, local_blocks


class Gathering:
    """Gathers tensors, one after the other; what arrives lies in the same memory each time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def blocks(self, tensor: torch.Tensor, writer: int) -> Iterator[Block]:
        """The blocks of a tensor, one after the other, on the rank that writes it.

        To be run to its end by all ranks of the tensor's mesh. What the writer holds does not
        travel, and everything else does once.

        Args:
            tensor: a DTensor, or a plain one that is the same on all ranks.
            writer: global number of the rank.

        Yields:
            On the writer blocks that together are the tensor, each until the next one is asked
            for; on other ranks nothing.
        """
        if not isinstance(tensor, DTensor):
            if own_rank() == writer:
                yield from local_blocks(tensor)
            return
        local = tensor.to_local()
        for holder, coordinate in _holders(tensor, writer):
            dims = held_parts(tensor, coordinate)
            if own_rank() == holder == writer:
                yield from blocks_of(local, dims)
            elif own_rank() == holder:
                dist.send(local.contiguous().reshape(-1).view(torch.uint8), writer)
            elif own_rank() == writer:
                shape = [sum(part.stop - part.start for part in parts) for parts in dims]
                received = self._room(prod(shape) * local.itemsize, local.device)
                dist.recv(received, holder)
                yield from blocks_of(received.view(local.dtype).view(shape), dims)

    def _room(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for so many bytes; all backends can send bytes."""
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffer[:num_bytes]


def _holders(tensor: DTensor, writer: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each different slice a rank that holds it, near to the writer, and its coordinate."""
    ranks = tensor.device_mesh.mesh
    home = (ranks == writer).nonzero()[0].tolist()
    choices = [
        [own] if placement.is_replicate() else range(size)
        for own, placement, size in zip(home, tensor.placements, ranks.shape, strict=True)
    ]
    for coordinate in product(*choices):
        yield int(ranks[coordinate]), coordinate


def own_rank() -> int:
    """Global number of this rank; 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0
