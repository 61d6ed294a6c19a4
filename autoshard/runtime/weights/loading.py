"""Loading weights, of which each rank reads its own part."""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autoshard.errors import CheckpointError
from autoshard.runtime.parallelize import Planned, planned_forward
from autoshard.runtime.weights.matching import Match, Matching
from autoshard.runtime.weights.opening import open_source
from autoshard.runtime.weights.slots import (
    device_of,
    empty_like,
    local_of,
    slots_of,
    unkept_buffers,
)
from autoshard.runtime.weights.source import Source


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank read of a checkpoint.

    Attributes:
        num_tensors: tensors of the model that were filled; tied ones count once.
        bytes_read: bytes of tensors that this rank read.
        bytes_stored: size of these tensors in the checkpoint, whole.
        seconds: how long it took.
    """

    num_tensors: int
    bytes_read: int
    bytes_stored: int
    seconds: float

    def __str__(self) -> str:
        share = self.bytes_read / self.bytes_stored if self.bytes_stored else 0.0
        return (
            f"read {self.bytes_read / 1e6:,.1f} of {self.bytes_stored / 1e6:,.1f} MB "
            f"({share:.1%}) for {self.num_tensors} tensors in {self.seconds:.2f} s"
        )


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] = str,
    optional: Collection[str] = (),
    ignored: Collection[str] = (),
    cast: bool = False,
) -> LoadReport:
    """Fill a model with the weights of a checkpoint; each rank reads what it holds.

    To be called on every rank, after `parallelize`. Parameters and buffers on the meta device
    get memory on the mesh's device, one after the other, so no tensor is ever whole on a rank
    that holds a part. They are new objects: make the optimizer afterwards. No collectives run.

    A checkpoint is

    * a safetensors file, or the `.index.json` of several, or the folder of either;
    * a file of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`), or the index of several. It is
      mapped and read with `weights_only=True`. Names of nested dictionaries are joined by dots;
    * a folder of `torch.distributed.checkpoint`, names likewise.

    Tied tensors may be there under one of their names, or under several if all are equal.

    Args:
        model: planned, or any other module; what is not a DTensor is read whole.
        path: of the checkpoint.
        rename: gives the name in the checkpoint of a tensor of the model, such as
            `lambda name: "model." + name`.
        optional: patterns (as of `fnmatch`) of tensors in the model that the checkpoint may
            lack; they stay as they are, so they must have values.
        ignored: patterns of tensors in the checkpoint that the model may lack.
        cast: convert tensors of other dtypes to those of the model.

    Returns:
        What this rank read.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the model, which is then
            unchanged; or reading broke off, or tied tensors differ: then only part of the
            weights is loaded.
    """
    begin = time.perf_counter()
    _check_unkept_buffers(model)
    source = open_source(Path(path))
    matching = Matching(rename=rename, optional=optional, ignored=ignored, cast=cast)
    entries = source.entries
    matches = matching.match(slots_of(model), entries)
    device = device_of(model)
    bytes_read = sum(_load(match, source, device) for match in matches)
    return LoadReport(
        num_tensors=len(matches),
        bytes_read=bytes_read,
        bytes_stored=sum(entries[match.names[0]].nbytes for match in matches),
        seconds=time.perf_counter() - begin,
    )


def _check_unkept_buffers(model: nn.Module) -> None:
    """Check that buffers which no checkpoint holds have values, if they are needed."""
    needed = planned_forward(model).buffers if isinstance(model, Planned) else None
    empty = [
        name
        for name, buffer in unkept_buffers(model).items()
        if buffer.is_meta and (needed is None or name in needed)
    ]
    if empty:
        raise CheckpointError(
            f"checkpoints do not hold the buffer {empty[0]!r}"
            + (f" (and {len(empty) - 1} more)" if len(empty) > 1 else "")
            + ", and it is on the meta device: make the model under init_empty_weights() instead, "
            "which keeps the values of buffers, or give it a value"
        )


def _load(match: Match, source: Source, device: torch.device) -> int:
    """Fill one tensor of the model; gives the bytes read."""
    first, *others = match.names
    tensor = match.slot.with_memory(device)
    bytes_read = source.read(first, tensor)
    for other in others:
        twin = empty_like(tensor, device)
        bytes_read += source.read(other, twin)
        # As bytes, since a number may be NaN.
        if not torch.equal(_bytes(tensor), _bytes(twin)):
            raise CheckpointError(
                f"{first!r} and {other!r} are one tensor in the model, and differ in the checkpoint"
            )
    if match.slot.is_meta:
        match.slot.put(tensor)
    return bytes_read


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor).reshape(-1).view(torch.uint8)
