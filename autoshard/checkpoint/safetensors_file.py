"""Safetensors files, read and written in slices: https://huggingface.co/docs/safetensors.

A file starts with the length of the header in eight bytes, little-endian. The JSON header has the
dtype, shape and byte range of each tensor. The tensors follow, row-major and without gaps.

A slice of a tensor consists of separate runs of bytes, which are read and written one by one.
(The `safetensors` package maps files into memory: bytes read could not be counted, and the
process would be killed if the file is truncated meanwhile.)
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from autoshard.errors import CheckpointError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_METADATA = {"format": "pt"}  # required by transformers

SHORT_RUN = 512
"""Runs of fewer bytes are read together with the gaps between them: disks read whole pages."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A global tensor in a checkpoint.

    Attributes:
        shape: global shape.
        dtype: dtype of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the global tensor, bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        info: shape and dtype.
        start: offset of its first byte in the file.
    """

    info: TensorInfo
    start: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: the file is not a safetensors file, is truncated, or has a dtype that
            torch does not support.
    """
    try:
        with safe_open(path, "pt"):  # checks the header, and the length of the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}; fetch or save it again"
        ) from error
    data = _LENGTH_BYTES + length
    return {
        name: StoredTensor(_info(path, name, tensor), data + tensor["data_offsets"][0])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _info(path: Path, name: str, tensor: Mapping[str, Any]) -> TensorInfo:
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name!r} has dtype {tensor['dtype']}, which torch does not support"
        )
    return TensorInfo(tuple(tensor["shape"]), dtype)


def write_header(path: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, StoredTensor]:
    """Create a file with a header and room for the tensors' data, which `write_slice` writes.

    Tensors with larger elements come first, so that all are aligned to their element size.

    Returns:
        The position of each tensor, in the order of the file.

    Raises:
        CheckpointError: the format does not support a dtype.
        OSError: the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": _METADATA}
    end = 0
    for name in order:
        info = tensors[name]
        if info.dtype not in _CODES:
            raise CheckpointError(f"safetensors files cannot store {name!r} of {info.dtype}")
        start, end = end, end + info.nbytes
        header[name] = {
            "dtype": _CODES[info.dtype],
            "shape": info.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.truncate(_LENGTH_BYTES + len(text) + end)
    data = _LENGTH_BYTES + len(text)
    return {
        name: StoredTensor(tensors[name], data + header[name]["data_offsets"][0]) for name in order
    }


def read_slice(
    file: FileIO, stored: StoredTensor, index: Sequence[slice], buffer: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Read a slice of a tensor, in the dtype of the file; return it and the number of bytes read.

    Args:
        file: the open file.
        stored: the tensor.
        index: a slice per dim.
        buffer: memory for the result if it is large enough; the next call overwrites it.

    Raises:
        OSError: the file cannot be read.
        EOFError: the file is truncated.
    """
    wide = _without_short_runs(stored, index)
    shape = [_length(part) for part in wide]
    num_bytes = prod(shape) * stored.info.dtype.itemsize
    fits = num_bytes <= len(buffer)
    memory = buffer[:num_bytes] if fits else torch.empty(num_bytes, dtype=torch.uint8)
    for start, piece in _Runs.of(stored, wide).pieces(memory):
        file.seek(start)
        done = 0
        while done < len(piece):
            read = file.readinto(piece[done:])
            if not read:
                raise EOFError(f"the file ends before byte {start + len(piece)}")
            done += read
    values = memory.view(stored.info.dtype).view(shape)
    for dim, (part, around) in enumerate(zip(index, wide, strict=True)):
        values = values.narrow(dim, part.start - around.start, _length(part))
    return values, num_bytes


def write_slice(
    file: FileIO, stored: StoredTensor, index: Sequence[slice], values: torch.Tensor
) -> None:
    """Write a slice of a tensor.

    Args:
        file: the open file, created by `write_header`.
        stored: the tensor.
        index: a slice per dim.
        values: values of the slice, contiguous on the CPU, in the dtype of the file.

    Raises:
        OSError: the file cannot be written.
    """
    for start, piece in _Runs.of(stored, index).pieces(values):
        file.seek(start)
        done = 0
        while done < len(piece):
            done += file.write(piece[done:])


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of bytes of a slice, in the order of its elements.

    Attributes:
        starts: offset of each run in the file.
        num_bytes: length of each run.
    """

    starts: npt.NDArray[np.int64]
    num_bytes: int

    @classmethod
    def of(cls, stored: StoredTensor, index: Sequence[slice]) -> "_Runs":
        """The runs of a slice of a stored tensor."""
        shape, size = stored.info.shape, stored.info.dtype.itemsize
        strides = [size * prod(shape[dim + 1 :]) for dim in range(len(shape))]
        inner = _innermost_sliced(shape, index)
        starts = np.full(1, stored.start, np.int64)
        for part, stride in zip(index[:inner], strides, strict=False):
            starts = (starts[:, None] + np.arange(part.start, part.stop) * stride).ravel()
        if inner == len(shape):
            return cls(starts, size)
        last = index[inner]
        return cls(starts + last.start * strides[inner], _length(last) * strides[inner])

    def pieces(self, values: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
        """The offset of each run in the file, and its bytes in the memory of `values`."""
        array: npt.NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy()
        for number, start in enumerate(self.starts.tolist()):
            yield start, array.data[number * self.num_bytes : (number + 1) * self.num_bytes]


def _without_short_runs(stored: StoredTensor, index: Sequence[slice]) -> list[slice]:
    """Widen a slice until it is one run or its runs are long enough."""
    wide = list(index)
    while len((runs := _Runs.of(stored, wide)).starts) > 1 and 0 < runs.num_bytes < SHORT_RUN:
        dim = _innermost_sliced(stored.info.shape, wide)
        wide[dim] = slice(0, stored.info.shape[dim])
    return wide


def _innermost_sliced(shape: Sequence[int], index: Sequence[slice]) -> int:
    """The last dim that is not taken in full; 0 if there is none."""
    sliced = [dim for dim, part in enumerate(index) if _length(part) < shape[dim]]
    return sliced[-1] if sliced else 0


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
