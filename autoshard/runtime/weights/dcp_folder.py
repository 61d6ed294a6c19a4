"""Weights in a folder of `torch.distributed.checkpoint`."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autoshard.errors import CheckpointError
from autoshard.runtime.checkpoints import dcp_state_dict
from autoshard.runtime.weights.source import Entry

METADATA = ".metadata"
"""The file that makes a folder such a checkpoint."""

_HARMLESS = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What metadata is made of, beside torch's dtypes."""


_BROKEN = (
    AssertionError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What torch raises where the files of a folder are not what its metadata says."""


class DcpFolder:
    """Tensors in a folder of `torch.distributed.checkpoint`.

    A rank reads every stored chunk of which it holds something, whole, since a chunk cannot be
    read in part. No collectives run.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: the metadata cannot be read, or names anything but metadata and files
            of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read_metadata(folder / METADATA)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The whole tensors by name; keys of nested dictionaries are joined by dots."""
        return {
            name: Entry(tuple(stored.size), stored.properties.dtype)
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill what this rank holds of a tensor; see `Source`."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dcp_state_dict({name: tensor}), self._metadata, is_coordinator=True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        plan = planner.finish_plan(plan)
        stored = self._metadata.storage_data
        try:
            self._reader.read_data(plan, planner).wait()
        except _BROKEN as error:
            raise CheckpointError(f"{self._folder}: reading {name!r} failed: {error!r}") from error
        return sum(stored[item.storage_index].length for item in plan.items)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the objects of metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Find a class, if it is one of metadata's."""
        if name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no metadata")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    # Bytes that are no pickle may raise nearly anything.
    except Exception as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is not the metadata of a checkpoint")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"{path} names {stored.relative_path!r}, which is not beside it")
    return metadata
