"""The imported model: an immutable graph of operators and the tensors between them.

Nothing here knows torch. Operators keep PyTorch's names (`aten.linear.default`), and arguments keep
the names of the operator's schema, so that a runtime can call them again.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

from autoshard.errors import SchemaError

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
        made["dynamic"] = self._planned_at(sizes).to_json()
        return made

    def to_json(self) -> dict[str, Any]:
        """The open sizes as plain JSON; `dynamic_from_json` reads them back."""
        return {
            "symbols": [asdict(symbol) for symbol in self.symbols],
            "sizes": [
                {
                    "terms": [[factor, list(names)] for factor, names in terms],
                    "places": [list(path) for path in places],
                }
                for terms, places in self.sizes
            ],
        }

    def _planned_at(self, sizes: Mapping[str, int]) -> "Dynamic":
        symbols = (Symbol(s.name, sizes[s.name], s.least, s.most) for s in self.symbols)
        return Dynamic(tuple(symbols), self.sizes)


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


@dataclass(frozen=True, slots=True)
class Token:
    """An argument that names a torch object: a dtype, a device, a memory format."""

    kind: TokenKind
    value: str


Argument = None | bool | int | float | str | Ref | Token | tuple["Argument", ...]


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

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    dtypes: tuple[DType, ...]
    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    contracted: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    unaffected: frozenset[int] = frozenset()
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

    name: str
    kind: InputKind
    target: str
    aliases: tuple[str, ...] = ()
    literal: bool | int | float | str | None = None
    contents: bytes | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph: a value by name, or a literal where `name` is None."""

    name: str | None
    literal: bool | int | float | str | None = None


@dataclass(frozen=True)
class Graph:
    """A program: inputs, operators in execution order, outputs.

    Attributes:
        inputs: parameters, buffers and constants first, then what is prepared, then what the
            caller passes.
        nodes: in an order in which every value is made before it is used.
        outputs: what forward returns, flattened.
        values: shape and type of every value by name.
        in_spec: how (args, kwargs) nest, as PyTorch's own JSON tree spec; may be empty.
        out_spec: how the outputs nest, likewise.
        rules: of operators that this library has no rule for, each for calls of one kind.
        preparation: a program without inputs that is run once, before the first step; its
            outputs are the inputs that are prepared, in their order. None where there are none.
        dynamic: sizes that the export left open; None where all are fixed.
    """

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


FILLING = frozenset({"full", "ones", "scalar_tensor", "zeros"})
MAKING = FILLING | {"arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices"}
"""Packets that make a tensor of nothing but their arguments."""

FOLLOWING = frozenset(
    """
    __and__ __or__ __xor__ abs add all amax amin any argmax argmin bitwise_and bitwise_not
    bitwise_or bitwise_xor broadcast_tensors broadcast_to bucketize cat ceil chunk clamp clamp_max
    clamp_min constant_pad_nd cos cumprod cumsum detach diagonal diff div einsum eq exp expand
    fill flip floor floor_divide fmod full_like gather ge gt index index_put index_select isin
    isinf isnan le log log10 log1p log2 logical_and logical_not logical_or logical_xor lt
    masked_fill max maximum mean meshgrid min minimum movedim mul narrow ne neg new_full new_ones
    new_zeros one_hot ones_like pad permute pow reciprocal remainder repeat repeat_interleave
    reshape roll round rsqrt rsub scatter select select_scatter sign sin slice slice_scatter split
    split_with_sizes sqrt squeeze stack sub sum t tanh to transpose tril triu trunc unbind unfold
    unsqueeze where zeros_like
    """.split()  # noqa: SIM905  a table of words
)
"""Packets that make the same of the same tensors; what is not here stays in the step."""


def may_prepare(node: Node) -> bool:
    """Whether a call whose inputs are the same in every step makes the same in every step."""
    namespace, packet = node.operator.split(".")[:2]
    return namespace == "aten" and packet in (FOLLOWING if node.inputs else MAKING)


def check_wiring(graph: Graph) -> None:
    """Check that the graph is a program.

    Raises:
        SchemaError: a name is used twice, a value is used before it is made (which is also
            what a cycle looks like) or has no shape; the message names it.
    """
    _check_unique("node", Counter(node.name for node in graph.nodes))
    made = [i.name for i in graph.inputs if i.kind is not InputKind.LITERAL]
    _check_unique("value", Counter([*made, *(o for node in graph.nodes for o in node.outputs)]))
    known = set(made)
    _check_shapes(graph, known, "the inputs")
    values = graph.values
    for node in graph.nodes:
        for name in node.inputs:
            if name not in known:
                raise SchemaError(
                    f"node {node.name!r} ({node.operator}) uses {name!r}, which no input and no "
                    "earlier node makes"
                )
        # Runs for everything in a graph, so no message is written before it is needed.
        if not all(name in values for name in node.outputs):
            _check_shapes(graph, node.outputs, f"node {node.name!r} ({node.operator})")
        known.update(node.outputs)
    for output in graph.outputs:
        if output.name is not None and output.name not in known:
            raise SchemaError(f"the graph returns {output.name!r}, which nothing makes")
    _check_contents(graph)
    _check_preparation(graph)


def _check_contents(graph: Graph) -> None:
    """Only constants have a value, and it is as long as their shape says."""
    for source in graph.inputs:
        if source.contents is None:
            continue
        tensor = graph.values[source.name] if source.kind is InputKind.CONSTANT else None
        if tensor is None or len(source.contents) != tensor.nbytes:
            raise SchemaError(
                f"{source.name!r} has a value of {len(source.contents)} bytes and is "
                f"{tensor or f'a {source.kind}'}"
            )


def _check_preparation(graph: Graph) -> None:
    """What is prepared is what the preparation makes, and it takes nothing."""
    taken = [i.name for i in graph.inputs if i.kind is InputKind.PREPARED]
    if graph.preparation is None:
        if taken:
            raise SchemaError(f"nothing makes {taken[0]!r}, which is to be prepared")
        return
    made = [output.name for output in graph.preparation.outputs]
    if graph.preparation.inputs or made != taken:
        raise SchemaError(
            f"the preparation must take nothing and make {taken}; it makes {made} of "
            f"{[i.name for i in graph.preparation.inputs]}"
        )
    for node in graph.preparation.nodes:
        if not may_prepare(node):
            raise SchemaError(
                f"node {node.name!r} ({node.operator}) of the preparation may be another in each "
                f"step, or on each rank"
            )
    check_wiring(graph.preparation)
    for name in taken:
        if graph.values[name] != graph.preparation.values[name]:
            raise SchemaError(
                f"{name!r} is {graph.values[name]}, and prepared it is "
                f"{graph.preparation.values[name]}"
            )


def _check_unique(what: str, counts: Counter[str]) -> None:
    name, count = next(iter(counts.most_common(1)), ("", 0))
    if count > 1:
        raise SchemaError(f"the {what} name {name!r} is used {count} times")


def _check_shapes(graph: Graph, names: "set[str] | tuple[str, ...]", maker: str) -> None:
    missing = sorted(name for name in names if name not in graph.values)
    if missing:
        raise SchemaError(f"{maker}: value {missing[0]!r} has no entry among the tensor values")
