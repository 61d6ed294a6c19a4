"""What the ranks of a mesh tell each other before a plan runs; without pickles."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def broadcast_text(text: str, mesh: DeviceMesh) -> str:
    """The text of the first rank of a mesh, on all of its ranks.

    Along each axis in turn, the first rank of every line sends what it has.

    Args:
        text: that of this rank; only the first rank's matters.
        mesh: of the ranks that take part.
    """
    data = text.encode()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        size = torch.tensor([len(data)], device=mesh.device_type)
        dist.broadcast(size, group=group, group_src=0)
        content = torch.empty(int(size), dtype=torch.uint8, device=mesh.device_type)
        if dist.get_rank(group) == 0 and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(content, group=group, group_src=0)
        data = content.cpu().numpy().tobytes()
    return data.decode()


def first_failed_rank(mesh: DeviceMesh, *, failed: bool) -> int | None:
    """The lowest rank of a mesh that failed, on all of its ranks; None if none did."""
    none = torch.iinfo(torch.int64).max
    lowest = torch.tensor([dist.get_rank() if failed else none], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return None if int(lowest) == none else int(lowest)
