"""Saving weights whole, while no rank holds more of them than its own part and one slice."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import CheckpointError
from autoshard.runtime.weights.file_writer import FileWriter, unfinished
from autoshard.runtime.weights.opening import INDEX, MODEL, SAFETENSORS
from autoshard.runtime.weights.sending import Gathering, own_rank
from autoshard.runtime.weights.slots import local_of, slots_of
from autoshard.runtime.weights.source import Entry

Division = Mapping[str, Mapping[str, Entry]]
"""The tensors of each file, by their names."""


def save_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: int = 5_000_000_000
) -> None:
    """Save a model's weights as safetensors files, with an index where there are several.

    To be called on all ranks of the mesh, with a folder that all of them see. The files hold
    whole tensors under the names of the state dict, tied ones under the first of their names,
    for any plan, an unsharded model or transformers to load. Each file is written by one rank,
    to which the others send their slices one by one. (The state of an optimizer is saved by
    `torch.distributed.checkpoint`, through `dcp_state_dict`.)

    Args:
        model: planned, or any other module.
        folder: is made if it does not exist; must not hold safetensors files yet.
        max_file_bytes: tensors of more bytes than this are spread over several files, but none
            is split.

    Raises:
        CheckpointError: the folder holds such files already, a tensor has no values, or a file
            cannot be written, be it by another rank. What is left then is no whole checkpoint.
    """
    folder = Path(folder)
    tensors = {slot.names[0]: slot.tensor.detach() for slot in slots_of(model)}
    mesh = _mesh_of(tensors)
    ranks = [own_rank()] if mesh is None else mesh.mesh.flatten().tolist()
    division = _divide(tensors, max_file_bytes)
    writers = {file: ranks[number % len(ranks)] for number, file in enumerate(division)}
    own = {
        file: FileWriter(folder / file, division[file])
        for file, writer in writers.items()
        if writer == own_rank()
    }
    _together(mesh, lambda: _check(tensors, folder))
    try:
        _together(mesh, lambda: _for_all(own, FileWriter.begin))
        gathering = Gathering()
        for file, name in _in_turn(division):
            for block in gathering.blocks(tensors[name], writers[file]):
                own[file].write(name, block)
        _together(mesh, lambda: _for_all(own, FileWriter.check))
        _together(mesh, lambda: _check_shared(folder, division))
        _together(mesh, lambda: _for_all(own, FileWriter.finish))
    finally:
        _for_all(own, FileWriter.discard)
    _together(mesh, lambda: _write_index(folder, division, is_first=own_rank() == ranks[0]))


def _check(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    empty = [name for name, tensor in tensors.items() if local_of(tensor).is_meta]
    if empty:
        raise CheckpointError(f"{empty[0]!r} is on the meta device, so there is nothing to save")
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(path.name for path in folder.glob(f"*{SAFETENSORS}*"))
    if there:
        raise CheckpointError(f"{folder} holds {there[0]} already; save into another folder")


def _mesh_of(tensors: Mapping[str, torch.Tensor]) -> DeviceMesh | None:
    meshes = (t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
    return next(meshes, None)


def _divide(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> Division:
    groups: list[dict[str, Entry]] = [{}]
    room = max_file_bytes
    for name, tensor in tensors.items():
        entry = Entry(tuple(tensor.shape), tensor.dtype)
        if entry.nbytes > room and groups[-1]:
            groups.append({})
            room = max_file_bytes
        groups[-1][name] = entry
        room -= entry.nbytes
    if len(groups) == 1:
        return {MODEL: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}{SAFETENSORS}": group
        for number, group in enumerate(groups, start=1)
    }


def _in_turn(division: Division) -> Iterator[tuple[str, str]]:
    """File and name of each tensor; one of each file in turn, so that ranks write side by side."""
    for row in zip_longest(*([(file, name) for name in division[file]] for file in division)):
        yield from filter(None, row)


def _for_all(own: Mapping[str, FileWriter], step: Callable[[FileWriter], None]) -> None:
    for writer in own.values():
        step(writer)


def _together(mesh: DeviceMesh | None, step: Callable[[], None]) -> None:
    """Take a step on all ranks; where it fails on one, all of them raise.

    Raises:
        CheckpointError: it failed.
    """
    failure: Exception | None = None
    try:
        step()
    except Exception as error:  # noqa: BLE001  the other ranks must not wait, whatever it was
        failure = error
    anywhere = failure is not None
    if mesh is not None:
        flag = torch.tensor(int(anywhere), device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MAX, mesh.get_group(axis))
        anywhere = bool(flag)
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"saving failed: {failure}") from failure
    if anywhere:
        raise CheckpointError("saving failed on another rank, whose error says why")


def _check_shared(folder: Path, division: Division) -> None:
    for file in division:
        if not unfinished(folder / file).exists():
            raise CheckpointError(
                f"{folder} is not the same folder on all ranks: {file}, which another one has "
                f"written, is not there"
            )


def _write_index(folder: Path, division: Division, *, is_first: bool) -> None:
    """Write the index of several files, on one rank, when all of them are there."""
    if not is_first or len(division) == 1:
        return
    entries = [entry for entries in division.values() for entry in entries.values()]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {name: file for file, names in division.items() for name in names},
    }
    (folder / f"{MODEL}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
