"""Intermediate representation of a model: an immutable graph of operator calls and tensors.

This module does not import torch. Operators have PyTorch's names (`aten.linear.default`) and
arguments the names of the operator's schema, so that a runtime can call them.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import isfinite, prod
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, GetCoreSchemaHandler, JsonValue, PlainSerializer
from pydantic_core import CoreSchema, core_schema

from autoshard.graph.dtype import DType
from autoshard.graph.mixed_precision import MixedPrecision
from autoshard.graph.sizes.dynamic_sizes import Dynamic

_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64")
"""Pydantic settings for reading JSON: unknown members and inexact types are errors."""

T = TypeVar("T")
SortedSet = Annotated[frozenset[T], PlainSerializer(sorted)]
"""A set that is sorted in JSON, so that equal graphs have equal digests."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and element type of a value.

    Attributes:
        shape: static sizes.
        dtype: element type.
        requires_grad: True if a gradient flows to this value in training.
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
        """Size of the global tensor in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that refers to a value of the graph by name."""

    name: str


class TokenKind(StrEnum):
    """Kind of torch object that a `Token` names."""

    DTYPE = "dtype"
    DEVICE = "device"
    LAYOUT = "layout"
    MEMORY_FORMAT = "memory_format"


_TOKEN_KINDS = frozenset(kind.value for kind in TokenKind)


@dataclass(frozen=True, slots=True)
class Token:
    """An argument that names a torch object, such as a dtype, a device or a memory format."""

    kind: TokenKind
    value: str


def argument_to_json(argument: "Argument") -> Any:
    """Convert an argument to plain JSON, the inverse of `argument_from_json`.

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
    """Parse the JSON of an argument, as `argument_to_json` writes it.

    Raises:
        ValueError: the JSON is not an argument.
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
    """Parse the JSON of an argument that is a number, string, boolean or None.

    Raises:
        ValueError: the JSON is anything else.
    """
    argument = argument_from_json(value)
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise ValueError(f"a literal must be a number, a string, a boolean or null, not {value!r}")


@dataclass(frozen=True)
class _ReadBy:
    """Pydantic annotation that parses and serialises an argument."""

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
        arguments: schema name and value of each explicit argument, in schema order; arguments with
            their default value are absent.
        outputs: names of the output values, in order; a list output is flattened.
        module: dotted path of the module that made the call; empty for the root module.
        part: how often forward has called torch's `pipe_split()` before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    outputs: tuple[str, ...]
    module: str = ""
    part: int = 0

    def argument(self, name: str, default: Argument = None) -> Argument:
        """Return the argument with a schema name, or `default` if it is absent."""
        return next((value for key, value in self.arguments if key == name), default)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input values in argument order; lists are flattened, repetitions kept."""
        names: list[str] = []
        for _, argument in self.arguments:
            # Fast path: most arguments are a value or a number, and a generator is slower.
            if isinstance(argument, Ref):
                names.append(argument.name)
            elif isinstance(argument, tuple):
                names.extend(ref.name for ref in references(argument))
        return tuple(names)


def references(argument: Argument) -> Iterator[Ref]:
    """Yield all references in an argument and its nested lists, in order."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def anonymous(argument: Argument) -> Argument:
    """Replace every tensor in an argument with `Ref("")`."""
    if isinstance(argument, Ref):
        return Ref("")
    if isinstance(argument, tuple):
        return tuple(anonymous(item) for item in argument)
    return argument


Letters = tuple[tuple[str, ...], ...]
"""The letters of each dim of one tensor, major first; () for a dim of size 1."""


