"""Values of constants that an archive holds, where they are small.

`torch.export.save` writes each constant as the bytes of its elements, and what they mean as JSON.
Only these two are read; what was pickled stays untouched and has no value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from autoshard.errors import SchemaError
from autoshard.graph.codes import DTYPES, LAYOUTS
from autoshard.graph.fields import member, place, typed
from autoshard.graph.ir import DType, Graph, Input, InputKind

CONSTANTS_FOLDER = "data/constants/"
CONSTANTS_FILE = f"{CONSTANTS_FOLDER}model_constants_config.json"
CONSTANT_BYTES = 1 << 16
"""How large a constant may be whose value travels with its graph."""
CONSTANTS_BYTES = 1 << 24
"""How large all of them may be together: many constants may share one file."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that an archive has the value of.

    Attributes:
        shape: its sizes.
        dtype: element type.
        contents: its elements in order, in little-endian bytes.
    """

    shape: tuple[int, ...]
    dtype: DType
    contents: bytes


def read_constants(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, Constant]:
    """The small constants whose elements lie in a row, by name, up to `CONSTANTS_BYTES` in all.

    Args:
        config: what the archive says of its constants.
        read: the contents of a file of the folder of constants; None where there is none.

    Raises:
        SchemaError: what the archive says is mistyped, or a constant is shorter than it says.
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
    if prod(shape) * dtype.itemsize > CONSTANT_BYTES or not _lie_in_a_row(shape, strides):
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
    """Sizes that are numbers, none of them negative; None if any is a symbol."""
    values = [typed(item, dict, "a size").get("as_int") for item in items]
    numbers = tuple(v for v in values if isinstance(v, int) and v >= 0)
    return numbers if len(numbers) == len(values) else None


def _lie_in_a_row(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    return strides is not None and all(
        size == 1 or stride == prod(shape[dim + 1 :])
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=False))
    )


def with_contents(graph: Graph, constants: Mapping[str, Constant]) -> Graph:
    """The graph with the values of those of its constants that are known."""

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
