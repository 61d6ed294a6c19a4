"""Reading files that a user names: errors in words, and what a file has instead of what it should.

A file is recognised by its first bytes, its list of members, or its keys. Nothing is unpickled or
executed.
"""

import ast
import json
import os
import stat
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from uuid import uuid4

from autoshard.errors import ArchiveError, InputError, MeshError, OptionError, PlanError

_MAX_TEXT = 1 << 20
"""Largest size of a text that is examined."""

_EXPORT = "export the model in Python (autoshard.export_model, or torch.export.save), and give that"

_WITHOUT_WEIGHTS = f"a graph is made without weights: {_EXPORT}"


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that people have.

    Attributes:
        name: what it is, after "is".
        to_graph: how to get a graph, if one is needed in its place.
    """

    name: str
    to_graph: str = _EXPORT


GRAPH = FileKind("an exported graph")
PLAN = FileKind("a plan", "give the .pt2 file that it was made from")
TOPOLOGY = FileKind("a topology", "give it as --topology, and a .pt2 file as the graph")
EMPTY = FileKind("empty", "export the model again, to a .pt2 file")
SAFETENSORS = FileKind("a file of weights (safetensors)", _WITHOUT_WEIGHTS)
INDEX = FileKind("the index of a checkpoint", _WITHOUT_WEIGHTS)
CHECKPOINT = FileKind(
    "a pickled checkpoint or module (torch.save)",
    "it is not opened, since a pickle is a program; load it in Python yourself if you trust it, "
    "export the model there (autoshard.export_model), and give that",
)
GGUF = FileKind("a file of weights (GGUF)", _WITHOUT_WEIGHTS)
HDF5 = FileKind("a file of weights (HDF5)", _WITHOUT_WEIGHTS)
TORCHSCRIPT = FileKind(
    "a TorchScript archive, which has no graph of torch.export",
    "export the module that it was made from with torch.export.save, and give that",
)
COMPILED = FileKind(
    "a compiled package of AOTInductor", "give the archive of torch.export.save instead"
)
ONNX = FileKind("an ONNX model", f"plans are made for PyTorch modules: {_EXPORT}")
CONFIGURATION = FileKind(
    "the configuration of a Hugging Face model",
    "`autoshard plan` and `search` take it; elsewhere, make the model of it in Python "
    "(AutoModelForCausalLM.from_config), export it (autoshard.export_model), and give that",
)
PYTHON = FileKind("a Python program", f"in the program, {_EXPORT}")
JSON = FileKind("a JSON file of another kind")
DAMAGED_JSON = FileKind("a JSON file that is damaged or cut short")
TEXT = FileKind("a text file")
ZIP = FileKind("a zip archive of another kind")
BINARY = FileKind("a binary file of an unknown kind")

_ZIP = b"PK"

_MAGIC = {
    b"GGUF": GGUF,
    b"\x89HDF": HDF5,
    **{bytes((0x80, protocol)): CHECKPOINT for protocol in range(2, 6)},
}

_MEMBERS = {
    "/data/aotinductor/": COMPILED,
    "/constants.pkl": TORCHSCRIPT,
    "/data.pkl": CHECKPOINT,
}
"""Members of zip archives that only one kind has; TorchScript archives have `data.pkl` too."""

_KEYS = (
    ("graph_module", GRAPH),
    ("certificate", PLAN),
    ("weight_map", INDEX),
    ("model_type", CONFIGURATION),
    ("architectures", CONFIGURATION),
    ("levels", TOPOLOGY),
)
"""Keys of JSON objects that only one kind has."""

_ONNX_VERSION = b"\x08"
"""Protocol-buffer tag of the first field of an ONNX model; a byte with its value follows."""

_ONNX_TAGS = frozenset({b"\x12", b"\x1a", b"\x22", b"\x28", b"\x32", b"\x3a", b"\x42"})
"""Tags of the fields that can follow."""


def read_file(path: Path, error: type[InputError], most: int | None = None) -> bytes:
    """Read a file.

    Args:
        path: of the file.
        error: type of the error if it cannot be read.
        most: read at most one byte more than this.
    """
    check_is_file(path, error)
    try:
        with path.open("rb") as file:
            return file.read() if most is None else file.read(most + 1)
    except (OSError, ValueError) as reason:
        text = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise error(f"{path} cannot be read: {text or reason}") from reason


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file; what it contained before stays if that fails, such as on a full disk.

    Raises:
        OptionError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        is_special = path.exists() and not path.is_file()  # such as /dev/stdout
        if is_special or not os.access(path.parent, os.W_OK):
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".{uuid4().hex}.part")
    try:
        part.write_bytes(data)
        if path.exists():
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_is_file(path: Path, error: type[InputError]) -> None:
    """Check that a path is not that of a folder, or of nothing.

    Args:
        path: of the file.
        error: type of the error if it is.
    """
    if path.is_dir():
        raise error(f"{path} is a folder; give the name of a file in it")
    if "\0" not in str(path) and not path.exists():
        raise error(f"there is no file {path}")


def read_graph_file(path: Path, most: int | None = None) -> bytes:
    """Read the file of an exported graph.

    Args:
        path: of the file.
        most: read at most one byte more than this.

    Raises:
        ArchiveError: it cannot be read, or is of another kind.
    """
    with suppress(OSError, ValueError), path.open("rb") as file:
        # Weights may be much larger than memory.
        if kind_of_head(file.read(1024)) in {SAFETENSORS, GGUF, HDF5, CHECKPOINT}:
            file.seek(0)
            raise _not_a_graph(path, kind_of(file.read(_MAX_TEXT)))
    data = read_file(path, ArchiveError, most)
    kind = kind_of(data)
    if kind is not GRAPH:
        raise _not_a_graph(path, kind)
    if data.startswith(_ZIP) and not zipfile.is_zipfile(BytesIO(data)):
        raise ArchiveError(
            f"{path} is not a readable .pt2 archive: it is damaged or cut short; export it again"
        )
    return data


def check_not_foreign(data: bytes) -> None:
    """Check that bytes in place of a graph are not those of another format.

    Raises:
        ArchiveError: they are.
    """
    kind = kind_of(data)
    if kind not in {GRAPH, JSON, DAMAGED_JSON, TEXT, ZIP, BINARY}:
        raise _not_a_graph("this", kind)


def explain_plan_error(data: bytes, error: str) -> PlanError:
    """The error for bytes that cannot be read as a plan, if they are of another kind."""
    kind = kind_of(data)
    if kind in {PLAN, JSON, DAMAGED_JSON, TEXT}:
        return PlanError(error)
    if kind is GRAPH:
        return PlanError("this is an exported graph, not a plan: make a plan with `autoshard plan`")
    return PlanError(f"this is {kind.name}, not a plan: give a file of `autoshard plan -o`")


def _not_a_graph(name: object, kind: FileKind) -> ArchiveError:
    return ArchiveError(f"{name} is {kind.name}, not an exported graph: {kind.to_graph}")


def explain_topology_error(data: bytes, error: str) -> MeshError:
    """The error for bytes that cannot be read as a topology, if they are of another kind."""
    kind = kind_of(data)
    if kind in {TOPOLOGY, JSON, DAMAGED_JSON, TEXT}:
        return MeshError(error)
    return MeshError(f"this is {kind.name}, not a topology: give a file of `autoshard calibrate`")


def kind_of(data: bytes) -> FileKind:
    """Recognise the kind of a file by its content."""
    return kind_of_head(data[:1024]) or _kind_of_zip(data) or _kind_of_text(data) or BINARY


def kind_of_head(head: bytes) -> FileKind | None:
    """Recognise the kind of a binary file by its first bytes; None if they do not decide."""
    if not head.strip():
        return EMPTY
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[8:10] == b'{"' and 0 < int.from_bytes(head[:8], "little") < 1 << 30:
        return SAFETENSORS
    if head.startswith(_ONNX_VERSION) and head[2:3] in _ONNX_TAGS:
        return ONNX
    return None


def _kind_of_zip(data: bytes) -> FileKind | None:
    if not data.startswith(_ZIP):
        return None
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return GRAPH  # damaged: read_archive says how
    if any("models/" in name and name.endswith(".json") for name in names):
        return GRAPH
    paths = "\n".join(f"/{name}" for name in names)
    found = (kind for part, kind in _MEMBERS.items() if part in paths)
    return next(found, ZIP)


def _kind_of_text(data: bytes) -> FileKind | None:
    if data.lstrip()[:1] in (b"{", b"["):
        return _kind_of_json(data)
    if b"\0" in data[:1024] or len(data) > _MAX_TEXT:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        statements = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        if any(isinstance(part, statements) for part in ast.parse(text).body):
            return PYTHON
    return TEXT


def _kind_of_json(data: bytes) -> FileKind:
    # Programs may be large: a key decides without parsing them.
    if b'"graph_module"' in data and b'"certificate"' not in data:
        return GRAPH
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return DAMAGED_JSON
    keys = document if isinstance(document, dict) else {}
    return next((kind for key, kind in _KEYS if key in keys), JSON)
