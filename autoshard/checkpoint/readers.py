"""Readers of checkpoints: safetensors, `torch.save` and `torch.distributed.checkpoint`."""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autoshard.checkpoint.safetensors_file import TensorInfo, read_header, read_slice
from autoshard.errors import CheckpointError
from autoshard.runtime.global_tensors.dtensors import dcp_state_dict, local_tensor
from autoshard.runtime.shards import local_sub_shards

SAFETENSORS = ".safetensors"
INDEX = ".index.json"
MODEL = f"model{SAFETENSORS}"
"""File name of a checkpoint with a single file."""

PIECE = 1 << 23
"""Number of bytes read at a time, which bounds the host memory that loading to a device needs."""

_TORCH = (".bin", ".ckpt", ".pt", ".pth")
_DCP_METADATA = ".metadata"

Files = Mapping[Path, Sequence[str] | None]
"""Files of a checkpoint, and the tensors that the index lists in each; None without an index."""

T = TypeVar("T")


class CheckpointReader(Protocol):
    """A checkpoint whose tensors can be read in slices."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The global tensors by name."""
        ...

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill this rank's shard of a tensor, converting to its dtype.

        Args:
            name: name in the checkpoint.
            tensor: a DTensor, or a full tensor of the global shape.

        Returns:
            Number of bytes read.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        ...


def open_checkpoint(path: Path) -> CheckpointReader:
    """Open a checkpoint: a file, the index of several files, or a folder.

    Raises:
        CheckpointError: there is no checkpoint, the folder has several, or it cannot be read.
    """
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if path.is_dir():
        is_dcp = (path / _DCP_METADATA).exists()
        return DcpReader(path) if is_dcp else open_checkpoint(_only_file(path))
    files = _indexed(path) if path.name.endswith(INDEX) else {path: None}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"the index names {file}, which does not exist")
    suffixes = {file.suffix for file in files}
    if suffixes <= {SAFETENSORS}:
        return SafetensorsReader(files)
    if suffixes <= set(_TORCH):
        return TorchReader(files)
    raise CheckpointError(
        f"{', '.join(str(file) for file in files)}: checkpoints end in {SAFETENSORS}, "
        f"{', '.join(_TORCH)} or {INDEX}"
    )


def _only_file(folder: Path) -> Path:
    indexes, files = (sorted(folder.glob(f"*{SAFETENSORS}{end}")) for end in (INDEX, ""))
    candidates = indexes or [path for path in files if path.name == MODEL] or files
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(candidate.name for candidate in candidates)
        raise CheckpointError(f"{folder} has several checkpoints; name one of {names}")
    others = sorted(p.name for p in folder.iterdir() if p.suffix in _TORCH)
    hint = f"; pass the path of {others[0]} itself if you trust it" if others else ""
    raise CheckpointError(
        f"{folder} has neither safetensors files nor a checkpoint of "
        f"torch.distributed.checkpoint{hint}"
    )


def _indexed(path: Path) -> dict[Path, Sequence[str] | None]:
    """The files that an index names, and the tensors of each."""
    try:
        index = json.loads(path.read_bytes())
        file_of = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index with a weight_map: {error!r}") from error
    names: dict[str, list[str]] = {}
    for name, file in file_of.items():
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not in the same folder")
        names.setdefault(file, []).append(name)
    return {path.parent / file: names[file] for file in sorted(names)}


def _expected(path: Path, found: Mapping[str, T], expected: Sequence[str] | None) -> dict[str, T]:
    """The tensors that an index expects in a file; all if there is no index."""
    for name in expected or ():
        if name not in found:
            raise CheckpointError(
                f"{path} lacks {name!r}, which the index lists there: index and files are of "
                f"different checkpoints"
            )
    return {name: found[name] for name in (found if expected is None else expected)}


