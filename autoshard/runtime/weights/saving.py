"""Saves full weights; a rank needs memory only for its shards and one received shard."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import product, zip_longest
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import CheckpointError
from autoshard.runtime.dtensors import local_tensor
from autoshard.runtime.pipelining import Pipelined
from autoshard.runtime.shards import (
    SubShard,
    dtensor_slices,
    local_sub_shards,
    shape_of,
    sub_shards,
)
from autoshard.runtime.weights.model_tensors import model_tensors
from autoshard.runtime.weights.readers import INDEX, MODEL, SAFETENSORS
from autoshard.runtime.weights.safetensors_file import (
    StoredTensor,
    TensorInfo,
    write_header,
    write_slice,
)

Division = Mapping[str, Mapping[str, TensorInfo]]
"""The tensors of each file, by name."""


def save_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: int = 5_000_000_000
) -> None:
    """Save a model's weights as safetensors files, with an index if there are several.

    Call it on all ranks of the mesh, with a folder that all of them share. The files contain
    full tensors under the names of the state dict, tied ones under the first of their names; any
    plan, an unsharded model or transformers can load them. Each file is written by one rank, to
    which the others send their shards one by one. (Save the state of an optimizer with
    `torch.distributed.checkpoint` and `dcp_state_dict`.)

    Args:
        model: a model returned by `parallelize`, or any other module.
        folder: folder of the files, created if necessary; must not contain safetensors files.
        max_file_bytes: maximum size of the tensors in a file; a larger tensor has a file to itself.

    Raises:
        CheckpointError: the folder already has safetensors files, a tensor is on the meta device,
            or this or another rank cannot write a file. The checkpoint is then incomplete.
    """
    folder = Path(folder)
    files = _Files.of_stages(model, max_file_bytes) if isinstance(model, Pipelined) else None
    files = files or _Files.of(model, max_file_bytes)
    mesh, tensors = files.mesh, files.tensors
    own = {
        file: FileWriter(folder / file, files.all[file])
        for file, writer in files.writers.items()
        if writer == _own_rank()
    }
    _on_all_ranks(mesh, lambda: _check(tensors, folder))
    try:
        _on_all_ranks(mesh, lambda: _for_all(own, FileWriter.begin))
        gatherer = _Gatherer()
        for file, name in _round_robin({file: files.all[file] for file in files.writers}):
            for sub_shard in gatherer.sub_shards(tensors[name], files.writers[file]):
                own[file].write(name, sub_shard)
        _on_all_ranks(mesh, lambda: _for_all(own, FileWriter.check))
        _on_all_ranks(mesh, lambda: _check_shared(folder, files.all))
        _on_all_ranks(mesh, lambda: _for_all(own, FileWriter.finish))
    finally:
        _for_all(own, FileWriter.discard)
    is_first = _own_rank() == files.first
    _on_all_ranks(mesh, lambda: _write_index(folder, files.all, is_first=is_first))


@dataclass(frozen=True)
class _Files:
    """The files of a checkpoint, and who writes them.

    Attributes:
        tensors: those of this rank that are saved, by name.
        all: all files.
        writers: the rank that writes each file, of the files with tensors of this rank.
        mesh: all ranks; None for a model without shards.
        first: the rank that writes the index.
    """

    tensors: Mapping[str, torch.Tensor]
    all: Division
    writers: Mapping[str, int]
    mesh: DeviceMesh | None
    first: int

    @classmethod
    def of(cls, model: nn.Module, max_file_bytes: int) -> "_Files":
        """The files of a model whose tensors are on all ranks."""
        tensors = {one.names[0]: one.tensor.detach() for one in model_tensors(model)}
        mesh = next((t.device_mesh for t in tensors.values() if isinstance(t, DTensor)), None)
        ranks = [_own_rank()] if mesh is None else mesh.mesh.flatten().tolist()
        files = _named(_divide(tensors, max_file_bytes))
        writers = {file: ranks[number % len(ranks)] for number, file in enumerate(files)}
        return cls(tensors, files, writers, mesh, ranks[0])

    @classmethod
    def of_stages(cls, model: Pipelined, max_file_bytes: int) -> "_Files":
        """The files of a model with pipeline stages: the ranks of a stage write its own."""
        assert isinstance(model, nn.Module)
        devices = model.devices
        tensors = {name: one.tensor.detach() for one in model_tensors(model) for name in one.names}
        groups = [
            (position, group)
            for position, saved in enumerate(model.saved_tensors)
            for group in _divide(saved, max_file_bytes)
            if group
        ]
        files = _named([group for _, group in groups])
        ranks = devices.ranks[devices.own_stages[0]]
        own = [f for f, (place, _) in zip(files, groups, strict=True) if place == devices.position]
        return cls(
            tensors={name: tensors[name] for name in model.saved_tensors[devices.position]},
            all=files,
            writers={file: ranks[number % len(ranks)] for number, file in enumerate(own)},
            mesh=devices.whole,
            first=int(devices.whole.mesh.flatten()[0]),
        )


def _check(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    empty = [name for name, tensor in tensors.items() if local_tensor(tensor).is_meta]
    if empty:
        raise CheckpointError(f"{empty[0]!r} is on the meta device, so there is nothing to save")
    folder.mkdir(parents=True, exist_ok=True)
    existing = sorted(path.name for path in folder.glob(f"*{SAFETENSORS}*"))
    if existing:
        raise CheckpointError(f"{folder} already has {existing[0]}; save into another folder")


def _divide(
    tensors: Mapping[str, torch.Tensor], max_file_bytes: int
) -> list[dict[str, TensorInfo]]:
    """The tensors of each file."""
    groups: list[dict[str, TensorInfo]] = [{}]
    free = max_file_bytes
    for name, tensor in tensors.items():
        info = TensorInfo(tuple(tensor.shape), tensor.dtype)
        if info.nbytes > free and groups[-1]:
            groups.append({})
            free = max_file_bytes
        groups[-1][name] = info
        free -= info.nbytes
    return groups


def _named(groups: Sequence[Mapping[str, TensorInfo]]) -> Division:
    if len(groups) == 1:
        return {MODEL: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}{SAFETENSORS}": group
        for number, group in enumerate(groups, start=1)
    }


def _round_robin(division: Division) -> Iterator[tuple[str, str]]:
    """File and name of each tensor, alternating between files so that ranks write in parallel."""
    for row in zip_longest(*([(file, name) for name in division[file]] for file in division)):
        yield from filter(None, row)


def _for_all(own: Mapping[str, "FileWriter"], step: Callable[["FileWriter"], None]) -> None:
    for writer in own.values():
        step(writer)


def _on_all_ranks(mesh: DeviceMesh | None, step: Callable[[], None]) -> None:
    """Run a step on all ranks; if it fails on one, all of them raise `CheckpointError`."""
    failure: Exception | None = None
    try:
        step()
    except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
        failure = error
    failed = failure is not None
    if mesh is not None:
        flag = torch.tensor(int(failed), device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MAX, mesh.get_group(axis))
        failed = bool(flag)
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"saving failed: {failure}") from failure
    if failed:
        raise CheckpointError("saving failed on another rank; see its error")


def _check_shared(folder: Path, division: Division) -> None:
    for file in division:
        if not _unfinished(folder / file).exists():
            raise CheckpointError(
                f"{folder} is not the same folder on all ranks: {file}, which another rank has "
                f"written, does not exist"
            )


def _write_index(folder: Path, division: Division, *, is_first: bool) -> None:
    """Write the index on the first rank, if there are several files."""
    if not is_first or len(division) == 1:
        return
    tensors = [info for group in division.values() for info in group.values()]
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in tensors)},
        "weight_map": {name: file for file, names in division.items() for name in names},
    }
    (folder / f"{MODEL}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")


def _own_rank() -> int:
    """Global rank of this process; 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def _unfinished(path: Path) -> Path:
    """The temporary path of a file that is being written."""
    return path.with_name(f"{path.name}.unfinished")


