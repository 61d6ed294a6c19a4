"""Safe reading of untrusted `.pt2` archives: `model.json` and the values of small constants.

Nothing is unpickled or executed, and torch is not imported. `torch.export.save` writes each
constant as raw bytes and a JSON description, which are read here. Weights, large constants and
pickled objects are ignored.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from autoshard.base.files import check_not_foreign, read_graph_file
from autoshard.base.integers import check_integers
from autoshard.base.schemas import type_adapter
from autoshard.errors import ArchiveError, GraphError, SchemaError
from autoshard.graph.archive.parse import DTYPES, LAYOUTS
from autoshard.graph.checks import check_precision, check_shape
from autoshard.graph.dtype import DType
from autoshard.graph.ir import ExportedModel, Graph, Input, InputKind
from autoshard.graph.json_fields import member, place, typed

CONSTANTS_FOLDER = "data/constants/"
CONSTANTS_FILE = f"{CONSTANTS_FOLDER}model_constants_config.json"
CONSTANT_BYTES = 1 << 16
"""Maximum size in bytes of a constant whose value is stored in the graph."""
CONSTANTS_BYTES = 1 << 24
"""Maximum size in bytes of all such constants together; many may share one file."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant with its value.

    Attributes:
        shape: sizes.
        dtype: element type.
        contents: elements in row-major order, as little-endian bytes.
    """

    shape: tuple[int, ...]
    dtype: DType
    contents: bytes


def read_constants(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, Constant]:
    """Read the small contiguous constants by name, up to `CONSTANTS_BYTES` in total.

    Args:
        config: the JSON description of the constants.
        read: returns the contents of a file in the folder of constants, or None if it is missing.

    Raises:
        SchemaError: the description is mistyped, or a file is too short.
    """
    with place(CONSTANTS_FILE):
        return dict(_constants(member(config, "config", dict), read))


def _constants(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> Iterator[tuple[str, Constant]]:
    left = CONSTANTS_BYTES
    for name, entry in config.items():
        with place(name):
            meta = entry.get("tensor_meta") if isinstance(entry, dict) else None
            if meta is None or member(entry, "use_pickle", bool):
                continue
            found = _constant(meta, member(entry, "path_name", str), read)
        if found is None:
            continue
        left -= len(found.contents)
        if left < 0:
            return
        yield name, found


def _constant(
    meta: Mapping[str, Any], file: str, read: Callable[[str], bytes | None]
) -> Constant | None:
    if member(member(meta, "device", dict), "type", str) == "meta":
        return None
    shape, strides = (_integers(member(meta, key, list)) for key in ("sizes", "strides"))
    dtype, layout = DTYPES.get(member(meta, "dtype", int)), LAYOUTS.get(member(meta, "layout", int))
    offset = _integers([member(meta, "storage_offset", dict)])
    if shape is None or offset is None or dtype is None or layout != "strided":
        return None
    # Checked by itself: with a size of 0, others may be large.
    check_shape(shape, dtype)
    if prod(shape) * dtype.itemsize > CONSTANT_BYTES or not _is_contiguous(shape, strides):
        return None
    contents = read(file)
    if contents is None:
        return None
    first = offset[0] * dtype.itemsize
    own = contents[first : first + prod(shape) * dtype.itemsize]
    if len(own) < prod(shape) * dtype.itemsize:
        raise SchemaError(f"{file} has {len(contents)} bytes, too few for {list(shape)} {dtype}")
    return Constant(shape, dtype, own)


def _integers(items: list[Any]) -> tuple[int, ...] | None:
    """Non-negative literal sizes; None if one is symbolic."""
    values = [typed(item, dict, "a size").get("as_int") for item in items]
    numbers = tuple(v for v in values if isinstance(v, int) and v >= 0)
    return numbers if len(numbers) == len(values) else None


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    return strides is not None and all(
        size == 1 or stride == prod(shape[dim + 1 :])
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=False))
    )


def with_contents(graph: Graph, constants: Mapping[str, Constant]) -> Graph:
    """Return the graph with the known values of its constants."""

    def known(source: Input) -> Input:
        constant = constants.get(source.target) if source.kind is InputKind.CONSTANT else None
        if constant is None:
            return source
        tensor = graph.values[source.name]
        if (tensor.shape, tensor.dtype) != (constant.shape, constant.dtype):
            raise SchemaError(
                f"{source.target!r} is {tensor.dtype} {list(tensor.shape)} in the program, and "
                f"{constant.dtype} {list(constant.shape)} in {CONSTANTS_FILE}"
            )
        return replace(source, contents=constant.contents)

    return replace(graph, inputs=tuple(map(known, graph.inputs))) if constants else graph


def with_paths(graph: Graph, paths: Mapping[str, str]) -> Graph:
    """Return the graph with the constants that the model holds named by their paths."""

    def named(source: Input) -> Input:
        path = paths.get(source.target) if source.kind is InputKind.CONSTANT else None
        return source if path is None else replace(source, target=path)

    return replace(graph, inputs=tuple(map(named, graph.inputs))) if paths else graph


def with_precision(graph: Graph, export: "ExportRecord") -> Graph:
    """Return the graph with the element types at rest and of reductions of its parameters."""
    policy = export.model.mixed_precision if export.model else None
    if policy is None:
        return graph

    def known(source: Input) -> Input:
        if source.kind is not InputKind.PARAMETER:
            return source
        dtype = graph.values[source.name].dtype
        is_reduced = dtype.is_differentiable and dtype is not policy.reduce_dtype
        return replace(
            source,
            stored=export.stored.get(source.target),
            reduced=policy.reduce_dtype if is_reduced else None,
        )

    graph = replace(graph, inputs=tuple(map(known, graph.inputs)))
    check_precision(graph)
    return graph


EXPORT_FILE = "autoshard.json"
"""Extra file with the `ExportRecord` of `export_model`, as JSON."""

_NAMESPACE = re.compile(rb'"torch\.ops\.(\w+)\.')
_MODEL_SUFFIX = "models/model.json"
_EXPORT_SUFFIX = f"extra/{EXPORT_FILE}"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ValueError,
)
"""Exceptions of zipfile for truncated, encrypted, overlapping or unknown members."""


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Size limits of an archive; the defaults are far above the size of public models.

    Attributes:
        archive_bytes: size of the archive, or of a bare model.json.
        model_bytes: decompressed size of model.json.
        compression_ratio: decompressed over compressed size of model.json.
        nodes: number of operator calls in the program, including sub-graphs.
        values: number of JSON values in model.json, each of which takes memory when it is read;
            Llama-3-70B has 380,000.
    """

    archive_bytes: int = 1 << 30
    model_bytes: int = 256 << 20
    compression_ratio: float = 200.0
    nodes: int = 200_000
    values: int = 10_000_000


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """Record that `export_model` writes beside the exported program.

    Attributes:
        ties: groups of parameter names that are one tensor each.
        model: the exported model.
        stored: element type at rest of the parameters that the program reads converted, by name.
        constants: where the model holds tensors that are neither parameters nor buffers, by their
            names in the program (`autoshard.graph.export.python_state.description.paths`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    ties: tuple[tuple[str, ...], ...]
    model: ExportedModel | None = None
    stored: Mapping[str, DType] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The content of the extra file."""
        return type_adapter(ExportRecord).dump_json(self)


