"""Arguments of model.json -> arguments of the IR."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autoshard.errors import SchemaError, UnsupportedError
from autoshard.graph.codes import DTYPES, LAYOUTS, MEMORY_FORMATS
from autoshard.graph.fields import member, typed, union
from autoshard.graph.ir import Argument, Ref, Token, TokenKind
from autoshard.graph.symbols import Symbols, to_float

T = TypeVar("T")


def parse_argument(arg: object, symbols: Symbols) -> Argument:
    """One argument of an operator.

    Raises:
        SchemaError: it is malformed.
        UnsupportedError: its kind has no place in a plan (script objects, complex numbers).
    """
    tag, payload = union(arg, "an argument")
    if tag in _READERS:
        return _READERS[tag](payload)
    if tag in _SYMBOLIC:
        return symbols.resolve(payload)
    if tag in _SYMBOLIC_LISTS:
        return tuple(symbols.resolve(item) for item in typed(payload, list, repr(tag)))
    raise UnsupportedError(
        f"arguments of kind {tag!r} cannot be planned; export the model without them"
    )


def tensor_name(payload: object) -> str:
    """The value that a TensorArgument names."""
    return member(payload, "name", str)


def _ref(payload: object) -> Ref:
    return Ref(tensor_name(payload))


def _optional_ref(payload: object) -> Argument:
    tag, inner = union(payload, "an optional tensor")
    if tag == "as_none":
        return None
    if tag == "as_tensor":
        return _ref(inner)
    raise SchemaError(f"unknown kind of optional tensor {tag!r}")


def _device(payload: object) -> Token:
    kind = member(payload, "type", str)
    index = typed(payload, dict, "'as_device'").get("index")
    number = "" if index is None else f":{typed(index, int, 'the device index')}"
    return Token(TokenKind.DEVICE, kind + number)


def _coded(kind: TokenKind, codes: Mapping[int, str]) -> Callable[[Any], Token]:
    def read(payload: object) -> Token:
        code = typed(payload, int, f"the {kind.value}")
        if code not in codes:
            raise UnsupportedError(f"{kind.value} code {code} is unknown")
        return Token(kind, str(codes[code]))

    return read


def _plain(kind: type[T]) -> Callable[[Any], T]:
    return lambda payload: typed(payload, kind, f"a {kind.__name__} argument")


def _list(read: Callable[[Any], Argument]) -> Callable[[Any], tuple[Argument, ...]]:
    return lambda payload: tuple(read(item) for item in typed(payload, list, "a list argument"))


_READERS: dict[str, Callable[[Any], Argument]] = {
    "as_none": lambda _: None,
    "as_tensor": _ref,
    "as_tensors": _list(_ref),
    "as_nested_tensors": _list(_list(_ref)),
    "as_optional_tensor": _optional_ref,
    "as_optional_tensors": _list(_optional_ref),
    "as_int": _plain(int),
    "as_ints": _list(_plain(int)),
    "as_int_lists": _list(_list(_plain(int))),
    "as_float": to_float,
    "as_floats": _list(to_float),
    "as_float_lists": _list(_list(to_float)),
    "as_bool": _plain(bool),
    "as_bools": _list(_plain(bool)),
    "as_string": _plain(str),
    "as_strings": _list(_plain(str)),
    "as_scalar_type": _coded(TokenKind.DTYPE, DTYPES),
    "as_device": _device,
    "as_layout": _coded(TokenKind.LAYOUT, LAYOUTS),
    "as_memory_format": _coded(TokenKind.MEMORY_FORMAT, MEMORY_FORMATS),
}
_SYMBOLIC = frozenset({"as_sym_int", "as_sym_float", "as_sym_bool"})
_SYMBOLIC_LISTS = frozenset({"as_sym_ints", "as_sym_floats", "as_sym_bools"})
