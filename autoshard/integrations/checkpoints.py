"""Checkpoints of planned models in the folders of training libraries.

Every rank writes and reads its own shards; all ranks must call these functions. What replaces an
earlier checkpoint is written beside it, and takes its place by one rename when it is on the disk:
a process that is killed, or a full disk, leaves the one or the other.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from autoshard.checkpoint.files import (
    agreed,
    first_rank,
    make_folder,
    on_all_ranks,
    on_first_rank,
    own_rank,
    raised_as_one,
    sync,
)
from autoshard.checkpoint.manifest import check_manifest, read_manifest, write_manifest
from autoshard.checkpoint.saving import write_weights
from autoshard.errors import CheckpointError
from autoshard.runtime import dcp_state_dict, rng_step
from autoshard.runtime.parallelize import planned_forward
from autoshard.runtime.pipelining import Pipelined

_VERSION = "planned-save-"
_STAGING = "unfinished-"
_FORMER = "former-"


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh of all ranks of a planned model.

    Raises:
        PlanError: the model does not run as planned.
    """
    return model.devices.whole if isinstance(model, Pipelined) else planned_forward(model).mesh


def replace_weights(
    model: nn.Module, folder: str | PathLike[str], *, max_file_bytes: int = 5_000_000_000
) -> None:
    """Save full weights as safetensors files, in place of those that an earlier save wrote.

    The earlier ones are removed when the new ones are on the disk.

    Args:
        model: returned by `parallelize`.
        folder: shared by all ranks.
        max_file_bytes: maximum size of the tensors in a file.

    Raises:
        CheckpointError: a rank cannot write; the earlier weights are still there.
    """
    write_weights(model, Path(folder), max_file_bytes, replaces=True)


def save_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], folder: str | PathLike[str]
) -> None:
    """Save the state of a model's optimizers, and the step of its random numbers.

    The checkpoint is one of `torch.distributed.checkpoint`, in a folder of its own inside of the
    given one; any other plan can load it. It replaces an earlier one when it is on the disk.

    Raises:
        CheckpointError: a rank cannot write; the earlier checkpoint is still there.
    """
    with new_version(Path(folder), mesh_of(model)) as version:
        write_optimizers(model, optimizers, version)


def write_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], folder: Path
) -> None:
    """Save the state of optimizers into a new folder.

    Raises:
        CheckpointError: a rank cannot write.
    """
    with _errors_of_torch("saving"):
        save(dcp_state_dict(_state(model, optimizers), model), checkpoint_id=folder)


def load_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], folder: str | PathLike[str]
) -> None:
    """Load what `save_optimizers` saved.

    Raises:
        CheckpointError: the files are not those of one save.
    """
    place = whole_version(Path(folder), mesh_of(model))
    state = _state(model, optimizers)
    loaded = dcp_state_dict(state, model)
    with _errors_of_torch("loading"):
        load(loaded, checkpoint_id=place)
    for number, optimizer in enumerate(optimizers):
        own = state[f"optimizer_{number}"]
        # Tensors share memory, numbers such as the learning rate do not.
        own["param_groups"] = loaded[f"optimizer_{number}"]["param_groups"]
        set_optimizer_state_dict(model, optimizer, optim_state_dict=own)