@dataclass(frozen=True)
class Archive:
    """Contents of an archive.

    Attributes:
        model: the parsed model.json.
        export: record of `export_model`; None if it did not make the archive.
        constants: values of small constants by name.
    """

    model: dict[str, Any]
    export: ExportRecord | None = None
    constants: Mapping[str, Constant] = field(default_factory=dict)


def read_archive(source: str | Path | bytes, *, limits: ArchiveLimits | None = None) -> Archive:
    """Read an exported program.

    Args:
        source: path or bytes of a `.pt2` archive, or of its `models/model.json` alone.
        limits: size limits.

    Raises:
        ArchiveError: the archive cannot be read, has no or several models, or exceeds a limit.
        SchemaError: model.json is not JSON, or not an object.
    """
    limits = limits or ArchiveLimits()
    if isinstance(source, bytes):
        data = source
        check_not_foreign(data)
    else:
        data = read_graph_file(Path(source), limits.archive_bytes)
    _check_size("the archive", len(data), limits.archive_bytes, "archive_bytes")
    if data.lstrip()[:1] == b"{":
        _check_size("model.json", len(data), limits.model_bytes, "model_bytes")
        return Archive(_parse(data, "model.json", limits))
    return _read_zip(data, limits)


def operator_namespaces(data: bytes, *, limits: ArchiveLimits) -> frozenset[str]:
    """Namespaces of all operators in an archive, without parsing it.

    Empty if the archive is invalid; `read_archive` reports the error.
    """
    text = data
    try:
        if data.lstrip()[:1] != b"{":
            with zipfile.ZipFile(BytesIO(data)) as archive:
                text = _decompress(archive, _find_model(archive), limits)
    except (*_UNREADABLE, ArchiveError):
        return frozenset()
    return frozenset(name.decode() for name in _NAMESPACE.findall(text))


