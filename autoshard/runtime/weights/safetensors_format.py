"""The format of safetensors files: https://huggingface.co/docs/safetensors.

Eight bytes with the length of the header, little-endian; the header in JSON, which says of each
tensor its dtype, shape and bytes; then the tensors, row-major and without gaps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autoshard.errors import CheckpointError
from autoshard.runtime.weights.source import Entry

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
_ABOUT = {"format": "pt"}  # transformers insists on it


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        entry: the whole tensor.
        start: byte of the file at which it begins.
    """

    entry: Entry
    start: int


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: it is no such file, is cut off, or holds a dtype that torch lacks.
    """
    try:
        with safe_open(path, "pt"):  # checks the header, and the length of the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}; fetch or save it again"
        ) from error
    data = _LENGTH_BYTES + length
    return {
        name: Stored(_entry(path, name, tensor), data + tensor["data_offsets"][0])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _entry(path: Path, name: str, tensor: Mapping[str, Any]) -> Entry:
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name!r} has elements of type {tensor['dtype']}, which torch lacks"
        )
    return Entry(tuple(tensor["shape"]), dtype)


def write_header(path: Path, entries: Mapping[str, Entry]) -> dict[str, Stored]:
    """Make a file with room for tensors.

    Larger elements come first, so that all begin at a multiple of their size.

    Returns:
        Where each tensor belongs, in the order of the file.

    Raises:
        CheckpointError: the format lacks a dtype.
        OSError: the file cannot be written.
    """
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": _ABOUT}
    end = 0
    for name in order:
        entry = entries[name]
        if entry.dtype not in _CODES:
            raise CheckpointError(f"safetensors files cannot hold {name!r} of {entry.dtype}")
        start, end = end, end + entry.nbytes
        header[name] = {
            "dtype": _CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.truncate(_LENGTH_BYTES + len(text) + end)
    data = _LENGTH_BYTES + len(text)
    return {name: Stored(entries[name], data + header[name]["data_offsets"][0]) for name in order}
