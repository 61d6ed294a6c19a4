"""Agreement of the ranks of a mesh before a plan runs; without pickles."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import AutoshardError, PlanError
from autoshard.runtime.recorder import not_recorded

_SAMPLES = 256
"""Number of elements of a tensor that ranks compare."""


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


def numbers_of_all_ranks(own: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The numbers of each rank of a mesh, as one row for each in the order of the mesh.

    Args:
        own: a vector of numbers of this rank, as long on all ranks.
        mesh: of the ranks that take part.
    """
    numbers = own.to(mesh.device_type)
    with not_recorded():
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            gathered = [torch.empty_like(numbers) for _ in range(group.size())]
            dist.all_gather(gathered, numbers, group)
            numbers = torch.stack(gathered)
    # The last axis was gathered last and comes first.
    found = numbers.reshape(*reversed(mesh.shape), len(own))
    return found.permute(*reversed(range(mesh.ndim)), mesh.ndim).reshape(mesh.size(), len(own))


def digest_of(contents: torch.Tensor | str) -> int:
    """A 64-bit number that differs where tensors, byte for byte, or texts do."""
    if isinstance(contents, str):
        data = contents.encode()
    else:
        flat = contents.detach().contiguous().cpu().view(-1).view(torch.uint8)
        data = bytes(flat.numpy().data)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


@contextmanager
def raised_on_all_ranks(
    mesh: DeviceMesh, failing: str = "the plan was not applied"
) -> Iterator[None]:
    """Raise an error on all ranks of a mesh if the block fails on one of them.

    Without this, the other ranks would wait in their next collective for the one that failed.

    Args:
        mesh: of the ranks that take part.
        failing: says to the other ranks what did not happen.

    Raises:
        PlanError: another rank failed.
    """
    failure: AutoshardError | None = None
    try:
        yield
    except AutoshardError as error:
        failure = error
    failed = first_failed(mesh, failed=failure is not None)
    if failure is not None:
        raise failure
    if failed is not None:
        raise PlanError(f"{failing}: rank {failed} failed, see its error")


def first_failed(mesh: DeviceMesh, *, failed: bool) -> int | None:
    """The lowest rank of a mesh on which something has failed; None if it has on none.

    Args:
        mesh: of the ranks that take part.
        failed: True if it has on this rank.
    """
    none = torch.iinfo(torch.int64).max
    lowest = torch.tensor([dist.get_rank() if failed else none], device=mesh.device_type)
    with not_recorded():
        for axis in range(mesh.ndim):
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return None if int(lowest) == none else int(lowest)


def check_equal_weights(weights: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Check that all ranks of a mesh have the same weights, by a sample of each tensor.

    Args:
        weights: full parameters of a model, by name; the same names on all ranks.
        mesh: of the ranks that take part.

    Raises:
        PlanError: a tensor differs between ranks; raised on all of them.
    """
    digests = [_digest(tensor) for tensor in weights.values()]
    least = torch.tensor(digests, dtype=torch.int64, device=mesh.device_type)
    most = least.clone()
    for axis in range(mesh.ndim):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    equal = (least == most).tolist()
    differing = [name for name, same in zip(weights, equal, strict=True) if not same]
    if differing:
        raise PlanError(
            f"the ranks have different weights: {len(differing)} of {len(weights)} parameters "
            f"differ, such as {differing[0]!r}. Call torch.manual_seed with one seed on every rank "
            f"before the model is made, or make the model within init_empty_weights() and load a "
            f"checkpoint into it after the plan is applied"
        )


def _digest(tensor: torch.Tensor) -> int:
    """A 63-bit digest of evenly spaced elements of a tensor; 0 if it has no memory."""
    if tensor.is_meta:
        return 0
    flat = tensor.detach().flatten()
    sample = flat[:: max(len(flat) // _SAMPLES, 1)].cpu().contiguous()
    digest = hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
