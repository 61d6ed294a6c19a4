"""Files that are not checkpoints, or lack the requested weights."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.checkpoints import (
    Tied,
    as_dcp,
    saved,
    sharded,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader

from autoshard.checkpoint import load_checkpoint
from autoshard.checkpoint.readers import open_checkpoint
from autoshard.errors import CheckpointError


def cut_off(tmp_path: Path) -> Path:
    path = saved(tmp_path)
    os.truncate(path, path.stat().st_size - 10)
    return path


def garbage(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    return path


def half_a_byte(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    values = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    safetensors.torch.save_file({"it": values}, path)
    return path


def no_entry(tmp_path: Path) -> Path:
    return changed_index(tmp_path, lambda places: places.pop("norm.bias"))


def wrong_entry(tmp_path: Path) -> Path:
    def move(places: dict[str, str]) -> None:
        places["norm.bias"] = places["embedding.weight"]

    return changed_index(tmp_path, move)


def no_file(tmp_path: Path) -> Path:
    path = sharded(tmp_path)
    (path.parent / "model-00002-of-00003.safetensors").unlink()
    return path


def outside(tmp_path: Path) -> Path:
    return changed_index(tmp_path, lambda places: places.update(it="../other.safetensors"))


def changed_index(tmp_path: Path, change: Callable[[dict[str, str]], Any]) -> Path:
    path = sharded(tmp_path)
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    return path


def no_index(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weights": []}')
    return path


def no_json(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text("weight_map: {}")
    return path


def two_files(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        safetensors.torch.save_file({"it": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    return tmp_path


def only_torch(tmp_path: Path) -> Path:
    torch.save({}, tmp_path / "pytorch_model.bin")
    return tmp_path


def nothing(tmp_path: Path) -> Path:
    return tmp_path / "nothing"


def other_suffix(tmp_path: Path) -> Path:
    (tmp_path / "weights.h5").write_bytes(b"")
    return tmp_path / "weights.h5"


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def code_in_torch_file(tmp_path: Path) -> Path:
    torch.save({"it": Evil(tmp_path / "evil")}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def code_in_metadata(tmp_path: Path) -> Path:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    return tmp_path


def other_metadata(tmp_path: Path) -> Path:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    return tmp_path


def damaged_metadata(tmp_path: Path) -> Path:
    as_dcp(tmp_path, Tied())
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes()[:100])
    return tmp_path


def damaged_chunks(tmp_path: Path) -> Path:
    as_dcp(tmp_path, Tied())
    for path in tmp_path.glob("*.distcp"):
        os.truncate(path, 300)
    return tmp_path


def chunks_elsewhere(tmp_path: Path) -> Path:
    as_dcp(tmp_path, Tied())
    metadata = FileSystemReader(tmp_path).read_metadata()
    for stored in metadata.storage_data.values():
        stored.relative_path = "/etc/hostname"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path


def lost_chunks(tmp_path: Path) -> Path:
    as_dcp(tmp_path, Tied())
    metadata = FileSystemReader(tmp_path).read_metadata()
    metadata.storage_data.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path


def old_torch_file(tmp_path: Path) -> Path:
    torch.save(Tied().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    return tmp_path / "old.pt"


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (cut_off, "not a complete safetensors file"),
        (garbage, "not a complete safetensors file"),
        (half_a_byte, "dtype F4, which torch does not support"),
        (no_entry, "it lacks 'norm.bias'"),
        (wrong_entry, "lacks 'norm.bias', which the index lists"),
        (no_file, "names .*model-00002-of-00003.safetensors, which does not exist"),
        (outside, "'../other.safetensors', which is not in the same folder"),
        (no_index, "not an index with a weight_map"),
        (no_json, "not an index with a weight_map"),
        (two_files, "several checkpoints; name one of one.safetensors, two.safetensors"),
        (only_torch, "pass the path of pytorch_model.bin itself if you trust it"),
        (nothing, "there is no checkpoint at .*nothing"),
        (other_suffix, "checkpoints end in .safetensors"),
        (code_in_torch_file, "not a file of torch.save with only tensors"),
        (old_torch_file, "in its format since torch 1.6"),
        (code_in_metadata, "posix.mkdir is not allowed in metadata"),
        (other_metadata, "not the metadata of a checkpoint"),
        (damaged_metadata, "not the metadata of a checkpoint"),
        (damaged_chunks, "reading 'embedding.weight' failed"),
        (lost_chunks, "reading 'embedding.weight' failed"),
        (chunks_elsewhere, "'/etc/hostname', which is not in the same folder"),
    ],
)
def test_files_that_cannot_be_read(
    make: Callable[[Path], Path], complaint: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(Tied(), path)
    assert not (tmp_path / "evil").exists()


def test_a_file_that_is_cut_off_later(tmp_path: Path) -> None:
    path = saved(tmp_path)
    source = open_checkpoint(path)
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=r"reading 'norm.bias' failed: the file ends before"):
        source.read("norm.bias", torch.empty(16))
