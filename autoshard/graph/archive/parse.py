"""Parser of an archive's `model.json`: checks every member and replaces symbolic sizes by hints.

The result is a `Program`, which may have nested regions; `Graph` has none. The integer codes of
torch objects are those of `torch._export.serde.schema`, schema version 8.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autoshard.errors import ArchiveError, SchemaError, UnsupportedError
from autoshard.graph.archive.symbols import Symbols, size, to_float
from autoshard.graph.checks import check_shape
from autoshard.graph.dtype import DType
from autoshard.graph.ir import (
    Argument,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    Token,
    TokenKind,
)
from autoshard.graph.json_fields import member, place, read_each, typed, union

SCHEMA_MAJOR = 8
"""Schema version of the integer codes; minor versions only add optional members."""

PIPE_SPLIT = "pippy._pipe_split.default"
"""The operator that `torch.distributed.pipelining.pipe_split()` calls."""

DTYPES = {
    1: DType.UINT8,
    2: DType.INT8,
    3: DType.INT16,
    4: DType.INT32,
    5: DType.INT64,
    6: DType.FLOAT16,
    7: DType.FLOAT32,
    8: DType.FLOAT64,
    9: DType.COMPLEX32,
    10: DType.COMPLEX64,
    11: DType.COMPLEX128,
    12: DType.BOOL,
    13: DType.BFLOAT16,
    28: DType.UINT16,
    29: DType.FLOAT8_E4M3FN,
    30: DType.FLOAT8_E5M2,
    34: DType.UINT32,
    35: DType.UINT64,
}

LAYOUTS = {
    1: "sparse_coo",
    2: "sparse_csr",
    3: "sparse_csc",
    4: "sparse_bsr",
    5: "sparse_bsc",
    6: "_mkldnn",
    7: "strided",
}

MEMORY_FORMATS = {
    1: "contiguous_format",
    2: "channels_last",
    3: "channels_last_3d",
    4: "preserve_format",
}


@dataclass(frozen=True, slots=True)
class Body:
    """A list of steps with their inputs, outputs and names.

    Attributes:
        inputs: names of the input values; None for a number, which is already inlined.
        steps: operators and regions in execution order.
        outputs: outputs of the body.
        values: shape and element type of every value of the body.
    """

    inputs: tuple[str | None, ...]
    steps: tuple["Node | Region", ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Region:
    """A call of a higher-order operator: a body that runs with some settings, such as no_grad.

    Attributes:
        name: unique among the steps of its body.
        operator: such as `higher_order.wrap_with_set_grad_enabled`.
        settings: arguments before the body.
        body: the sub-graph that runs.
        operands: arguments after the body, one for each input of the body.
        outputs: names of the output values, one for each output of the body; empty for a number.
    """

    name: str
    operator: str
    settings: tuple[Argument, ...]
    body: Body
    operands: tuple[Argument, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A complete program; the inputs and outputs of its body are those of the model.

    Attributes:
        inputs: inputs of the model, including parameters.
        body: the steps of forward.
        in_spec: JSON tree spec of the arguments.
        out_spec: JSON tree spec of the outputs.
        has_dynamic_sizes: True if some sizes are dynamic, so that hints stand for them.
    """

    inputs: tuple[Input, ...]
    body: Body
    in_spec: str = ""
    out_spec: str = ""
    has_dynamic_sizes: bool = False


T = TypeVar("T")


