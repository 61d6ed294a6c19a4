"""Manifests of checkpoints: digests of the files that belong together.

Weights of one save and an optimizer of another one would go on with wrong numbers. Each rank
computes the digests of a part of the files, when they are saved and when they are loaded.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.checkpoint.files import (
    finish,
    on_all_ranks,
    on_first_rank,
    own_rank,
    sync,
    write_unfinished,
)
from autoshard.errors import CheckpointError
from autoshard.runtime.checks.agreement import broadcast_text, numbers_of_all_ranks

MANIFEST = "checkpoint.json"
_FORMAT = 1
_EDITED = (".json", ".md", ".txt")
"""Endings of files that people edit, and on which weights and optimizer do not depend."""

_INDEX = ".index.json"
_NUMBERS = struct.Struct("<q4q")
"""Size and digest of a file, as ranks exchange them."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Contents of a file.

    Attributes:
        bytes: size; -1 if there is no such file.
        sha256: digest of the contents, hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint.

    Attributes:
        folder: where they are, beside the manifest; "." if in the same folder.
        files: by path in that folder.
    """

    folder: str
    files: Mapping[str, FileDigest]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a folder; None if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / MANIFEST
    try:
        found: Any = json.loads(path.read_bytes())
        files = {str(name): FileDigest(**contents) for name, contents in found["files"].items()}
        inner = str(found["folder"])
        version = found["format"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint: {error!r}") from error
    if version != _FORMAT or (inner != "." and Path(inner).name != inner):
        raise CheckpointError(f"{path} is not a manifest that this version of autoshard reads")
    return Manifest(inner, files)


def write_manifest(folder: Path, inner: str, mesh: DeviceMesh | None) -> None:
    """Sync the files of a checkpoint, and then name them in a manifest; called on all ranks.

    Args:
        folder: of the manifest, which replaces an earlier one.
        inner: name of the folder in it that has the files; "." if that is the same.
        mesh: of the ranks.

    Raises:
        CheckpointError: a file cannot be read or synced, or the manifest cannot be written.
    """
    place = folder / inner
    listed: list[str] = []
    on_first_rank(mesh, lambda: listed.extend(_files_in(place)))
    names = listed if mesh is None else json.loads(broadcast_text(json.dumps(listed), mesh))
    files = _digests(place, names, mesh)
    tied = {name: asdict(found) for name, found in files.items() if _is_tied(name)}
    text = json.dumps({"format": _FORMAT, "folder": inner, "files": tied}, indent=1) + "\n"

    def write() -> None:
        for path in {(place / name).parent for name in names} | {place}:
            sync(path)
        write_unfinished(folder / MANIFEST, text)
        finish([folder / MANIFEST])

    on_first_rank(mesh, write)


def check_manifest(folder: Path, manifest: Manifest, mesh: DeviceMesh | None) -> None:
    """Check that the files of a checkpoint are those that were saved together, on all ranks.

    Raises:
        CheckpointError: one is missing or has other contents, or cannot be read.
    """
    place = folder / manifest.folder
    found = _digests(place, list(manifest.files), mesh, what="loading")
    wrong = [name for name, contents in manifest.files.items() if found[name] != contents]
    if wrong:
        name, more = wrong[0], len(wrong) - 1
        is_there = found[name].bytes >= 0
        raise CheckpointError(
            f"{place} is not one whole checkpoint: {name!r} "
            + ("has other contents than when it was saved" if is_there else "is missing")
            + (f", and so with {more} more files" if more else "")
            + f". It was replaced, damaged or removed after the save that {folder / MANIFEST} "
            f"describes, so weights and optimizer may be of different steps: load another "
            f"checkpoint"
        )


def _is_tied(name: str) -> bool:
    return name.endswith(_INDEX) or not name.endswith(_EDITED)


def _files_in(place: Path) -> list[str]:
    """The files in a folder and in those below, by path."""
    paths = (path.relative_to(place) for path in place.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.name != MANIFEST)


def _digests(
    place: Path, names: Sequence[str], mesh: DeviceMesh | None, what: str = "saving"
) -> dict[str, FileDigest]:
    """The contents of files, of which each rank reads a part, and syncs it if it can.

    Raises:
        CheckpointError: a rank cannot read a file.
    """
    ranks = [own_rank()] if mesh is None else mesh.mesh.flatten().tolist()
    position = ranks.index(own_rank())
    mine = range(position, len(names), len(ranks))
    found = on_all_ranks(
        mesh,
        lambda: {number: _numbers_of(place / names[number], what=what) for number in mine},
        what,
    )
    none = (-1, 0, 0, 0, 0)
    own = torch.tensor([found.get(number, none) for number in range(len(names))])
    if mesh is not None and names:
        every = numbers_of_all_ranks(own.flatten(), mesh).view(len(ranks), len(names), 5)
        own = torch.stack([every[n % len(ranks), n] for n in range(len(names))])
    packed = (_NUMBERS.pack(*row) for row in own.tolist())
    return {
        name: FileDigest(_NUMBERS.unpack(data)[0], data[8:].hex())
        for name, data in zip(names, packed, strict=True)
    }


def _numbers_of(path: Path, *, what: str) -> tuple[int, ...]:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            size = os.fstat(file.fileno()).st_size
            if what == "saving":
                os.fsync(file.fileno())
    except FileNotFoundError:
        if what == "saving":
            raise
        return (-1, 0, 0, 0, 0)
    return _NUMBERS.unpack(struct.pack("<q", size) + digest)