def _check_size(what: str, size: int, limit: int, field: str) -> None:
    if size > limit:
        raise ArchiveError(
            f"{what} is larger than the limit of {limit:,} bytes; export on the meta device, "
            f"which leaves the weights out, or raise ArchiveLimits.{field}",
            field,
        )


def _read_zip(data: bytes, limits: ArchiveLimits) -> Archive:
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            model = _decompress(archive, _find_model(archive), limits)
            found = _find(archive, _EXPORT_SUFFIX)
            extra = _decompress(archive, found[0], limits) if len(found) == 1 else None
            constants = _read_constants(archive, limits)
    except _UNREADABLE as error:
        if isinstance(error, GraphError):
            raise
        raise ArchiveError(
            f"this is not a readable .pt2 archive ({error}); make one with torch.export.save, "
            "or send its models/model.json"
        ) from error
    export = None if extra is None else _parse_export(extra)
    return Archive(_parse(model, _MODEL_SUFFIX, limits), export, constants)


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

    text = _decompress(archive, config[0], limits)
    return read_constants(_parse(text, CONSTANTS_FILE, limits), read)


def _find(archive: zipfile.ZipFile, suffix: str) -> list[zipfile.ZipInfo]:
    names = (suffix, f"/{suffix}")
    return [i for i in archive.infolist() if i.filename == suffix or i.filename.endswith(names[1])]


def _find_model(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = _find(archive, _MODEL_SUFFIX)
    if len(found) == 1:
        return found[0]
    if found:
        raise ArchiveError(
            f"the archive has {len(found)} models named {_MODEL_SUFFIX}; it must have one"
        )
    others = [
        i.filename
        for i in archive.infolist()
        if "models/" in i.filename and i.filename.endswith(".json")
    ]
    if others:
        raise ArchiveError(
            f"the archive has {', '.join(others[:3])} but no {_MODEL_SUFFIX}; "
            "save one program with torch.export.save"
        )
    raise ArchiveError(
        f"the archive has no {_MODEL_SUFFIX}; make it with torch.export.save of torch 2.8 or newer"
    )


def _decompress(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limits: ArchiveLimits) -> bytes:
    """Decompress one member, reading at most the limit regardless of its header.

    Of bzip2 and LZMA, a first byte may need the memory of hundreds of megabytes, so that no limit
    of what is read protects from it; torch writes neither.
    """
    if member.compress_type not in _METHODS:
        raise ArchiveError(
            f"{member.filename} is compressed by method {member.compress_type} of zip; archives "
            "have stored and deflated members: save it again with torch.export.save"
        )
    by_ratio = int(member.compress_size * limits.compression_ratio)
    allowed = min(limits.model_bytes, by_ratio)
    with archive.open(member) as file:
        data = file.read(allowed + 1)
    if len(data) <= allowed:
        return data
    if by_ratio < limits.model_bytes:
        raise ArchiveError(
            f"{member.filename} decompresses to more than {limits.compression_ratio:g} times its "
            "size, like a zip bomb; save it again with torch.export.save, or raise "
            "ArchiveLimits.compression_ratio",
            "compression_ratio",
        )
    raise ArchiveError(
        f"{member.filename} is larger than the limit of {limits.model_bytes:,} bytes; "
        "plan a smaller program, or raise ArchiveLimits.model_bytes",
        "model_bytes",
    )


def _parse(data: bytes, what: str, limits: ArchiveLimits) -> dict[str, Any]:
    # Every value but the first follows one of these characters.
    num_values = 1 + sum(map(data.count, (b",", b"[", b"{")))
    if num_values > limits.values:
        raise ArchiveError(
            f"{what} has up to {num_values:,} values, more than the limit of {limits.values:,}; "
            "plan a smaller program, or raise ArchiveLimits.values",
            "values",
        )
    try:
        parsed = json.loads(data)
    except RecursionError:
        raise SchemaError(f"{what} nests too deeply to be an exported program") from None
    except ValueError as error:
        raise SchemaError(f"{what} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise SchemaError(f"{what} is a JSON {type(parsed).__name__}, not an object")
    if _SURROGATE.search(data) and not _is_text(parsed):
        raise SchemaError(f"{what} has a text with half of a surrogate pair, which is no character")
    check_integers(data, parsed, SchemaError, what)
    return parsed


def _is_text(document: object) -> bool:
    """True if all texts of a document can be written as UTF-8."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_export(data: bytes) -> ExportRecord:
    try:
        return type_adapter(ExportRecord).validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, found["loc"]))
        raise SchemaError(f"{_EXPORT_SUFFIX}: {place}: {found['msg']}") from None
