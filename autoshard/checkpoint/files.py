"""Files that replace earlier ones: written beside them, synced, and renamed once.

A step that fails on one rank is an error on all ranks, so that none waits for the one that failed.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import CheckpointError
from autoshard.runtime.checks.agreement import first_failed, numbers_of_all_ranks

T = TypeVar("T")


def own_rank() -> int:
    """Global rank of this process; 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def first_rank(mesh: DeviceMesh | None) -> int:
    """The rank that does alone what no rank need do twice."""
    return own_rank() if mesh is None else int(mesh.mesh.flatten()[0])


@contextmanager
def raised_as_one(mesh: DeviceMesh | None, what: str = "saving") -> Iterator[None]:
    """A context in which an error on one rank becomes one on all, when all have left it.

    Args:
        mesh: of the ranks that take part; None for this process alone.
        what: fails, for the message.

    Raises:
        CheckpointError: a rank has failed.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
        failure = error
    failed = None if mesh is None else first_failed(mesh, failed=failure is not None)
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"{what} failed: {failure}") from failure
    if failed is not None:
        raise CheckpointError(f"{what} failed on another rank: see the error of rank {failed}")


def on_all_ranks(mesh: DeviceMesh | None, step: Callable[[], T], what: str = "saving") -> T:
    """Run a step on all ranks; if it fails on one, all of them raise `CheckpointError`.

    Args:
        mesh: of the ranks that take part; None for this process alone.
        step: what each rank does; it has no collectives.
        what: fails, for the message.

    Returns:
        The result of this rank.
    """
    with raised_as_one(mesh, what):
        return step()


def on_first_rank(
    mesh: DeviceMesh | None, step: Callable[[], object], what: str = "saving"
) -> None:
    """Run a step on the first rank; if it fails, all ranks raise `CheckpointError`."""
    is_first = own_rank() == first_rank(mesh)
    on_all_ranks(mesh, step if is_first else lambda: None, what)


def agreed(mesh: DeviceMesh | None, number: Callable[[], int]) -> int:
    """A number that the first rank computes, on all ranks."""
    if mesh is None:
        return number()
    is_first = own_rank() == first_rank(mesh)
    found = on_all_ranks(mesh, lambda: number() if is_first else 0)
    return int(numbers_of_all_ranks(torch.tensor([found]), mesh)[0, 0])


def unfinished(path: Path) -> Path:
    """The name of a file while it is written."""
    return path.with_name(f"{path.name}.unfinished")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk.

    Raises:
        OSError: they cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder with those above it, and sync what has its entry."""
    path.mkdir(parents=True, exist_ok=True)
    sync(path.parent)


def write_unfinished(path: Path, text: str) -> None:
    """Write a file beside its final place, and sync it."""
    with unfinished(path).open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def finish(paths: Iterable[Path]) -> None:
    """Rename files of one folder, which were written beside their final places and synced."""
    for path in paths:
        unfinished(path).replace(path)
        sync(path.parent)
