"""A graph as plain JSON, for plan documents and cache keys.

References read `{"ref": name}`, tokens `{"dtype": "float32"}`, non-finite floats
`{"float": "inf"}`, and lists are lists. Arguments are pairs, since not every store keeps the
order of an object's members.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from autoshard.errors import GraphError, SchemaError
from autoshard.graph.custom_rules import rules_from_json, rules_to_json
from autoshard.graph.dynamic_shapes import dynamic_from_json
from autoshard.graph.ir import (
    DType,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Tensor,
    check_wiring,
)
from autoshard.graph.json_fields import (
    check_members,
    code,
    each,
    from_json,
    member,
    pair_from_json,
    place,
    to_json,
    typed,
)

Literal = bool | int | float | str | None


def graph_digest(graph: Graph) -> str:
    """SHA-256 of everything the graph says, as 64 hexadecimal digits.

    Names, module paths and tree specs count, because plans repeat them.
    """
    # A graph never changes, so its digest is kept with it, as a cached property would be.
    kept = vars(graph)
    if _DIGEST not in kept:
        kept[_DIGEST] = _document_digest(graph_to_json(graph))
    digest: str = kept[_DIGEST]
    return digest


def _document_digest(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as an object of plain JSON types; `graph_from_json` reads it back."""
    rules = {"rules": rules_to_json(graph.rules)} if graph.rules else {}
    dynamic = {"dynamic": graph.dynamic.to_json()} if graph.dynamic else {}
    return {
        "inputs": [_input_to_json(i) for i in graph.inputs],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "outputs": [
            {"literal": to_json(o.literal)} if o.name is None else {"name": o.name}
            for o in graph.outputs
        ],
        "values": {name: _tensor_to_json(tensor) for name, tensor in graph.values.items()},
        "in_spec": graph.in_spec,
        "out_spec": graph.out_spec,
        **rules,
        **({"preparation": graph_to_json(graph.preparation)} if graph.preparation else {}),
        **dynamic,
    }