class FileWriter:
    """Writes a safetensors file in slices, under a temporary name until it is complete.

    Args:
        path: final path of the file.
        tensors: the tensors of the file by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._unfinished = _unfinished(path)
        self._tensors = tensors
        self._stored: Mapping[str, StoredTensor] = {}
        self._failure: OSError | None = None

    def begin(self) -> None:
        """Create the file.

        Raises:
            CheckpointError: the format does not support a dtype.
            OSError: the file cannot be created.
        """
        self._stored = write_header(self._unfinished, self._tensors)

    def write(self, name: str, sub_shard: SubShard) -> None:
        """Write a slice of a tensor.

        A failure is raised only by `check`, since the shards that other ranks send must still be
        received.
        """
        if self._failure is not None:
            return
        values = sub_shard.local.detach().cpu().contiguous()
        try:
            with FileIO(self._unfinished, "r+") as file:
                write_slice(file, self._stored[name], sub_shard.index, values)
        except OSError as error:
            self._failure = error

    def check(self) -> None:
        """Raise the first failure of `write`, an `OSError`."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Rename the complete file to its final path; may raise an `OSError`."""
        self._unfinished.rename(self._path)

    def discard(self) -> None:
        """Remove the file if it is not finished."""
        self._unfinished.unlink(missing_ok=True)


class _Gatherer:
    """Gathers the shards of tensors on one rank, with one receive buffer."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def sub_shards(self, tensor: torch.Tensor, writer: int) -> Iterator[SubShard]:
        """Gather the sub-shards of a tensor on the rank that writes it.

        All ranks of the tensor's mesh must exhaust the iterator. Every shard that the writer does
        not have is sent once.

        Args:
            tensor: a DTensor, or a plain tensor that is the same on all ranks.
            writer: global rank of the writer.

        Yields:
            On the writer, all sub-shards of the tensor, each valid until the next one is yielded;
            on other ranks, nothing.
        """
        if not isinstance(tensor, DTensor):
            if _own_rank() == writer:
                yield from local_sub_shards(tensor)
            return
        local = tensor.to_local()
        for owner, coordinate in _owners(tensor, writer):
            slices = dtensor_slices(tensor, coordinate)
            if _own_rank() == owner == writer:
                yield from sub_shards(local, slices)
            elif _own_rank() == owner:
                dist.send(local.contiguous().reshape(-1).view(torch.uint8), writer)
            elif _own_rank() == writer:
                shape = shape_of(slices)
                received = self._receive(prod(shape) * local.itemsize, local.device, owner)
                yield from sub_shards(received.view(local.dtype).view(shape), slices)

    def _receive(self, num_bytes: int, device: torch.device, source: int) -> torch.Tensor:
        """Receive a tensor as bytes, a dtype that all backends support."""
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        dist.recv(self._buffer[:num_bytes], source)
        return self._buffer[:num_bytes]


def _owners(tensor: DTensor, writer: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each distinct shard, the rank that sends it, and that rank's coordinate.

    On axes that replicate the tensor, the sender has the writer's coordinate.
    """
    ranks = tensor.device_mesh.mesh
    home = (ranks == writer).nonzero()[0].tolist()
    choices = [
        [own] if placement.is_replicate() else range(size)
        for own, placement, size in zip(home, tensor.placements, ranks.shape, strict=True)
    ]
    for coordinate in product(*choices):
        yield int(ranks[coordinate]), coordinate
