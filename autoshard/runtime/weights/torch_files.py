"""Weights in files of `torch.save`."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import CheckpointError
from autoshard.runtime.blocks import local_blocks
from autoshard.runtime.weights.source import Entry, pick_expected


@dataclass(frozen=True, slots=True)
class TorchFiles:
    """Tensors in files of `torch.save`, which are mapped: a rank copies its own blocks out.

    Attributes:
        tensors: the mapped tensors by name.
    """

    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def open(cls, files: Mapping[Path, Sequence[str] | None]) -> "TorchFiles":
        """Map files.

        Dictionaries may nest; a name is then the keys, joined by dots.

        Args:
            files: for each file the names of the tensors that an index expects in it; None
                where there is no index.

        Raises:
            CheckpointError: a file cannot be mapped, holds more than tensors and plain data,
                or lacks a tensor that the index expects.
        """
        tensors: dict[str, torch.Tensor] = {}
        for path, expected in files.items():
            tensors.update(pick_expected(path, dict(_tensors_in(_mapped(path))), expected))
        return cls(tensors)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The whole tensors by name."""
        return {name: Entry(tuple(t.shape), t.dtype) for name, t in self.tensors.items()}

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill what this rank holds of a tensor; see `Source`."""
        total = 0
        for block in local_blocks(tensor):
            values = self.tensors[name][block.parts]
            block.local.copy_(values)
            total += values.nbytes
        return total


def _mapped(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} is not a file of torch.save with tensors alone, in its format since torch "
            f"1.6: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}.{key}" if path else str(key))
