"""The exchange of edges between ranks that lie next to each other."""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

Received = tuple[torch.Tensor | None, torch.Tensor | None]
"""What came from the rank before and from the rank behind; None where there is none."""


def exchange_edges(
    to_before: torch.Tensor, to_after: torch.Tensor, group: ProcessGroup
) -> Received:
    """Send tensors to the ranks before and behind, and take theirs, all at once.

    From the rank before comes a tensor like `to_after`, from the rank behind one like
    `to_before`; what has no elements is not sent.

    Args:
        to_before: for the rank before, contiguous.
        to_after: for the rank behind, contiguous.
        group: the ranks in order; the first has none before it, the last none behind.
    """
    rank = group.rank()
    from_before = torch.empty_like(to_after) if rank > 0 else None
    from_after = torch.empty_like(to_before) if rank + 1 < group.size() else None
    operations = [
        P2POp(kind, tensor, group=group, group_peer=peer)
        for kind, tensor, peer, neighbour in (
            (dist.isend, to_before, rank - 1, from_before),
            (dist.isend, to_after, rank + 1, from_after),
            (dist.irecv, from_before, rank - 1, from_before),
            (dist.irecv, from_after, rank + 1, from_after),
        )
        if neighbour is not None and tensor is not None and tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return from_before, from_after