@dataclass(frozen=True)
class CallRule:
    """Sharding rule for one kind of call of an operator without a built-in rule.

    It is stored in the graph. `autoshard.ops.OperatorRule` explains letters and groups.

    Attributes:
        operator: namespace, packet and overload.
        arguments: arguments of the calls, with `Ref("")` for every tensor.
        dtypes: element type of each tensor input.
        sizes: name and size of each letter.
        inputs: letters of each tensor input; the size of a dim is the product of its letters.
        outputs: letters of each output.
        contracted: letters that are summed over.
        whole: letters that must not be sharded.
        linear: groups of inputs in which the operator is jointly linear.
        addends: inputs that are added to a contraction.
        unaffected: outputs that stay replicated when a letter that they lack is sharded.
        differentiable: True if the rule is also valid for gradients.
        pieces: letters of dims that concatenate pieces; relative size and letter of each.
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
    pieces: tuple[tuple[str, tuple[tuple[int, str | None], ...]], ...] = ()

    @cached_property
    def call(self) -> Hashable:
        """Key (see `call_key`) of the calls that the rule applies to."""
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
    """Key of a call: operator, attributes, and shape and element type of each input."""
    return operator, tuple((name, _attribute(value)) for name, value in arguments), tensors


def _numbered_kinds(nodes: Sequence[Node], tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """A number for each kind of node."""
    known: dict[Tensor, int] = {}
    # Hash each tensor once per value instead of once per use.
    tensor_of = {name: known.setdefault(x, len(known)) for name, x in tensors.items()}
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(_kind(x, tensor_of), len(numbers)) for x in nodes)


def _kind(node: Node, tensors: Mapping[str, Hashable]) -> Hashable:
    arguments = tuple((name, _attribute(value)) for name, value in node.arguments)
    values = tuple(tensors[value] for value in (*node.inputs, *node.outputs))
    return node.operator, arguments, values


def _attribute(argument: Argument) -> Hashable:
    """Hashable form of an argument without tensor names; distinguishes 1, 1.0 and True."""
    if isinstance(argument, Ref):
        return Ref
    if isinstance(argument, tuple):
        return tuple(_attribute(item) for item in argument)
    return type(argument), argument


class Origin(StrEnum):
    """The origin of a factor of a dim."""

    BATCH = "batch"
    INPUT = "input"
    """Another dim of a user input: a sequence, rows of pixels."""
    MODEL = "model"
    """A dim of a parameter, or of a tensor created inside the model."""


DimFactors = tuple[tuple[int, Origin], ...]
"""Sizes and origins of the factors of a dim, from the outermost to the innermost."""


class InputKind(StrEnum):
    """Origin of a graph input."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A tensor that the model captured; its values are stored with the model, not the graph."""
    PREPARED = "prepared"
    """A tensor that is the same in every step, computed by the preparation of the graph."""
    RECEIVED = "received"
    """A tensor that the previous pipeline stage sends."""
    USER = "user"
    """A tensor that the caller passes to forward."""
    LITERAL = "literal"
    """A number, string, boolean or None that the caller passes; fixed at export."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph.

    Attributes:
        name: name of the value; a literal has a name and a position but no value.
        kind: origin of the input.
        target: dotted name in the model (parameter, buffer, constant), name of the argument, or
            name in the preparation.
        aliases: further names of the same parameter in the model's state dict.
        literal: the value of a literal.
        contents: elements of a small constant in row-major order, as little-endian bytes; None if
            unknown.
        overwritten: True for an argument that the model's forward writes into, which the graph
            does not.
        dims: factors of each dim of a received tensor; () if no option needs them.
        stored: element type of a parameter at rest, if the program reads it converted to another.
        reduced: element type in which gradients of a parameter are reduced, if not that of the
            value that the program reads.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    kind: InputKind
    target: str
    aliases: tuple[str, ...] = ()
    literal: Literal = None
    contents: bytes | None = None
    overwritten: bool = False
    dims: tuple[DimFactors, ...] = ()
    stored: DType | None = None
    reduced: DType | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph: the name of a value, or a literal if `name` is None.

    Attributes:
        name: name of the value.
        literal: the result of forward if there is no value.
        updates: name of the buffer whose contents the value replaces after the step; None for a
            result of forward.
        sent: True for a value that goes to the next pipeline stage; if it requires a gradient, its
            gradient comes back.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str | None
    literal: Literal = None
    updates: str | None = None
    sent: bool = False


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The model that a graph was exported from.

    Attributes:
        training: True if it was in training mode.
        code: of exports that have no `state`; not read.
        hooked: likewise.
        mixed_precision: the policy under which it was exported.
        name: name of its class; empty if unknown.
        state: values of the Python state that forward read, by path
            (`autoshard.graph.export.python_state`); empty if unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    training: bool
    code: Mapping[str, str] = field(default_factory=dict)
    hooked: tuple[str, ...] = ()
    mixed_precision: MixedPrecision | None = None
    name: str = ""
    state: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A program: inputs, operator calls in execution order, outputs.

    Attributes:
        inputs: parameters, buffers and constants, then prepared inputs, then those received from
            the previous pipeline stage, then user inputs.
        nodes: operator calls in topological order.
        outputs: values sent to the next pipeline stage, then the flattened outputs of forward,
            then the new contents of buffers that forward updates.
        values: shape and element type of every value by name.
        in_spec: PyTorch's JSON tree spec of (args, kwargs); may be empty.
        out_spec: JSON tree spec of the outputs; may be empty.
        rules: rules for operators without a built-in rule, one per kind of call.
        preparation: a program without inputs that runs once, before the first step; its outputs
            are the prepared inputs, in order. None if there are none.
        dynamic: dynamic sizes; None if all sizes are static.
        fixed_sizes: why sizes that the export left dynamic are static; empty if there are none.
        model: the exported model; None if `export_model` did not make the archive.
        layers: of a part of a larger program, first and last index, exclusive, of each sequence of
            nodes that is repeated in the larger one.
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
    model: ExportedModel | None = None
    layers: tuple[tuple[int, int], ...] = ()
    fixed_sizes: str = ""

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """For each value, the (node index, input position) pairs that use it, in order."""
        uses: dict[str, list[tuple[int, int]]] = {name: [] for name in self.values}
        for i, node in enumerate(self.nodes):
            for position, name in enumerate(node.inputs):
                uses[name].append((i, position))
        return {name: tuple(pairs) for name, pairs in uses.items()}

    @cached_property
    def nbytes_of_uses(self) -> int:
        """Bytes of all values, each counted once and again for each of its uses."""
        uses = self.consumers
        return sum(x.nbytes * (1 + len(uses[name])) for name, x in self.values.items())

    @property
    def num_results(self) -> int:
        """Number of outputs that forward returns; the others update buffers."""
        return len(self.outputs) - len(self.updated)

    @cached_property
    def updated(self) -> Mapping[str, int]:
        """Position of the output with the new contents of each buffer that forward updates."""
        return {o.updates: i for i, o in enumerate(self.outputs) if o.updates is not None}

    @cached_property
    def running_statistics(self) -> frozenset[str]:
        """Values that batch norms in training change in place, although no schema says so."""
        norms = [node for node in self.nodes if node.argument("training") is True]
        values = (n.argument(name) for n in norms for name in ("running_mean", "running_var"))
        return frozenset(ref.name for value in values for ref in references(value))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Index of each node by name."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """Index of the node that produces each value; inputs have none."""
        return {value: i for i, node in enumerate(self.nodes) for value in node.outputs}

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """One number per node, equal for nodes with equal operator, attributes and tensors."""
        return _numbered_kinds(self.nodes, self.values)

    @cached_property
    def kinds_without_gradients(self) -> tuple[int, ...]:
        """The same, equal also for nodes that differ only in which tensors require a gradient."""
        tensors = {n: Tensor(tensor.shape, tensor.dtype) for n, tensor in self.values.items()}
        return _numbered_kinds(self.nodes, tensors)

    def kind(self, node: Node) -> Hashable:
        """Operator, attributes and tensors of a node, as a hashable key."""
        return _kind(node, self.values)

    def rule_of(self, node: Node) -> CallRule | None:
        """The rule in `rules` for a node; None if there is none."""
        return self._rules.get(self.call_of(node)) if self.rules else None

    def call_of(self, node: Node) -> Hashable:
        """Key of a node's call (see `call_key`)."""
        tensors = tuple((self.values[v].shape, self.values[v].dtype) for v in node.inputs)
        return call_key(node.operator, node.arguments, tensors)

    @cached_property
    def _rules(self) -> Mapping[Hashable, CallRule]:
        return {rule.call: rule for rule in self.rules}

    @property
    def parameters(self) -> tuple[Input, ...]:
        """Inputs that are parameters."""
        return tuple(i for i in self.inputs if i.kind is InputKind.PARAMETER)

    def stored_dtype(self, name: str) -> DType:
        """Element type of an input at rest; the program may read it converted to another."""
        return self._stored.get(name) or self.values[name].dtype

    def reduced_dtype(self, name: str) -> DType:
        """Element type in which gradients of a value are reduced."""
        return self._reduced.get(name) or self.values[name].dtype

    @cached_property
    def converted(self) -> frozenset[str]:
        """Parameters that are at rest in another element type than the program reads."""
        return frozenset(self._stored)

    @cached_property
    def _stored(self) -> Mapping[str, DType]:
        return {
            i.name: i.stored
            for i in self.inputs
            if i.stored is not None and i.stored is not self.values[i.name].dtype
        }

    @cached_property
    def _reduced(self) -> Mapping[str, DType]:
        """Element types of reductions that are not those of the value.

        What is computed from parameters alone, such as a transposed weight, is reduced as they are.
        """
        found = {i.name: i.reduced for i in self.inputs if i.reduced is not None}
        if found:
            parameters = {i.name for i in self.parameters}
            for node in self.nodes:
                if node.inputs and parameters.issuperset(node.inputs):
                    parameters.update(node.outputs)
                    dtype = next((found[v] for v in node.inputs if v in found), None)
                    if dtype is not None:
                        found.update(dict.fromkeys(node.outputs, dtype))
        return {
            name: dtype
            for name, dtype in found.items()
            if self.values[name].dtype.is_differentiable and self.values[name].dtype is not dtype
        }

    @property
    def compute_dtype(self) -> DType | None:
        """Element type in which operators read most parameters; None if all are integers."""
        values = {name: self.values[name] for name in self._floating}
        numel = {name: tensor.numel for name, tensor in values.items()}
        dtypes = {name: tensor.dtype for name, tensor in values.items()}
        return _most(numel, dtypes) if dtypes else None

    @cached_property
    def _floating(self) -> tuple[str, ...]:
        """Floating-point parameters; other floating-point inputs if there are no parameters."""
        sources = self.parameters or tuple(i for i in self.inputs if i.name in self.values)
        return tuple(i.name for i in sources if self.values[i.name].dtype.is_differentiable)

    @property
    def precision(self) -> str:
        """The element types of most parameters in words; one alone if all are equal.

        Such as "bfloat16 compute, float32 parameters, bfloat16 gradient reductions".
        """
        compute, floating = self.compute_dtype, self._floating
        if compute is None:
            return ""
        numel = {name: self.values[name].numel for name in floating}
        stored = _most(numel, {name: self.stored_dtype(name) for name in floating})
        reduced = compute
        if any(self.values[name].requires_grad for name in floating):
            reduced = _most(numel, {name: self.reduced_dtype(name) for name in floating})
        if compute is stored is reduced:
            return compute.value
        return f"{compute} compute, {stored} parameters, {reduced} gradient reductions"


def _most(numel: Mapping[str, int], dtypes: Mapping[str, DType]) -> DType:
    """The element type of most elements."""
    total: dict[DType, int] = {}
    for name, dtype in dtypes.items():
        total[dtype] = total.get(dtype, 0) + numel[name]
    return max(total, key=lambda dtype: total[dtype])
