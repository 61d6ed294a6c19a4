"""Reading a `.pt2` archive without trusting it: its `model.json`, and values of small constants.

Nothing here unpickles, evaluates or imports torch. Weights and large constants stay untouched.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from autoshard.errors import ArchiveError, GraphError, SchemaError
from autoshard.graph.constants import (
    CONSTANT_BYTES,
    CONSTANTS_FILE,
    CONSTANTS_FOLDER,
    Constant,
    read_constants,
)

TIES_FILE = "autoshard.json"
"""Extra file in which `export_model` records which parameter names are one tensor."""

_NAMESPACE = re.compile(rb'"torch\.ops\.(\w+)\.')
_MODEL_SUFFIX = "models/model.json"
_TIES_SUFFIX = f"extra/{TIES_FILE}"
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ValueError,
)
"""What zipfile raises on truncated, encrypted, overlapping or unknown members."""


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How large an archive may be; the defaults fit every public model with room to spare.

    Attributes:
        archive_bytes: size of the archive, or of a bare model.json.
        model_bytes: decompressed size of model.json.
        compression_ratio: decompressed over compressed size of model.json.
        nodes: operator calls in the program, sub-graphs included.
    """

    archive_bytes: int = 1 << 30
    model_bytes: int = 256 << 20
    compression_ratio: float = 200.0
    nodes: int = 200_000


@dataclass(frozen=True)
class Archive:
    """What an archive says.

    Attributes:
        model: the parsed model.json.
        ties: groups of parameter names that are one tensor each; None where the archive
            was not made by `export_model` and so does not say.
        constants: the values of small constants by name.
    """

    model: dict[str, Any]
    ties: tuple[tuple[str, ...], ...] | None = None
    constants: Mapping[str, Constant] = field(default_factory=dict)


def read_archive(source: str | Path | bytes, *, limits: ArchiveLimits | None = None) -> Archive:
    """Read an exported program.

    Args:
        source: path or bytes of a `.pt2` archive, or of its `models/model.json` alone.
        limits: how large it may be.

    Raises:
        ArchiveError: it cannot be read, holds no or several models, or exceeds a limit.
        SchemaError: model.json is not JSON, or not an object.
    """
    limits = limits or ArchiveLimits()
    data = source if isinstance(source, bytes) else _read_file(Path(source), limits)
    _check_size("the archive", len(data), limits.archive_bytes, "archive_bytes")
    if data.lstrip()[:1] == b"{":
        _check_size("model.json", len(data), limits.model_bytes, "model_bytes")
        return Archive(_parse(data, "model.json"))
    return _read_zip(data, limits)


def operator_namespaces(data: bytes, *, limits: ArchiveLimits) -> frozenset[str]:
    """Namespaces of all operators that an archive names, without parsing it.

    Empty for what is no archive; `read_archive` says what is wrong with it.
    """
    text = data
    try:
        if data.lstrip()[:1] != b"{":
            with zipfile.ZipFile(BytesIO(data)) as archive:
                text = _decompress(archive, _find_model(archive), limits)
    except (*_UNREADABLE, ArchiveError):
        return frozenset()
    return frozenset(name.decode() for name in _NAMESPACE.findall(text))


def _read_file(path: Path, limits: ArchiveLimits) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limits.archive_bytes + 1)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_size(what: str, size: int, limit: int, field: str) -> None:
    if size > limit:
        raise ArchiveError(
            f"{what} is larger than the limit of {limit:,} bytes; export on the meta device, "
            f"which leaves the weights out, or raise ArchiveLimits.{field}"
        )


def _read_zip(data: bytes, limits: ArchiveLimits) -> Archive:
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            model = _decompress(archive, _find_model(archive), limits)
            ties = _find(archive, _TIES_SUFFIX)
            extra = _decompress(archive, ties[0], limits) if len(ties) == 1 else None
            constants = _read_constants(archive, limits)
    except _UNREADABLE as error:
        if isinstance(error, GraphError):
            raise
        raise ArchiveError(
            f"this is not a readable .pt2 archive ({error}); make one with torch.export.save, "
            "or send its models/model.json"
        ) from error
    return Archive(
        _parse(model, _MODEL_SUFFIX), None if extra is None else _parse_ties(extra), constants
    )


def _read_constants(archive: zipfile.ZipFile, limits: ArchiveLimits) -> dict[str, Constant]:
    config = _find(archive, CONSTANTS_FILE)
    if len(config) != 1:
        return {}
    folder = config[0].filename.removesuffix(CONSTANTS_FILE) + CONSTANTS_FOLDER

    def read(name: str) -> bytes | None:
        try:
            file = archive.getinfo(folder + name)
        except KeyError:
            return None
        small = file.file_size <= CONSTANT_BYTES
        return _decompress(archive, file, limits) if small else None

    return read_constants(_parse(_decompress(archive, config[0], limits), CONSTANTS_FILE), read)


def _find(archive: zipfile.ZipFile, suffix: str) -> list[zipfile.ZipInfo]:
    names = (suffix, f"/{suffix}")
    return [i for i in archive.infolist() if i.filename == suffix or i.filename.endswith(names[1])]


def _find_model(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = _find(archive, _MODEL_SUFFIX)
    if len(found) == 1:
        return found[0]
    if found:
        raise ArchiveError(
            f"the archive holds {len(found)} models named {_MODEL_SUFFIX}; it must hold one"
        )
    others = [
        i.filename
        for i in archive.infolist()
        if "models/" in i.filename and i.filename.endswith(".json")
    ]
    if others:
        raise ArchiveError(
            f"the archive holds {', '.join(others[:3])} but no {_MODEL_SUFFIX}; "
            "save one program with torch.export.save"
        )
    raise ArchiveError(
        f"the archive has no {_MODEL_SUFFIX}; make it with torch.export.save of torch 2.8 or newer"
    )


def _decompress(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limits: ArchiveLimits) -> bytes:
    """Decompress one member, reading at most the limit whatever its header claims."""
    by_ratio = int(member.compress_size * limits.compression_ratio)
    allowed = min(limits.model_bytes, by_ratio)
    with archive.open(member) as file:
        data = file.read(allowed + 1)
    if len(data) <= allowed:
        return data
    if by_ratio < limits.model_bytes:
        raise ArchiveError(
            f"{member.filename} decompresses to more than {limits.compression_ratio:g} times its "
            "size, as a zip bomb does; save it anew with torch.export.save, or raise "
            "ArchiveLimits.compression_ratio"
        )
    raise ArchiveError(
        f"{member.filename} is larger than the limit of {limits.model_bytes:,} bytes; "
        "plan a smaller program, or raise ArchiveLimits.model_bytes"
    )


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except RecursionError:
        raise SchemaError(f"{what} nests too deeply to be an exported program") from None
    except ValueError as error:
        raise SchemaError(f"{what} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise SchemaError(f"{what} is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _parse_ties(data: bytes) -> tuple[tuple[str, ...], ...]:
    ties = _parse(data, _TIES_SUFFIX).get("ties")
    if not isinstance(ties, list) or not all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in ties
    ):
        raise SchemaError(f"{_TIES_SUFFIX}: 'ties' must be a list of lists of parameter names")
    return tuple(tuple(group) for group in ties)
