"""Blocks of tensors that lie row-major in a file.

A block is a number of runs of bytes that lie apart. Runs are read and written one by one, so
what a rank does not hold is not read either. (The slices of the `safetensors` package are mapped:
nothing could count them, and a file that is cut off meanwhile would end the process.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from autoshard.runtime.weights.safetensors_format import Stored

SHORT_RUN = 512
"""Bytes: shorter runs are read with what lies between them, as disks read whole pages anyway."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A block of a tensor as runs of bytes in a file, in the order of the block's elements.

    Attributes:
        starts: byte of the file at which each run begins.
        num_bytes: of one run.
    """

    starts: npt.NDArray[np.int64]
    num_bytes: int

    @classmethod
    def of(cls, stored: Stored, parts: Sequence[slice]) -> Self:
        """The runs of a block.

        Args:
            stored: the whole tensor.
            parts: the block, a slice per dim.
        """
        shape, size = stored.entry.shape, stored.entry.dtype.itemsize
        strides = [size * prod(shape[dim + 1 :]) for dim in range(len(shape))]
        cut = _innermost_cut(shape, parts)
        starts = np.full(1, stored.start, np.int64)
        for part, stride in zip(parts[:cut], strides, strict=False):
            starts = (starts[:, None] + np.arange(part.start, part.stop) * stride).ravel()
        if cut == len(shape):
            return cls(starts, size)
        last = parts[cut]
        return cls(starts + last.start * strides[cut], _length(last) * strides[cut])

    def pieces(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Each run's place in the file, and its part of the block's memory."""
        for number, start in enumerate(self.starts.tolist()):
            yield start, memory[number * self.num_bytes : (number + 1) * self.num_bytes]


def read_block(
    file: FileIO, stored: Stored, parts: Sequence[slice], buffer: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """A block of a tensor, in the dtype of the file, and the bytes that were read.

    Args:
        file: holds the tensor.
        stored: the whole tensor.
        parts: the block, a slice per dim.
        buffer: bytes, which hold the block until they are used again, if it fits.

    Raises:
        OSError: the file cannot be read.
        EOFError: it ends too early.
    """
    wide = _without_short_runs(stored, parts)
    shape = [_length(part) for part in wide]
    num_bytes = prod(shape) * stored.entry.dtype.itemsize
    fits = num_bytes <= len(buffer)
    memory = buffer[:num_bytes] if fits else torch.empty(num_bytes, dtype=torch.uint8)
    for start, piece in Runs.of(stored, wide).pieces(_bytes_of(memory)):
        file.seek(start)
        done = 0
        while done < len(piece):
            read = file.readinto(piece[done:])
            if not read:
                raise EOFError(f"the file ends before byte {start + len(piece)}")
            done += read
    values = memory.view(stored.entry.dtype).view(shape)
    for dim, (part, around) in enumerate(zip(parts, wide, strict=True)):
        values = values.narrow(dim, part.start - around.start, _length(part))
    return values, num_bytes


def write_block(file: FileIO, stored: Stored, parts: Sequence[slice], values: torch.Tensor) -> None:
    """Write a block of a tensor to its place.

    Args:
        file: has room for the tensor.
        stored: the whole tensor.
        parts: the block, a slice per dim.
        values: of the block, contiguous on the CPU, in the dtype of the file.

    Raises:
        OSError: the file cannot be written.
    """
    for start, piece in Runs.of(stored, parts).pieces(_bytes_of(values)):
        file.seek(start)
        done = 0
        while done < len(piece):
            done += file.write(piece[done:])


def _without_short_runs(stored: Stored, parts: Sequence[slice]) -> list[slice]:
    """A block, made wider until it is one run or its runs are long enough."""
    wide = list(parts)
    while len((runs := Runs.of(stored, wide)).starts) > 1 and 0 < runs.num_bytes < SHORT_RUN:
        cut = _innermost_cut(stored.entry.shape, wide)
        wide[cut] = slice(0, stored.entry.shape[cut])
    return wide


def _innermost_cut(shape: Sequence[int], parts: Sequence[slice]) -> int:
    """The last dim of which a block is only a part; 0 if there is none."""
    cut = [dim for dim, part in enumerate(parts) if _length(part) < shape[dim]]
    return cut[-1] if cut else 0


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _bytes_of(values: torch.Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy()
    return array.data
