"""A graph as plain JSON, for plan documents and cache keys.

References read `{"ref": name}`, tokens `{"dtype": "float32"}`, non-finite floats
`{"float": "inf"}`, and lists are lists. Arguments are pairs, since not every store keeps the
order of an object's members.
"""

import hashlib
import json
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from autoshard.errors import GraphError, SchemaError
from autoshard.graph.fields import member, place, typed
from autoshard.graph.ir import (
    Argument,
    DType,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    Token,
    TokenKind,
)
from autoshard.graph.wiring import check_wiring

T = TypeVar("T")
E = TypeVar("E", DType, InputKind, TokenKind)
Literal = bool | int | float | str | None


def graph_digest(graph: Graph) -> str:
    """SHA-256 of everything the graph says, as 64 hexadecimal digits.

    Names, module paths and tree specs count, because plans repeat them.
    """
    # A graph never changes, so its digest is kept with it, as a cached property would be.
    kept = vars(graph)
    if _DIGEST not in kept:
        document = graph_to_json(graph)
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        kept[_DIGEST] = hashlib.sha256(text.encode()).hexdigest()
    digest: str = kept[_DIGEST]
    return digest


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as an object of plain JSON types; `graph_from_json` reads it back."""
    return {
        "inputs": [_input_to_json(i) for i in graph.inputs],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "outputs": [
            {"literal": _to_json(o.literal)} if o.name is None else {"name": o.name}
            for o in graph.outputs
        ],
        "values": {name: _tensor_to_json(tensor) for name, tensor in graph.values.items()},
        "in_spec": graph.in_spec,
        "out_spec": graph.out_spec,
    }


def _input_to_json(source: Input) -> dict[str, Any]:
    members: dict[str, Any] = {
        "name": source.name,
        "kind": source.kind.value,
        "target": source.target,
    }
    if source.aliases:
        members["aliases"] = list(source.aliases)
    if source.kind is InputKind.LITERAL:
        members["literal"] = _to_json(source.literal)
    return members


def _node_to_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "operator": node.operator,
        "arguments": [[key, _to_json(value)] for key, value in node.arguments],
        "outputs": list(node.outputs),
        "module": node.module,
    }


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype.value,
        "requires_grad": tensor.requires_grad,
    }


def _to_json(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Token):
        return {argument.kind.value: argument.value}
    if isinstance(argument, tuple):
        return [_to_json(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


def graph_from_json(document: object) -> Graph:
    """Read what `graph_to_json` wrote.

    Raises:
        SchemaError: a member is missing, unknown or mistyped, or the graph does not hang
            together; the message names the place.
    """
    _check_members(
        document, {"inputs", "nodes", "outputs", "values", "in_spec", "out_spec"}, "a graph"
    )
    graph = Graph(
        inputs=_each(document, "inputs", _input_from_json),
        nodes=_each(document, "nodes", _node_from_json),
        outputs=_each(document, "outputs", _output_from_json),
        values=_values_from_json(member(document, "values", dict)),
        in_spec=member(document, "in_spec", str),
        out_spec=member(document, "out_spec", str),
    )
    check_wiring(graph)
    made = {n for node in graph.nodes for n in node.outputs}
    made |= {i.name for i in graph.inputs if i.kind is not InputKind.LITERAL}
    extra = sorted(graph.values.keys() - made)
    if extra:
        raise SchemaError(f"values[{extra[0]!r}]: no input and no node makes this value")
    return graph


def _each(owner: object, key: str, read: Callable[[object], T]) -> tuple[T, ...]:
    items = member(owner, key, list)
    done: list[T] = []
    try:
        for item in items:
            done.append(read(item))  # noqa: PERF401  `done` says how far it got
    except GraphError as error:
        raise type(error)(f"{key}[{len(done)}]: {error}") from error
    return tuple(done)


def _check_members(value: object, known: AbstractSet[str], what: str) -> None:
    if unknown := typed(value, dict, what).keys() - known:
        raise SchemaError(f"{what} has no member {min(unknown)!r}")


def _input_from_json(item: object) -> Input:
    _check_members(item, {"name", "kind", "target", "aliases", "literal"}, "an input")
    kind = _code(InputKind, member(item, "kind", str))
    aliases = member(item, "aliases", list) if "aliases" in typed(item, dict, "") else []
    return Input(
        name=member(item, "name", str),
        kind=kind,
        target=member(item, "target", str),
        aliases=tuple(typed(alias, str, "an alias") for alias in aliases),
        literal=_literal(item) if kind is InputKind.LITERAL else None,
    )


def _node_from_json(item: object) -> Node:
    _check_members(item, _OF_A_NODE, "a node")
    return Node(
        name=member(item, "name", str),
        operator=member(item, "operator", str),
        arguments=_each(item, "arguments", _pair_from_json),
        outputs=tuple(typed(o, str, "an output") for o in member(item, "outputs", list)),
        module=member(item, "module", str),
    )


def _pair_from_json(item: object) -> tuple[str, Argument]:
    pair = typed(item, list, "an argument")
    if len(pair) != _PAIR:
        raise SchemaError("an argument must be a pair of a name and a value")
    return typed(pair[0], str, "the name of an argument"), _from_json(pair[1])


def _output_from_json(item: object) -> Output:
    if "name" in typed(item, dict, "an output"):
        _check_members(item, {"name"}, "an output")
        return Output(member(item, "name", str))
    _check_members(item, {"literal"}, "an output")
    return Output(None, _literal(item))


def _literal(item: object) -> Literal:
    members = typed(item, dict, "a literal")
    if "literal" not in members:
        raise SchemaError("'literal' is missing")
    value = _from_json(members["literal"])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SchemaError(f"a literal must be a number, a string, a flag or null, not {value!r}")


def _values_from_json(values: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, item in values.items():
        with place(f"values[{name!r}]"):
            _check_members(item, _OF_A_TENSOR, "a value")
            shape = tuple(typed(s, int, "a size") for s in member(item, "shape", list))
            if shape and min(shape) < 0:
                raise SchemaError(f"shape {shape} has a negative size")
            dtype = _code(DType, member(item, "dtype", str))
            tensors[name] = Tensor(shape, dtype, member(item, "requires_grad", bool))
    return tensors


def _from_json(value: object) -> Argument:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not isinstance(value, dict):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise SchemaError(f"{value!r} is not JSON")
    if len(value) != 1:
        raise SchemaError(f"an argument object must have exactly one member, not {len(value)}")
    tag, payload = next(iter(value.items()))
    text = typed(payload, str, repr(tag))
    if tag == "ref":
        return Ref(text)
    if tag == "float":
        if text not in _NON_FINITE:
            raise SchemaError(f"'float' must be one of {', '.join(_NON_FINITE)}, not {text!r}")
        return float(text)
    return Token(_code(TokenKind, tag), text)


def _code(kind: type[E], text: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise SchemaError(f"{text!r} is no {kind.__name__}") from None


_PAIR = 2
_OF_A_NODE = frozenset({"name", "operator", "arguments", "outputs", "module"})
_OF_A_TENSOR = frozenset({"shape", "dtype", "requires_grad"})
_DIGEST = "digest"
_NON_FINITE = ("inf", "-inf", "nan")
