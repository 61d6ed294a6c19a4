"""Weights in safetensors files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch

from autoshard.errors import CheckpointError
from autoshard.runtime.blocks import local_blocks
from autoshard.runtime.weights.file_blocks import read_block
from autoshard.runtime.weights.safetensors_format import Stored, read_header
from autoshard.runtime.weights.source import Entry, pick_expected

PIECE = 1 << 23
"""Bytes that are read at a time, so that little memory is needed on the way to a device."""


def _buffer() -> torch.Tensor:
    return torch.empty(PIECE, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """Tensors in safetensors files, of which each rank reads its own blocks.

    Attributes:
        places: by the name of each tensor its file and where it is in it.
        buffer: what is read passes through it. It is one for all, since memory that comes and
            goes between tensors that stay is lost to the process.
    """

    places: Mapping[str, tuple[Path, Stored]]
    buffer: torch.Tensor = field(default_factory=_buffer)

    @classmethod
    def open(cls, files: Mapping[Path, Sequence[str] | None]) -> "SafetensorsFiles":
        """Read the headers of files.

        Args:
            files: for each file the names of the tensors that an index expects in it; None
                where there is no index.

        Raises:
            CheckpointError: a file cannot be read, or lacks a tensor that the index expects.
        """
        places: dict[str, tuple[Path, Stored]] = {}
        for path, expected in files.items():
            found = pick_expected(path, read_header(path), expected)
            places.update((name, (path, stored)) for name, stored in found.items())
        return cls(places)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The whole tensors by name."""
        return {name: stored.entry for name, (_, stored) in self.places.items()}

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill what this rank holds of a tensor; see `Source`."""
        path, stored = self.places[name]
        total = 0
        try:
            with FileIO(path) as file:
                for block in local_blocks(tensor):
                    for piece in block.pieces(PIECE):
                        values, num_bytes = read_block(file, stored, piece.parts, self.buffer)
                        piece.local.copy_(values)
                        total += num_bytes
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{path}: reading {name!r} failed: {error}") from error
        return total
