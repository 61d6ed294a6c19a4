"""What weights are read from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from autoshard.errors import CheckpointError

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor as a checkpoint holds it.

    Attributes:
        shape: global shape.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor, bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """A checkpoint, of which only what is asked for is read."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The whole tensors that it holds, by name."""
        ...

    def read(self, name: str, tensor: torch.Tensor) -> int:
        """Fill what this rank holds of a tensor, converting to its dtype.

        Args:
            name: of the entry.
            tensor: of the entry's global shape; a DTensor, or plain and whole.

        Returns:
            Bytes read.

        Raises:
            CheckpointError: the file is not what it was when it was opened.
        """
        ...


def pick_expected(
    path: Path, found: Mapping[str, ItemT], expected: Sequence[str] | None
) -> dict[str, ItemT]:
    """What an index expects in a file; all that is found if there is no index.

    Raises:
        CheckpointError: the file lacks something.
    """
    if expected is None:
        return dict(found)
    for name in expected:
        if name not in found:
            raise CheckpointError(
                f"{path} lacks {name!r}, which the index says it holds: index and files are not "
                f"of one checkpoint"
            )
    return {name: found[name] for name in expected}
