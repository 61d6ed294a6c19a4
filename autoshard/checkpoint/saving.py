"""Saves full weights; a rank needs memory only for its shards and one received shard."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import count, product, zip_longest
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.base.arguments import FileBytes, check_arguments
from autoshard.checkpoint.files import (
    agreed,
    finish,
    first_rank,
    make_folder,
    on_all_ranks,
    on_first_rank,
    own_rank,
    sync,
    unfinished,
    write_unfinished,
)
from autoshard.checkpoint.readers import INDEX, MODEL, SAFETENSORS
from autoshard.checkpoint.safetensors_file import (
    StoredTensor,
    TensorInfo,
    write_header,
    write_slice,
)
from autoshard.errors import CheckpointError
from autoshard.runtime.parameters.model_tensors import ModelTensor, model_tensors, other_state
from autoshard.runtime.pipelining import Pipelined
from autoshard.runtime.shards import (
    SubShard,
    dtensor_slices,
    local_sub_shards,
    shape_of,
    sub_shards,
)

Division = Mapping[str, Mapping[str, TensorInfo]]
"""The tensors of each file, by name."""


@check_arguments
def save_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: FileBytes = 5_000_000_000
) -> None:
    """Save a model's weights as safetensors files, with an index if there are several.

    Call it on all ranks of the mesh, with a folder that all of them share. The files contain
    full tensors under the names of the state dict, tied ones under the first of their names; any
    plan, an unsharded model or transformers can load them. Each file is written by one rank, to
    which the others send their shards one by one. (Save the state of an optimizer with
    `torch.distributed.checkpoint` and `dcp_state_dict`.)

    The checkpoint is there when all of it is on the disk. What an interrupted save has left in the
    folder is removed.

    Args:
        model: a model returned by `parallelize`, or any other module.
        folder: folder of the files, created if necessary; must not contain safetensors files.
        max_file_bytes: maximum size of the tensors in a file; a larger tensor has a file to itself.

    Raises:
        CheckpointError: the folder already has safetensors files, a tensor is on the meta device,
            the state dict has something else than tensors, or this or another rank cannot write a
            file. There is then no checkpoint.
    """
    write_weights(model, Path(folder), max_file_bytes, replaces=False)


def write_weights(model: nn.Module, folder: Path, max_file_bytes: int, *, replaces: bool) -> None:
    """Save a model's weights as `save_checkpoint` does.

    One file is renamed when all of the checkpoint is on the disk: the only one, or the index. Until
    then an earlier checkpoint in the folder is complete, and it is removed afterwards.

    Args:
        model: as for `save_checkpoint`.
        folder: of the files.
        max_file_bytes: maximum size of the tensors in a file.
        replaces: True to replace the checkpoint in the folder; if False, there must be none.

    Raises:
        CheckpointError: as by `save_checkpoint`; an earlier checkpoint is still there.
    """
    tensors = model_tensors(model)
    mesh = _mesh_of(model, tensors)
    on_all_ranks(mesh, lambda: _check(model, tensors, folder))
    on_first_rank(mesh, lambda: _prepare(folder, replaces=replaces))
    number = agreed(mesh, lambda: _free_number(folder))
    if isinstance(model, Pipelined):
        files = _Files.of_stages(model, tensors, max_file_bytes, number)
    else:
        files = _Files.of(tensors, mesh, max_file_bytes, number)
    own = {
        file: FileWriter(folder / file, files.all[file])
        for file, writer in files.writers.items()
        if writer == own_rank()
    }
    try:
        _write(files, own, folder)
    except BaseException:
        _for_all(own, FileWriter.discard)
        if own_rank() == first_rank(mesh):
            with suppress(OSError):
                _remove_unfinished(folder)
        raise
    if replaces:
        on_first_rank(mesh, lambda: _remove_former(folder, files.all), "removing earlier files")


def _write(files: "_Files", own: Mapping[str, "FileWriter"], folder: Path) -> None:
    """Write all files, and rename them when they are on the disk."""
    mesh, index = files.mesh, folder / f"{MODEL}{INDEX}"
    on_all_ranks(mesh, lambda: _for_all(own, FileWriter.begin))
    gatherer = _Gatherer()
    for file, name in _round_robin({file: files.all[file] for file in files.writers}):
        for sub_shard in gatherer.sub_shards(files.tensors[name], files.writers[file]):
            own[file].write(name, sub_shard)
    on_all_ranks(mesh, lambda: _for_all(own, FileWriter.check))
    on_all_ranks(mesh, lambda: _check_shared(folder, files.all))
    if len(files.all) > 1:
        # It names what the next save removes if this one ends here.
        on_first_rank(mesh, lambda: write_unfinished(index, _index_text(files.all)))
    on_all_ranks(mesh, lambda: finish(folder / file for file in own))
    if len(files.all) > 1:
        on_first_rank(mesh, lambda: finish([index]))


def _mesh_of(model: nn.Module, tensors: Sequence[ModelTensor]) -> DeviceMesh | None:
    """The mesh of all ranks with tensors of a model; None for a model without shards."""
    if isinstance(model, Pipelined):
        return model.devices.whole
    shared = (one.tensor for one in tensors)
    return next((t.device_mesh for t in shared if isinstance(t, DTensor)), None)


@dataclass(frozen=True)
class _Files:
    """The files of a checkpoint, and who writes them.

    Attributes:
        tensors: those of this rank that are saved, by name.
        all: all files.
        writers: the rank that writes each file, of the files with tensors of this rank.
        mesh: all ranks; None for a model without shards.
    """

    tensors: Mapping[str, torch.Tensor]
    all: Division
    writers: Mapping[str, int]
    mesh: DeviceMesh | None

    @classmethod
    def of(
        cls,
        tensors: Sequence[ModelTensor],
        mesh: DeviceMesh | None,
        max_file_bytes: int,
        number: int,
    ) -> "_Files":
        """The files of a model whose tensors are on all ranks."""
        saved = {one.names[0]: one.tensor.detach() for one in tensors}
        ranks = [own_rank()] if mesh is None else mesh.mesh.flatten().tolist()
        files = _named(_divide(saved, max_file_bytes), number)
        writers = {file: ranks[position % len(ranks)] for position, file in enumerate(files)}
        return cls(saved, files, writers, mesh)

    @classmethod
    def of_stages(
        cls,
        model: Pipelined,
        tensors: Sequence[ModelTensor],
        max_file_bytes: int,
        number: int,
    ) -> "_Files":
        """The files of a model with pipeline stages: the ranks of a stage write its own."""
        devices = model.devices
        known = {name: one.tensor.detach() for one in tensors for name in one.names}
        groups = [
            (position, group)
            for position, saved in enumerate(model.saved_tensors)
            for group in _divide(saved, max_file_bytes)
            if group
        ]
        files = _named([group for _, group in groups], number)
        ranks = devices.ranks[devices.own_stages[0]]
        own = [f for f, (place, _) in zip(files, groups, strict=True) if place == devices.position]
        return cls(
            tensors={name: known[name] for name in model.saved_tensors[devices.position]},
            all=files,
            writers={file: ranks[position % len(ranks)] for position, file in enumerate(own)},
            mesh=devices.whole,
        )


def _check(model: nn.Module, tensors: Sequence[ModelTensor], folder: Path) -> None:
    for name, value in other_state(model).items():
        raise CheckpointError(
            f"safetensors files have only tensors, and {name!r} of the state dict is a "
            f"{type(value).__name__}: return a tensor from get_extra_state, or save "
            f"dcp_state_dict(model.state_dict()) with torch.distributed.checkpoint"
        )
    empty = [one.names[0] for one in tensors if one.is_meta]
    if empty:
        raise CheckpointError(f"{empty[0]!r} is on the meta device, so there is nothing to save")
    make_folder(folder)


def _prepare(folder: Path, *, replaces: bool) -> None:
    """Remove what an interrupted save has left, and check that nothing else is there."""
    _remove_unfinished(folder)
    existing = sorted(path.name for path in folder.glob(f"*{SAFETENSORS}*"))
    if existing and not replaces:
        raise CheckpointError(f"{folder} already has {existing[0]}; save into another folder")


def _remove_unfinished(folder: Path) -> None:
    """Remove the files of a save that did not come to its end; those of a checkpoint stay."""
    index = folder / f"{MODEL}{INDEX}"
    for name in _files_of(unfinished(index)) - _files_of(index):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob(unfinished(Path(f"*{SAFETENSORS}")).name):
        path.unlink(missing_ok=True)
    unfinished(index).unlink(missing_ok=True)


def _remove_former(folder: Path, division: Division) -> None:
    """Remove the files of an earlier checkpoint, first the one that readers look for."""
    index = f"{MODEL}{INDEX}"
    kept = {*division, *([index] if len(division) > 1 else [])}
    former = {path.name for path in folder.glob(f"model*{SAFETENSORS}*")} - kept
    for name in sorted(former, key=lambda name: name not in (index, MODEL)):
        (folder / name).unlink(missing_ok=True)
    sync(folder)


def _files_of(index: Path) -> set[str]:
    """The files that an index names; none if it was not written to its end."""
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {name for name in names if Path(name).name == name}


def _free_number(folder: Path) -> int:
    """The lowest number of a save whose files have names that no file in the folder has."""
    taken = [path.name for path in folder.glob(f"model-*{SAFETENSORS}")]
    return next(n for n in count(1) if not any(name.startswith(_prefix(n)) for name in taken))


def _prefix(number: int) -> str:
    return "model-0" if number == 1 else f"model-{number}-0"


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


def _named(groups: Sequence[Mapping[str, TensorInfo]], number: int) -> Division:
    """The files by name, of the save with a number."""
    if len(groups) == 1:
        return {MODEL: groups[0]}
    begin = _prefix(number).removesuffix("0")
    return {
        f"{begin}{position:05}-of-{len(groups):05}{SAFETENSORS}": group
        for position, group in enumerate(groups, start=1)
    }


def _round_robin(division: Division) -> Iterator[tuple[str, str]]:
    """File and name of each tensor, alternating between files so that ranks write in parallel."""
    for row in zip_longest(*([(file, name) for name in division[file]] for file in division)):
        yield from filter(None, row)


def _for_all(own: Mapping[str, "FileWriter"], step: Callable[["FileWriter"], None]) -> None:
    for writer in own.values():
        step(writer)


def _check_shared(folder: Path, division: Division) -> None:
    for file in division:
        if not unfinished(folder / file).exists():
            raise CheckpointError(
                f"{folder} is not the same folder on all ranks: {file}, which another rank has "
                f"written, does not exist"
            )


def _index_text(division: Division) -> str:
    tensors = [info for group in division.values() for info in group.values()]
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in tensors)},
        "weight_map": {name: file for file, names in division.items() for name in names},
    }
    return json.dumps(index, indent=2) + "\n"


class FileWriter:
    """Writes a safetensors file in slices, under a temporary name.

    Args:
        path: final path of the file.
        tensors: the tensors of the file by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._unfinished = unfinished(path)
        self._tensors = tensors
        self._stored: Mapping[str, StoredTensor] = {}
        self._failure: Exception | None = None

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
        try:
            values = sub_shard.local.detach().cpu().contiguous()
            with FileIO(self._unfinished, "r+") as file:
                write_slice(file, self._stored[name], sub_shard.index, values)
        except Exception as error:  # noqa: BLE001  a lack of memory, too
            self._failure = error

    def check(self) -> None:
        """Wait until the file is on the disk.

        Raises:
            Exception: the first failure of `write`.
            OSError: the file cannot be synced.
        """
        if self._failure is not None:
            raise self._failure
        sync(self._unfinished)

    def discard(self) -> None:
        """Remove the file if it is there; where that fails, the next save does."""
        with suppress(OSError):
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
            if own_rank() == writer:
                yield from local_sub_shards(tensor)
            return
        local = tensor.to_local()
        for owner, coordinate in _owners(tensor, writer):
            slices = dtensor_slices(tensor, coordinate)
            if own_rank() == owner == writer:
                yield from sub_shards(local, slices)
            elif own_rank() == owner:
                dist.send(local.contiguous().reshape(-1).view(torch.uint8), writer)
            elif own_rank() == writer:
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
