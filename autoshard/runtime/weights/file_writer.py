"""A safetensors file that is written block by block."""

from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from autoshard.runtime.blocks import Block
from autoshard.runtime.weights.file_blocks import write_block
from autoshard.runtime.weights.safetensors_format import Stored, write_header
from autoshard.runtime.weights.source import Entry


def unfinished(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(f"{path.name}.unfinished")


class FileWriter:
    """A file that has its name when it is complete.

    Args:
        path: of the file.
        entries: its tensors by name.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self._path = path
        self._unfinished = unfinished(path)
        self._entries = entries
        self._stored: Mapping[str, Stored] = {}
        self._failure: OSError | None = None

    def begin(self) -> None:
        """Make room for the tensors.

        Raises:
            CheckpointError: the format lacks a dtype.
            OSError: the file cannot be made.
        """
        self._stored = write_header(self._unfinished, self._entries)

    def write(self, name: str, block: Block) -> None:
        """Write a block of a tensor.

        If that fails, `check` says so: the other ranks go on sending, so blocks must be taken.
        """
        if self._failure is not None:
            return
        values = block.local.detach().cpu().contiguous()
        try:
            with FileIO(self._unfinished, "r+") as file:
                write_block(file, self._stored[name], block.parts, values)
        except OSError as error:
            self._failure = error

    def check(self) -> None:
        """Check that all went well.

        Raises:
            OSError: a block could not be written.
        """
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Give the file its name.

        Raises:
            OSError: it cannot be renamed.
        """
        self._unfinished.rename(self._path)

    def discard(self) -> None:
        """Remove the file if it is not finished."""
        self._unfinished.unlink(missing_ok=True)