def resized(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The program at other numbers for the sizes that its export left open.

    Args:
        graph: the program.
        sizes: numbers by name of the symbol; the others stay as they are.

    Raises:
        GraphError: the program has no such open size, or is not made for the number.
    """
    symbols = {symbol.name: symbol for symbol in graph.dynamic.symbols} if graph.dynamic else {}
    for name, number in sizes.items():
        if name not in symbols:
            raise GraphError(f"no size {name!r} was left open; there are {sorted(symbols)}")
        if not symbols[name].allows(number):
            raise GraphError(
                f"size {name!r} was exported for {symbols[name].least} to {symbols[name].most}, "
                f"and is {number}; export again with a wider torch.export.Dim"
            )
    if graph.dynamic is None or not sizes:
        return graph
    numbers = graph.dynamic.planned | dict(sizes)
    return graph_from_json(graph.dynamic.resized(graph_to_json(graph), numbers))


def _input_to_json(source: Input) -> dict[str, Any]:
    members: dict[str, Any] = {
        "name": source.name,
        "kind": source.kind.value,
        "target": source.target,
    }
    if source.aliases:
        members["aliases"] = list(source.aliases)
    if source.kind is InputKind.LITERAL:
        members["literal"] = to_json(source.literal)
    if source.contents is not None:
        members["contents"] = base64.b64encode(source.contents).decode()
    return members


def _node_to_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "operator": node.operator,
        "arguments": [[key, to_json(value)] for key, value in node.arguments],
        "outputs": list(node.outputs),
        "module": node.module,
    }


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": tensor.dtype.value,
        "requires_grad": tensor.requires_grad,
    }


def graph_from_json(document: object, *, known: Graph | None = None) -> Graph:
    """Read what `graph_to_json` wrote.

    Args:
        document: what it wrote.
        known: a graph that this may well be; it is returned if it is, which is quicker.

    Raises:
        SchemaError: a member is missing, unknown or mistyped, or the graph does not hang
            together; the message names the place.
    """
    if known is not None and _is_document_of(known, document):
        return known
    graph = _graph_from_json(document)
    check_wiring(graph)
    return graph


def _graph_from_json(document: object) -> Graph:
    check_members(document, _OF_A_GRAPH, "a graph")
    members = typed(document, dict, "a graph")
    dynamic = members.get("dynamic")
    graph = Graph(
        inputs=each(document, "inputs", _input_from_json),
        nodes=each(document, "nodes", _node_from_json),
        outputs=each(document, "outputs", _output_from_json),
        values=_values_from_json(member(document, "values", dict)),
        in_spec=member(document, "in_spec", str),
        out_spec=member(document, "out_spec", str),
        rules=rules_from_json(members.get("rules", [])),
        preparation=_preparation_from_json(members),
        dynamic=None if dynamic is None else dynamic_from_json(dynamic, document),
    )
    made = {n for node in graph.nodes for n in node.outputs}
    made |= {i.name for i in graph.inputs if i.kind is not InputKind.LITERAL}
    extra = sorted(graph.values.keys() - made)
    if extra:
        raise SchemaError(f"values[{extra[0]!r}]: no input and no node makes this value")
    return graph


def _preparation_from_json(members: dict[str, Any]) -> Graph | None:
    if "preparation" not in members:
        return None
    with place("preparation"):
        # One that says how itself is prepared is refused before it is read.
        if "preparation" in typed(members["preparation"], dict, "a graph"):
            raise SchemaError("a preparation has none of its own")
        return _graph_from_json(members["preparation"])


def _is_document_of(graph: Graph, document: object) -> bool:
    try:
        return _document_digest(document) == graph_digest(graph)
    except (TypeError, ValueError, RecursionError):  # it is not JSON; reading it says where
        return False


def _input_from_json(item: object) -> Input:
    check_members(item, {"name", "kind", "target", "aliases", "literal", "contents"}, "an input")
    kind = code(InputKind, member(item, "kind", str))
    aliases = member(item, "aliases", list) if "aliases" in typed(item, dict, "") else []
    return Input(
        name=member(item, "name", str),
        kind=kind,
        target=member(item, "target", str),
        aliases=tuple(typed(alias, str, "an alias") for alias in aliases),
        literal=_literal(item) if kind is InputKind.LITERAL else None,
        contents=_contents(item) if "contents" in typed(item, dict, "") else None,
    )


def _contents(item: object) -> bytes:
    try:
        return base64.b64decode(member(item, "contents", str), validate=True)
    except ValueError as error:
        raise SchemaError(f"'contents' is not base64: {error}") from error


def _node_from_json(item: object) -> Node:
    check_members(item, _OF_A_NODE, "a node")
    return Node(
        name=member(item, "name", str),
        operator=member(item, "operator", str),
        arguments=each(item, "arguments", pair_from_json),
        outputs=tuple(typed(o, str, "an output") for o in member(item, "outputs", list)),
        module=member(item, "module", str),
    )


def _output_from_json(item: object) -> Output:
    if "name" in typed(item, dict, "an output"):
        check_members(item, {"name"}, "an output")
        return Output(member(item, "name", str))
    check_members(item, {"literal"}, "an output")
    return Output(None, _literal(item))


def _literal(item: object) -> Literal:
    members = typed(item, dict, "a literal")
    if "literal" not in members:
        raise SchemaError("'literal' is missing")
    value = from_json(members["literal"])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SchemaError(f"a literal must be a number, a string, a flag or null, not {value!r}")


def _values_from_json(values: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, item in values.items():
        with place(f"values[{name!r}]"):
            check_members(item, _OF_A_TENSOR, "a value")
            shape = tuple(typed(s, int, "a size") for s in member(item, "shape", list))
            if shape and min(shape) < 0:
                raise SchemaError(f"shape {shape} has a negative size")
            dtype = code(DType, member(item, "dtype", str))
            tensors[name] = Tensor(shape, dtype, member(item, "requires_grad", bool))
    return tensors


_OF_A_GRAPH = frozenset(
    "inputs nodes outputs values in_spec out_spec rules preparation dynamic".split()  # noqa: SIM905
)
_OF_A_NODE = frozenset({"name", "operator", "arguments", "outputs", "module"})
_OF_A_TENSOR = frozenset({"shape", "dtype", "requires_grad"})
_DIGEST = "digest"