def parse_argument(arg: object, symbols: Symbols) -> Argument:
    """Read an argument of an operator.

    Raises:
        SchemaError: it is malformed.
        UnsupportedError: its kind is not supported (script objects, complex numbers).
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
    """Name of the value in a TensorArgument."""
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


_SYMBOLIC_OUTPUTS = frozenset({"as_sym_int", "as_sym_float", "as_sym_bool"})
_WITHOUT_TENSORS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten.sym_constrain_range.default",
        "aten.promote_types.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
"""Operators that check numbers and element types, or compute one, and change no tensor."""
_REPEATED_CALL = re.compile(r"@\d+$")
_STATE_KINDS = {
    "parameter": (InputKind.PARAMETER, "parameter_name"),
    "buffer": (InputKind.BUFFER, "buffer_name"),
    "tensor_constant": (InputKind.CONSTANT, "tensor_constant_name"),
}


def parse_program(model: Mapping[str, Any], *, max_nodes: int) -> Program:
    """Read a parsed model.json.

    Args:
        model: the JSON object.
        max_nodes: maximum number of operator calls, including sub-graphs.

    Raises:
        SchemaError: a member is missing or mistyped, or the schema version is unsupported; the
            message has the location.
        UnsupportedError: the program uses a feature that cannot be planned.
        ArchiveError: there are more operator calls than allowed.
    """
    _check_version(model)
    module = member(model, "graph_module", dict)
    with place("graph_module.graph"):
        graph = member(module, "graph", dict)
        _check_count(graph, max_nodes)
        symbols = Symbols.of(graph)
        body = _parse_body(graph, symbols)
    signature = member(module, "signature", dict)
    with place("graph_module.signature"):
        inputs = tuple(_parse_inputs(member(signature, "input_specs", list)))
        _check_outputs(member(signature, "output_specs", list))
    has_dynamic_sizes = bool(model.get("range_constraints"))
    return Program(inputs, body, *_parse_specs(module), has_dynamic_sizes=has_dynamic_sizes)


def _check_version(model: Mapping[str, Any]) -> None:
    if "graph_module" not in model or "schema_version" not in model:
        raise SchemaError(
            "this JSON is not an exported program: it needs 'graph_module' and 'schema_version', "
            "as models/model.json of a torch.export.save archive has them"
        )
    with place("schema_version"):
        major = member(model["schema_version"], "major", int)
    if major != SCHEMA_MAJOR:
        raise SchemaError(
            f"the program has schema version {major}, and only version {SCHEMA_MAJOR} can be "
            "read; export it with torch 2.8 to 2.13"
        )


def _check_count(graph: Mapping[str, Any], limit: int) -> None:
    count = _count_nodes(graph)
    if count > limit:
        raise ArchiveError(
            f"the program has {count:,} operator calls, more than the limit of {limit:,}; "
            "plan a part of the model, or raise ArchiveLimits.nodes",
            "nodes",
        )


def _count_nodes(graph: Mapping[str, Any]) -> int:
    nodes = member(graph, "nodes", list)
    return len(nodes) + sum(read_each(nodes, _count_nested, lambda i, _: f"nodes[{i}]"))


def _count_nested(node: object) -> int:
    nested = (member(item, "arg", dict).get("as_graph") for item in member(node, "inputs", list))
    return sum(_count_nodes(member(x, "graph", dict)) for x in nested if x is not None)


def _parse_body(graph: Mapping[str, Any], symbols: Symbols) -> Body:
    tensors = member(graph, "tensor_values", dict)
    names = list(tensors)
    metas = read_each(tensors.values(), _parse_tensor, lambda i, _: f"tensor_values[{names[i]!r}]")
    steps = read_each(
        enumerate(member(graph, "nodes", list)),
        lambda numbered: _parse_step(numbered[1], numbered[0], symbols),
        lambda i, numbered: f"nodes[{i}]{_label(numbered[1])}",
    )
    with place("inputs"):
        inputs = tuple(_parse_body_input(arg) for arg in member(graph, "inputs", list))
    with place("outputs"):
        outputs = tuple(
            _parse_output(arg, symbols)
            for item in member(graph, "outputs", list)
            for arg in _flattened(item)
        )
    kept = tuple(step for step in steps if step is not None)
    return Body(inputs, kept, outputs, dict(zip(names, metas, strict=True)))


def _label(node: object) -> str:
    name = node.get("name") if isinstance(node, dict) else None
    return f" ({name})" if name else ""


def _parse_tensor(meta: object) -> Tensor:
    code = member(meta, "dtype", int)
    if code not in DTYPES:
        raise UnsupportedError(f"element type code {code} is unknown; convert the tensor first")
    shape = tuple(size(s) for s in member(meta, "sizes", list))
    dtype = DTYPES[code]
    check_shape(shape, dtype)
    return Tensor(shape, dtype, member(meta, "requires_grad", bool))


def _parse_body_input(arg: object) -> str | None:
    tag, payload = union(arg, "a graph input")
    return tensor_name(payload) if tag == "as_tensor" else None


def _parse_output(arg: object, symbols: Symbols) -> Output:
    argument = parse_argument(arg, symbols)
    if isinstance(argument, Ref):
        return Output(argument.name)
    if argument is None or isinstance(argument, bool | int | float | str):
        return Output(None, argument)
    raise UnsupportedError("the model returns something that is neither a tensor nor a number")


def _parse_step(node: object, position: int, symbols: Symbols) -> Node | Region | None:
    """Read an operator call; None if it only computes or asserts symbolic sizes."""
    operator = member(node, "target", str).removeprefix("torch.ops.")
    if not all(operator.partition(".")):
        raise SchemaError(f"'target' is {operator!r}, which is not the name of an operator")
    outputs = member(node, "outputs", list)
    names = () if operator in _WITHOUT_TENSORS else tuple(_output_names(outputs))
    if operator in _WITHOUT_TENSORS or (outputs and not names):
        return None
    name = typed(node, dict, "a node").get("name") or (names[0] if names else f"node_{position}")
    inputs = member(node, "inputs", list)
    if any("as_graph" in member(item, "arg", dict) for item in inputs):
        numbered = tuple(_output_names(outputs, number=""))
        return _parse_region(typed(name, str, "'name'"), operator, inputs, numbered, symbols)
    if not names and operator != PIPE_SPLIT:
        raise UnsupportedError(f"operator {operator} has no outputs, so its effect is unknown")
    keys = [member(item, "name", str) for item in inputs]
    values = read_each(
        inputs,
        lambda item: parse_argument(member(item, "arg", dict), symbols),
        lambda i, _: f"argument {keys[i]!r}",
    )
    arguments = tuple(zip(keys, values, strict=True))
    return Node(typed(name, str, "'name'"), operator, arguments, names, _module(node))


def _output_names(outputs: list[Any], *, number: str | None = None) -> Iterator[str]:
    """Names of the tensors among outputs, and another name for each number if one is given."""
    for output in outputs:
        tag, payload = union(output, "an output")
        if tag == "as_tensor":
            yield tensor_name(payload)
        elif tag == "as_tensors":
            yield from map(tensor_name, typed(payload, list, "'as_tensors'"))
        elif tag not in _SYMBOLIC_OUTPUTS:
            raise UnsupportedError(f"outputs of kind {tag!r} cannot be planned")
        elif number is not None:
            yield number


def _flattened(arg: object) -> Iterator[object]:
    tag, payload = union(arg, "an output")
    if tag == "as_tensors":
        for item in typed(payload, list, "'as_tensors'"):
            yield {"as_tensor": item}
    else:
        yield arg


def _parse_region(
    name: str, operator: str, inputs: list[Any], names: tuple[str, ...], symbols: Symbols
) -> Region:
    args = [member(item, "arg", dict) for item in inputs]
    at = [i for i, arg in enumerate(args) if "as_graph" in arg]
    if len(at) > 1:
        raise UnsupportedError(
            f"{operator} chooses between sub-graphs while running, which cannot be planned; "
            "make the choice before exporting"
        )
    graph = member(args[at[0]]["as_graph"], "graph", dict)
    body = _parse_body(graph, Symbols.of(graph, symbols))
    settings = tuple(parse_argument(arg, symbols) for arg in args[: at[0]])
    operands = tuple(parse_argument(arg, symbols) for arg in args[at[0] + 1 :])
    return Region(name, operator, settings, body, operands, names)


def _module(node: object) -> str:
    """Path of the innermost module on the stack, a text of the form `key,path,type;...`."""
    stack = member(node, "metadata", dict).get("nn_module_stack")
    fields = stack.rsplit(";", 1)[-1].split(",") if isinstance(stack, str) else []
    path = fields[1] if len(fields) > 1 else ""
    return _REPEATED_CALL.sub("", path) if "@" in path else path


def _parse_inputs(specs: list[Any]) -> Iterator[Input]:
    yield from read_each(
        enumerate(specs),
        lambda numbered: _parse_input(numbered[1], numbered[0]),
        lambda i, _: f"input_specs[{i}]",
    )


def _parse_input(spec: object, position: int) -> Input:
    tag, payload = union(spec, "an input")
    if tag in _STATE_KINDS:
        kind, key = _STATE_KINDS[tag]
        return Input(tensor_name(member(payload, "arg", dict)), kind, member(payload, key, str))
    if tag == "constant_input":
        name = member(payload, "name", str)
        value = parse_argument(member(payload, "value", dict), Symbols({}))
        return _literal(name, value)
    if tag != "user_input":
        raise UnsupportedError(f"inputs of kind {tag!r} cannot be planned")
    argument = member(payload, "arg", dict)
    if "as_tensor" in argument:
        name = tensor_name(argument["as_tensor"])
        return Input(name, InputKind.USER, name)
    if union(argument, "an input")[0] in _SYMBOLIC_OUTPUTS:
        raise UnsupportedError(
            "a number that the caller passes is symbolic; export it as a fixed number"
        )
    return _literal(f"literal_{position}", parse_argument(argument, Symbols({})))


def _literal(name: str, value: Argument) -> Input:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise SchemaError(f"the value of {name!r} is not a number, string, boolean or None")
    return Input(name, InputKind.LITERAL, name, literal=value)


def _check_outputs(specs: list[Any]) -> None:
    for i, spec in enumerate(specs):
        tag, _ = union(spec, f"output_specs[{i}]")
        if tag not in {"user_output", "loss_output"}:
            raise UnsupportedError(
                f"output_specs[{i}]: the program returns a {tag!r}, as it does after "
                "run_decompositions; save the program that torch.export.export returned"
            )


def _parse_specs(module: Mapping[str, Any]) -> tuple[str, str]:
    """Tree specs of inputs and outputs, from the entry of the root module."""
    for entry in typed(module.get("module_call_graph", []), list, "'module_call_graph'"):
        signature = entry.get("signature") if isinstance(entry, dict) else None
        if signature is not None and entry.get("fqn") == "":
            return member(signature, "in_spec", str), member(signature, "out_spec", str)
    return "", ""