@contextmanager
def _errors_of_torch(what: str) -> Iterator[None]:
    """A context in which what failed on any rank, which torch raises on all, is an error of ours.

    Raises:
        CheckpointError: a rank has failed.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{what} the optimizer failed on {len(error.failures)} ranks; on rank {rank}: {cause}"
        ) from error


def _state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    states = {
        f"optimizer_{number}": get_optimizer_state_dict(model, optimizer)
        for number, optimizer in enumerate(optimizers)
    }
    return {**states, "rng_step": rng_step(model)}


@contextmanager
def new_version(folder: Path, mesh: DeviceMesh) -> Iterator[Path]:
    """A new folder inside of a folder, whose files become the checkpoint of it at the end.

    The manifest of the folder names one version of the checkpoint; it is renamed when all files
    are on the disk. The former version is then removed. All ranks must enter and leave it.

    Args:
        folder: of the checkpoint; other files in it stay.
        mesh: of the ranks.

    Yields:
        The folder for the files.

    Raises:
        CheckpointError: a rank has failed; the former version is still there.
    """
    on_all_ranks(mesh, lambda: make_folder(folder))
    on_first_rank(mesh, lambda: _remove_other_versions(folder))
    version = folder / f"{_VERSION}{agreed(mesh, lambda: _free_number(folder))}"
    try:
        on_all_ranks(mesh, lambda: make_folder(version))
        with raised_as_one(mesh):
            yield version
        write_manifest(folder, version.name, mesh)
    except BaseException:
        if own_rank() == first_rank(mesh):
            with suppress(OSError, CheckpointError):
                _remove_other_versions(folder)
        raise
    on_first_rank(mesh, lambda: _remove_other_versions(folder), "removing the former checkpoint")


def whole_version(folder: Path, mesh: DeviceMesh) -> Path:
    """The folder with the files of a checkpoint, which were all saved together.

    Args:
        folder: has a manifest; one without is returned as it is.
        mesh: of the ranks.

    Raises:
        CheckpointError: a file is of another save, or no save has come to its end.
    """
    manifest = on_all_ranks(mesh, lambda: read_manifest(folder), "loading")
    if manifest is not None:
        check_manifest(folder, manifest, mesh)
        return folder / manifest.folder
    if folder.is_dir() and _versions(folder):
        raise CheckpointError(
            f"{folder} has no whole checkpoint: the first save into it was interrupted"
        )
    return folder


def is_whole(folder: Path) -> bool:
    """True if a save into a folder has come to its end."""
    return read_manifest(folder) is not None or (any(folder.iterdir()) and not _versions(folder))


@contextmanager
def new_folder(folder: Path, mesh: DeviceMesh) -> Iterator[Path]:
    """A new folder with a manifest, which is renamed to its place when all of it is on the disk.

    Args:
        folder: its place; a folder that is there is replaced.
        mesh: of the ranks.

    Yields:
        The folder in which the one of the same name is made.

    Raises:
        CheckpointError: a rank has failed; the former folder is still there.
    """
    staging = folder.with_name(f"{_STAGING}{folder.name}")
    on_all_ranks(mesh, lambda: make_folder(folder.parent))
    on_first_rank(mesh, lambda: settle(folder))
    try:
        on_all_ranks(mesh, lambda: make_folder(staging / folder.name))
        with raised_as_one(mesh):
            yield staging
        write_manifest(staging / folder.name, ".", mesh)
        on_first_rank(mesh, lambda: _exchange(staging / folder.name, folder))
    except BaseException:
        if own_rank() == first_rank(mesh):
            with suppress(OSError):
                settle(folder)
        raise
    on_first_rank(mesh, lambda: settle(folder), "removing the former checkpoint")


def move_files(source: Path, target: Path) -> None:
    """Move the files of a folder into another one, each by a rename when all are on the disk."""
    make_folder(target)
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in files:
        sync(path)
    for path in files:
        place = target / path.relative_to(source)
        make_folder(place.parent)
        path.replace(place)
        sync(place.parent)


def settle(folder: Path) -> None:
    """Remove what an interrupted save of a folder has left; if it had moved it away, it is back."""
    former, staging = (folder.with_name(f"{b}{folder.name}") for b in (_FORMER, _STAGING))
    if former.exists() and not folder.exists():
        former.rename(folder)
    for left in (former, staging):
        if left.exists():
            shutil.rmtree(left)
    sync(folder.parent)


def settle_all(parent: Path, name: str) -> None:
    """Settle the interrupted saves of all folders in another one.

    Args:
        parent: has the folders.
        name: regular expression of their names.
    """
    for path in [*parent.iterdir()] if parent.is_dir() else []:
        match = re.fullmatch(rf"(?:{_FORMER}|{_STAGING})({name})", path.name)
        if match is not None and path.is_dir():
            settle(parent / match[1])


def _exchange(new: Path, folder: Path) -> None:
    # A folder that has files cannot be replaced by a rename.
    if folder.exists():
        folder.rename(folder.with_name(f"{_FORMER}{folder.name}"))
    new.rename(folder)
    sync(folder.parent)


def _remove_other_versions(folder: Path) -> None:
    """Remove all versions of a checkpoint but the one that the manifest names."""
    manifest = read_manifest(folder)
    for version in _versions(folder).values():
        if manifest is None or version.name != manifest.folder:
            shutil.rmtree(version)


def _free_number(folder: Path) -> int:
    return 1 + max(_versions(folder), default=0)


def _versions(folder: Path) -> dict[int, Path]:
    """The folders of all versions of a checkpoint, by number."""
    found = ((path, re.fullmatch(rf"{_VERSION}(\d+)", path.name)) for path in folder.iterdir())
    return {int(match[1]): path for path, match in found if match and path.is_dir()}
