"""Exported models on disk, exported on first use.

Exporting runs in another process: it needs torch, and the process that starts the measurements must
stay small (a child's peak memory is never below its parent's on Linux).
"""

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = (_FOLDER / "models.py", *sorted((_FOLDER / "zoo").glob("*.py")))


class ExportFailedError(Exception):
    """A model cannot be exported; the message is the last line of the export's output."""


def archive(name: str, folder: Path) -> Path:
    """The archive of a model that `benchmarks.models` exports, from the folder or made anew.

    Args:
        name: of the model, or the path of an archive, which is returned.
        folder: with the archives.

    Raises:
        ExportFailedError: it cannot be exported.
    """
    if name.endswith(".pt2"):
        return Path(name)
    path = folder / f"{name}-{_state()}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        command = [sys.executable, "-m", "benchmarks.models", name, str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own module
        if done.returncode:
            raise ExportFailedError(last_line(done.stderr) or f"status {done.returncode}")
        partial.rename(path)
    return path


def last_line(text: str) -> str:
    """The last line of a process's output, usually the message of an exception."""
    return text.strip().rpartition("\n")[2]


def _state() -> str:
    """Eight hex digits that depend on the models' source and the versions that export them."""
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    text = "\n".join([*(path.read_text(encoding="utf-8") for path in _SOURCES), *versions])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
