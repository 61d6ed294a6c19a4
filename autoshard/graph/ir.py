"""The imported model: an immutable graph of operators and the tensors between them.

Nothing here knows torch. Operators keep PyTorch's names (`aten.linear.default`), and arguments keep
the names of the operator's schema, so that a runtime can call them again.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isfinite, prod
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, GetCoreSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema, core_schema

_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64")
"""How graphs are read from JSON: unknown members and inexact types are refused."""

T = TypeVar("T")
SortedSet = Annotated[frozenset[T], PlainSerializer(sorted)]
"""A set that JSON has in ascending order, so that equal graphs have equal digests."""

Path = tuple[str | int, ...]
"""Where an integer stands in a document: keys and positions from the outside in."""

Terms = tuple[tuple[int, tuple[str, ...]], ...]
"""A sum of products: a coefficient and the symbols that it is multiplied with, each."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """An open size.

    Attributes:
        name: as the export calls it.
        planned: its number in the example inputs.
        least: smallest number that the program is made for.
        most: largest; None where there is no end.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    planned: int
    least: int
    most: int | None

    def allows(self, number: int) -> bool:
        """Whether the program is made for a number."""
        return self.least <= number and (self.most is None or number <= self.most)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The open sizes of a program, and all integers in its document that depend on them.

    Attributes:
        symbols: the open sizes.
        sizes: what the integers at some places are.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    symbols: tuple[Symbol, ...]
    sizes: tuple[tuple[Terms, tuple[Path, ...]], ...]

    @property
    def planned(self) -> dict[str, int]:
        """The number of each symbol in the example inputs."""
        return {symbol.name: symbol.planned for symbol in self.symbols}

    def symbols_of(self, value: str) -> dict[int, str]:
        """The symbols that are sizes of a value themselves, by dim."""
        return {
            path[-1]: names[0]
            for ((factor, names), *more), places in self.sizes
            if factor == 1 and len(names) == 1 and not more
            for path in places
            if path[:-1] == ("values", value, "shape") and isinstance(path[-1], int)
        }

    def resized(self, document: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """The document of the program at other sizes.

        Args:
            document: of the program, as JSON has it; not changed.
            sizes: a number for each symbol.
        """
        changes: dict[str | int, Any] = {}
        for terms, places in self.sizes:
            number = value_of(terms, sizes)
            for path in places:
                branch = changes
                for key in path[:-1]:
                    branch = branch.setdefault(key, {})
                branch[path[-1]] = number
        made: dict[str, Any] = _changed(dict(document), changes)
        symbols = [
            {**symbol, "planned": sizes[symbol["name"]]}
            for symbol in document["dynamic"]["symbols"]
        ]
        made["dynamic"] = {**document["dynamic"], "symbols": symbols}
        return made


def value_of(terms: Terms, sizes: Mapping[str, int]) -> int:
    """The number that a sum of products is."""
    return sum(factor * prod(sizes[name] for name in names) for factor, names in terms)


def _changed(document: Any, changes: Any) -> Any:
    if not isinstance(changes, dict):
        return changes
    made = document.copy()
    for key, change in changes.items():
        made[key] = _changed(document[key], change)
    return made


class DType(StrEnum):
    """Element type of a tensor, by PyTorch's name."""

    UINT8 = "uint8"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    COMPLEX32 = "complex32"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    BOOL = "bool"
    BFLOAT16 = "bfloat16"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"

    # Tensors are hashed often, and an enumeration would do it in Python.
    __hash__ = str.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_differentiable(self) -> bool:
        """Whether tensors of this type can carry a gradient."""
        return self.value.startswith(("float", "bfloat", "complex"))


_ITEMSIZE = {
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.COMPLEX32: 4,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
    DType.BOOL: 1,
    DType.BFLOAT16: 2,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and element type of a value.

    Attributes:
        shape: sizes, all static.
        dtype: element type.
        requires_grad: whether a gradient flows to this value in training.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph, by the value's name."""

    name: str


class TokenKind(StrEnum):
    """What a symbolic argument stands for."""

    DTYPE = "dtype"
    DEVICE = "device"
    LAYOUT = "layout"
    MEMORY_FORMAT = "memory_format"


_TOKEN_KINDS = frozenset(kind.value for kind in TokenKind)


@dataclass(frozen=True, slots=True)
class Token:
    """An argument that names a torch object: a dtype, a device, a memory format."""

    kind: TokenKind
    value: str


def argument_to_json(argument: "Argument") -> Any:
    """The argument as plain JSON; `argument_from_json` reads it back.

    >>> argument_to_json((Ref("x"), Token(TokenKind.DTYPE, "float32"), float("inf"), 2))
    [{'ref': 'x'}, {'dtype': 'float32'}, {'float': 'inf'}, 2]
    """
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Token):
        return {argument.kind.value: argument.value}
    if isinstance(argument, tuple):
        return [argument_to_json(item) for item in argument]
    if isinstance(argument, float) and not isfinite(argument):
        return {"float": str(argument)}
    return argument


def argument_from_json(value: object) -> "Argument":
    """Read what `argument_to_json` writes.

    Raises:
        ValueError: it is not the JSON of an argument.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return tuple(argument_from_json(item) for item in value)
        case {"ref": str(name), **rest} if not rest:
            return Ref(name)
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {**members} if len(members) == 1:
            kind, text = next(iter(members.items()))
            if kind in _TOKEN_KINDS and isinstance(text, str):
                return Token(TokenKind(kind), text)
    raise ValueError(f"{value!r} is not an argument of an operator")


def literal_from_json(value: object) -> bool | int | float | str | None:
    """Read an argument that is one number, string, flag or None.

    Raises:
        ValueError: it is anything else.
    """
    argument = argument_from_json(value)
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise ValueError(f"a literal must be a number, a string, a flag or null, not {value!r}")


@dataclass(frozen=True)
class _ReadBy:
    """Tells pydantic how to read and write an argument."""

    read: Callable[[object], "Argument"]

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(argument_to_json)
        return core_schema.no_info_plain_validator_function(self.read, serialization=write)


Literal = Annotated[bool | int | float | str | None, _ReadBy(literal_from_json)]
Argument = Annotated[
    bool | int | float | str | Ref | Token | tuple["Argument", ...] | None,
    _ReadBy(argument_from_json),
]


@dataclass(frozen=True)
class Node:
    """One call of an operator.

    Attributes:
        name: unique among the nodes of its graph.
        operator: namespace, packet and overload, as in `aten.add.Tensor`.
        arguments: schema name and value of each argument given, in schema order;
            arguments left at their default are absent.
        outputs: names of the values made, in order; a list output is flattened.
        module: dotted path of the module that made the call; empty at the root.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    outputs: tuple[str, ...]
    module: str = ""

    def argument(self, name: str, default: Argument = None) -> Argument:
        """The argument of that schema name, or the default where it was left out."""
        return next((value for key, value in self.arguments if key == name), default)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values used, in argument order, lists flattened, repeats kept."""
        names: list[str] = []
        for _, argument in self.arguments:
            # Most arguments are a value or a number, and a generator would take far longer.
            if isinstance(argument, Ref):
                names.append(argument.name)
            elif isinstance(argument, tuple):
                names.extend(ref.name for ref in references(argument))
        return tuple(names)


def references(argument: Argument) -> Iterator[Ref]:
    """Every value an argument refers to, in order, through nested lists."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def anonymous(argument: Argument) -> Argument:
    """An argument with `Ref("")` for every tensor."""
    if isinstance(argument, Ref):
        return Ref("")
    if isinstance(argument, tuple):
        return tuple(anonymous(item) for item in argument)
    return argument


Letters = tuple[tuple[str, ...], ...]
"""The letters of each dim of one tensor, major first; () for a dim of size 1."""


@dataclass(frozen=True)
class CallRule:
    """How calls of one kind may be cut: a rule that travels with its graph.

    It is for operators that this library has no rule for. What its letters and groups mean
    is said by `autoshard.ops.OperatorRule`, whose fields these are.

    Attributes:
        operator: namespace, packet and overload.
        arguments: those of the calls, with `Ref("")` for every tensor.
        dtypes: element type of each tensor input.
        sizes: name and size of each letter.
        inputs: letters of each tensor input; a dim's size is the product of its letters'.
        outputs: letters of each output.
        contracted: letters that are summed over.
        whole: letters that may not be cut.
        linear: groups of inputs in which the operator is jointly linear.
        addends: inputs that are added to a contraction.
        unaffected: outputs that come out whole from a cut of a letter that they lack.
        differentiable: whether it holds for gradients too.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    dtypes: tuple[DType, ...]
    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    contracted: SortedSet[str] = frozenset()
    whole: SortedSet[str] = frozenset()
    linear: tuple[SortedSet[int], ...] = ()
    addends: SortedSet[int] = frozenset()
    unaffected: SortedSet[int] = frozenset()
    differentiable: bool = True

    @cached_property
    def call(self) -> Hashable:
        """What calls must be like for the rule to be theirs, as `call_key` says it."""
        sizes = dict(self.sizes)
        tensors = tuple(
            (tuple(prod(sizes[x] for x in letters) for letters in dims), dtype)
            for dims, dtype in zip(self.inputs, self.dtypes, strict=True)
        )
        return call_key(self.operator, self.arguments, tensors)


def call_key(
    operator: str,
    arguments: tuple[tuple[str, Argument], ...],
    tensors: tuple[tuple[tuple[int, ...], DType], ...],
) -> Hashable:
    """A call without names: operator, attributes, shape and element type of each input."""
    return operator, tuple((name, _attribute(value)) for name, value in arguments), tensors


def _kind(node: Node, tensors: Mapping[str, Hashable]) -> Hashable:
    arguments = tuple((name, _attribute(value)) for name, value in node.arguments)
    values = tuple(tensors[value] for value in (*node.inputs, *node.outputs))
    return node.operator, arguments, values


def _attribute(argument: Argument) -> Hashable:
    """What an argument says beside names, 1 and 1.0 and True apart."""
    if isinstance(argument, Ref):
        return Ref
    if isinstance(argument, tuple):
        return tuple(_attribute(item) for item in argument)
    return type(argument), argument


class InputKind(StrEnum):
    """Where a graph input comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A tensor that the model captured; its values travel with the model, not the graph."""
    PREPARED = "prepared"
    """A tensor that is the same in every step, and that the graph itself says how to make."""
    USER = "user"
    """A tensor that the caller passes to forward."""
    LITERAL = "literal"
    """A number, string, flag or None that the caller passes; fixed when exported."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph.

    Attributes:
        name: the value's name; a literal has no value but keeps its place among the inputs.
        kind: where it comes from.
        target: dotted name in the model (parameter, buffer, constant), the argument, or what
            the preparation calls it.
        aliases: further names of the same parameter in the model's state dict.
        literal: the value of a literal.
        contents: elements of a small constant, in order and in little-endian bytes; None where
            its value is not known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    kind: InputKind
    target: str
    aliases: tuple[str, ...] = ()
    literal: Literal = None
    contents: bytes | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph: a value by name, or a literal where `name` is None.

    Attributes:
        name: the value.
        literal: the result of forward where there is no value.
        updates: name of the buffer whose contents the value replaces after the step; None for a
            result of forward.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str | None
    literal: Literal = None
    updates: str | None = None


@dataclass(frozen=True)
class Graph:
    """A program: inputs, operators in execution order, outputs.

    Attributes:
        inputs: parameters, buffers and constants first, then what is prepared, then what the
            caller passes.
        nodes: in an order in which every value is made before it is used.
        outputs: what forward returns, flattened; then the new contents of the buffers that
            forward overwrites.
        values: shape and type of every value by name.
        in_spec: how (args, kwargs) nest, as PyTorch's own JSON tree spec; may be empty.
        out_spec: how the outputs nest, likewise.
        rules: of operators that this library has no rule for, each for calls of one kind.
        preparation: a program without inputs that is run once, before the first step; its
            outputs are the inputs that are prepared, in their order. None where there are none.
        dynamic: sizes that the export left open; None where all are fixed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, Tensor]
    in_spec: str = ""
    out_spec: str = ""
    rules: tuple[CallRule, ...] = ()
    preparation: "Graph | None" = None
    dynamic: Dynamic | None = None

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """For each value the (node index, input position) pairs that use it, in order."""
        uses: dict[str, list[tuple[int, int]]] = {name: [] for name in self.values}
        for i, node in enumerate(self.nodes):
            for position, name in enumerate(node.inputs):
                uses[name].append((i, position))
        return {name: tuple(pairs) for name, pairs in uses.items()}

    @property
    def num_results(self) -> int:
        """Number of outputs that forward returns; the others update buffers."""
        return len(self.outputs) - len(self.updated)

    @cached_property
    def updated(self) -> Mapping[str, int]:
        """The position of the output that replaces each buffer that forward overwrites."""
        return {o.updates: i for i, o in enumerate(self.outputs) if o.updates is not None}

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The index of each node by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The index of the node that makes each value; inputs have none."""
        return {value: i for i, node in enumerate(self.nodes) for value in node.outputs}

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number per node, equal where operator, attributes and tensors are equal."""
        tensors: dict[Tensor, int] = {}
        # Tensors are hashed once per value and not once per use.
        of = {name: tensors.setdefault(x, len(tensors)) for name, x in self.values.items()}
        numbers: dict[Hashable, int] = {}
        return tuple(numbers.setdefault(_kind(x, of), len(numbers)) for x in self.nodes)

    def kind(self, node: Node) -> Hashable:
        """Operator, attributes and tensors of a node: all that its own behaviour depends on."""
        return _kind(node, self.values)

    def rule_of(self, node: Node) -> CallRule | None:
        """The rule that travels with the graph for a node, if there is one."""
        return self._rules.get(self.call_of(node)) if self.rules else None

    def call_of(self, node: Node) -> Hashable:
        """A node's call without names, by which rules are found."""
        tensors = tuple((self.values[v].shape, self.values[v].dtype) for v in node.inputs)
        return call_key(node.operator, node.arguments, tensors)

    @cached_property
    def _rules(self) -> Mapping[Hashable, CallRule]:
        return {rule.call: rule for rule in self.rules}

    @property
    def parameters(self) -> tuple[Input, ...]:
        """The inputs that are parameters."""
        return tuple(i for i in self.inputs if i.kind is InputKind.PARAMETER)
