"""Which kind of checkpoint a path is."""

import json
from collections.abc import Sequence
from pathlib import Path

from autoshard.errors import CheckpointError
from autoshard.runtime.weights.dcp_folder import METADATA, DcpFolder
from autoshard.runtime.weights.safetensors_files import SafetensorsFiles
from autoshard.runtime.weights.source import Source
from autoshard.runtime.weights.torch_files import TorchFiles

SAFETENSORS = ".safetensors"
INDEX = ".index.json"
MODEL = f"model{SAFETENSORS}"
"""Name of the file where there is only one."""

_TORCH = (".bin", ".ckpt", ".pt", ".pth")


def open_source(path: Path) -> Source:
    """Open a checkpoint: a file, the index of several, or a folder.

    Raises:
        CheckpointError: there is none, it is not clear which one is meant, or it cannot be read.
    """
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if path.is_dir():
        return DcpFolder(path) if (path / METADATA).exists() else open_source(_only_file(path))
    if path.name.endswith(INDEX):
        return _open_files(_indexed(path))
    return _open_files({path: None})


def _only_file(folder: Path) -> Path:
    indexes, files = (sorted(folder.glob(f"*{SAFETENSORS}{end}")) for end in (INDEX, ""))
    candidates = indexes or [path for path in files if path.name == MODEL] or files
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(candidate.name for candidate in candidates)
        raise CheckpointError(f"{folder} holds several checkpoints; name one of {names}")
    others = sorted(p.name for p in folder.iterdir() if p.suffix in _TORCH)
    hint = f"; pass the path of {others[0]} itself if you trust it" if others else ""
    raise CheckpointError(
        f"{folder} holds neither safetensors files nor a checkpoint of "
        f"torch.distributed.checkpoint{hint}"
    )


def _indexed(path: Path) -> dict[Path, Sequence[str] | None]:
    """The tensors that an index expects in each file."""
    try:
        index = json.loads(path.read_bytes())
        places = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
    names: dict[str, list[str]] = {}
    for name, file in places.items():
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not beside it")
        names.setdefault(file, []).append(name)
    return {path.parent / file: names[file] for file in sorted(names)}


def _open_files(files: dict[Path, Sequence[str] | None]) -> Source:
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"the index names {path}, which does not exist")
    suffixes = {path.suffix for path in files}
    if suffixes <= {SAFETENSORS}:
        return SafetensorsFiles.open(files)
    if suffixes <= set(_TORCH):
        return TorchFiles.open(files)
    raise CheckpointError(
        f"{', '.join(str(path) for path in files)}: checkpoints end in {SAFETENSORS}, "
        f"{', '.join(_TORCH)} or {INDEX}"
    )