class SafetensorsReader:
    """Reads this rank's slices of tensors in safetensors files.

    Raises:
        CheckpointError: a file cannot be read, or lacks a tensor that the index lists.
    """

    def __init__(self, files: Files) -> None:
        self._stored = {
            name: (path, stored)
            for path, expected in files.items()
            for name, stored in _expected(path, read_header(path), expected).items()
        }
        # One buffer for all tensors: temporary allocations would fragment memory.
        self._buffer = torch.empty(PIECE, dtype=torch.uint8)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The global tensors by name."""
        return {name: stored.info for name, (_, stored) in self._stored.items()}

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill this rank's shard of a tensor; see `CheckpointReader`."""
        path, stored = self._stored[name]
        total = 0
        try:
            with FileIO(path) as file:
                for sub_shard in local_sub_shards(tensor):
                    for piece in sub_shard.pieces(PIECE):
                        values, num_bytes = read_slice(file, stored, piece.index, self._buffer)
                        piece.local.copy_(values)
                        total += num_bytes
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path}: reading {name!r} failed: {error}") from error
        return total


class TorchReader:
    """Copies this rank's slices of tensors from memory-mapped files of `torch.save`.

    Keys of nested dictionaries are joined by dots.

    Raises:
        CheckpointError: a file cannot be mapped, contains other objects than tensors and plain
            data, has the shards of one rank, or lacks a tensor that the index lists.
    """

    def __init__(self, files: Files) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        for path, expected in files.items():
            found = dict(_tensors_in(_mapped(path)))
            self._mapped |= _expected(path, _whole(path, found), expected)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The global tensors by name."""
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._mapped.items()}

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill this rank's shard of a tensor; see `CheckpointReader`."""
        total = 0
        for sub_shard in local_sub_shards(tensor):
            values = self._mapped[name][sub_shard.index]
            sub_shard.local.copy_(values)
            total += values.nbytes
        return total


def _mapped(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} is not a file of torch.save with only tensors, in its format since torch "
            f"1.6: {first_line}"
        ) from error


def _whole(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of which a file has all elements.

    Raises:
        CheckpointError: a tensor is a DTensor, of which the file has the shard of one rank.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements):
            raise CheckpointError(
                f"{path} has the shard of one rank of {name!r}: torch.save writes only the shards "
                f"of the rank that calls it. Save with autoshard.save_checkpoint or "
                f"torch.distributed.checkpoint; or load this file on the rank that wrote it with "
                f"model.load_state_dict(torch.load(path))"
            )
    return {name: local_tensor(tensor) for name, tensor in tensors.items()}


def _tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}.{key}" if path else str(key))


class DcpReader:
    """Reads tensors in a folder of `torch.distributed.checkpoint`.

    A rank reads every stored shard that overlaps its own shard completely, since stored shards
    cannot be read in part. No collectives run.

    Raises:
        CheckpointError: the metadata cannot be read, contains types that metadata does not have,
            or names files outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _read_metadata(folder / _DCP_METADATA)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The global tensors by name; keys of nested dictionaries are joined by dots."""
        return {
            name: TensorInfo(tuple(stored.size), stored.properties.dtype)
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill this rank's shard of a tensor; see `CheckpointReader`."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dcp_state_dict({name: tensor}), self._metadata, is_coordinator=True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        plan = planner.finish_plan(plan)
        stored = self._metadata.storage_data
        try:
            self._reader.read_data(plan, planner).wait()
        except _DAMAGED as error:
            raise CheckpointError(f"{self._folder}: reading {name!r} failed: {error!r}") from error
        return sum(stored[item.storage_index].length for item in plan.items)


_DAMAGED = (
    AssertionError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    ValueError,
    pickle.UnpicklingError,
)
"""Exceptions that torch raises if the files of a folder do not match its metadata."""

_METADATA_TYPES = {
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
"""The types that metadata may contain, besides torch's dtypes."""


def _enum_member(owner: object, name: str) -> Enum:
    """A member of an enum, which Python 3.11.0 to 3.11.3 pickle as an attribute of it."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError(f"the attribute {name!r} is not allowed in metadata")


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that refuses types other than those of checkpoint metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Find a class, if metadata may contain it."""
        if name in _METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in metadata")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    # Unpickling arbitrary bytes may raise nearly any exception.
    except Exception as error:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is not the metadata of a checkpoint")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(
                f"{path} names {stored.relative_path!r}, which is not in the same folder"
            )
    return metadata
