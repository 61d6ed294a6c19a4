"""Graphs as JSON and their digests."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoshard.errors import SchemaError
from autoshard.graph import (
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
    graph_digest,
    graph_from_json,
    graph_to_json,
)

GRAPH = Graph(
    inputs=(
        Input("w", InputKind.PARAMETER, "head.weight", aliases=("embed.weight",)),
        Input("x", InputKind.USER, "x"),
        Input("limit", InputKind.LITERAL, "limit", literal=float("inf")),
    ),
    nodes=(
        Node(
            "pick", "aten.index.Tensor", (("self", Ref("w")), ("indices", (None, Ref("x")))), ("p",)
        ),
        Node(
            "fill",
            "aten.masked_fill.Scalar",
            (("self", Ref("p")), ("mask", Ref("x")), ("value", float("-inf"))),
            ("f",),
            "block.0",
        ),
        Node(
            "cast",
            "aten.to.dtype",
            (("self", Ref("f")), ("dtype", Token(TokenKind.DTYPE, "bfloat16")), ("copy", False)),
            ("c",),
        ),
    ),
    outputs=(Output("c"), Output(None, 2.5), Output(None)),
    values={
        "w": Tensor((8, 4), DType.FLOAT32, requires_grad=True),
        "x": Tensor((3,), DType.BOOL),
        "p": Tensor((8, 3), DType.FLOAT32, requires_grad=True),
        "f": Tensor((8, 3), DType.FLOAT32, requires_grad=True),
        "c": Tensor((8, 3), DType.BFLOAT16, requires_grad=True),
    },
    in_spec="[1, {}]",
)


def test_json_text_brings_the_same_graph_back() -> None:
    text = json.dumps(graph_to_json(GRAPH), allow_nan=False, sort_keys=True)
    back = graph_from_json(json.loads(text))
    assert back == GRAPH
    assert graph_digest(back) == graph_digest(GRAPH)


def test_a_known_graph_is_returned_where_a_document_is_its_own() -> None:
    document = graph_to_json(GRAPH)
    assert graph_from_json(copy.deepcopy(document), known=GRAPH) is GRAPH


CHANGES: list[Callable[[Graph], Graph]] = [
    lambda g: replace(g, outputs=g.outputs[:1]),
    lambda g: replace(g, out_spec="[1]"),
    lambda g: replace(g, inputs=(replace(g.inputs[0], aliases=()), *g.inputs[1:])),
    lambda g: replace(g, inputs=(*g.inputs[:2], replace(g.inputs[2], literal=1.0))),
    lambda g: replace(g, nodes=(replace(g.nodes[0], module="m"), *g.nodes[1:])),
    lambda g: replace(g, nodes=(replace(g.nodes[0], operator="aten.take.default"), *g.nodes[1:])),
    lambda g: replace(g, values={**g.values, "x": Tensor((4,), DType.BOOL)}),
    lambda g: replace(g, values={**g.values, "w": replace(g.values["w"], requires_grad=False)}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_digest_tells_graphs_apart(change: Callable[[Graph], Graph]) -> None:
    changed = change(GRAPH)
    assert graph_digest(changed) != graph_digest(GRAPH)
    assert graph_from_json(graph_to_json(changed), known=GRAPH) is not GRAPH


def test_digest_does_not_depend_on_the_order_of_values() -> None:
    other = replace(GRAPH, values=dict(reversed(GRAPH.values.items())))
    assert graph_digest(other) == graph_digest(GRAPH)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 0, "name"), None, r"nodes\.0\.name: Input should be a valid string"),
        (("nodes", 0, "colour"), 1, r"nodes\.0\.colour: Unexpected keyword argument"),
        (("nodes", 1, "arguments", 0), ["self"], r"nodes\.1\.arguments\.0\.1: Field required"),
        (("nodes", 1, "arguments", 0, 1), {"ref": "c"}, "uses 'c', which is neither"),
        (("nodes", 1, "arguments", 2, 1), {"float": "1e9"}, "is not an argument"),
        (("nodes", 2, "arguments", 1, 1), {"colour": "red"}, "is not an argument"),
        (("nodes", 2, "arguments", 1, 1), {"ref": "f", "dtype": "x"}, "is not an argument"),
        (("nodes", 2, "name"), "pick", "node name 'pick' is used 2 times"),
        (("inputs", 0, "kind"), "weight", r"inputs\.0\.kind: Input should be 'parameter'"),
        (("inputs", 2, "literal"), [1], "a literal must be"),
        (("outputs", 0), {"name": "gone"}, "returns 'gone'"),
        (("outputs", 0), {}, r"outputs\.0\.name: Field required"),
        (("outputs", 0, "updates"), "x", "must follow the results"),
        (("outputs",), [{"name": "x", "updates": "x"}], "'x', not a buffer"),
        (("outputs",), [{"name": "x", "updates": "gone"}], "'gone', not a buffer"),
        (("values", "x", "shape"), [-3], r"values\['x'\]: the shape .* negative"),
        (("values", "x", "dtype"), "int3", r"values\.x\.dtype: Input should be 'uint8'"),
        (
            ("values", "y"),
            {"shape": [], "dtype": "bool", "requires_grad": False},
            "no input or node",
        ),
        (("in_spec",), 3, "in_spec: Input should be a valid string"),
    ],
)
def test_documents_are_read_strictly(path: tuple[Any, ...], value: object, message: str) -> None:
    document: Any = copy.deepcopy(graph_to_json(GRAPH))
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    with pytest.raises(SchemaError, match=message):
        graph_from_json(document)
    with pytest.raises(SchemaError, match=message):
        graph_from_json(document, known=GRAPH)


def test_a_document_that_is_no_object_is_refused() -> None:
    with pytest.raises(SchemaError, match="a graph: Input should be an object"):
        graph_from_json([])


def test_a_document_that_is_no_json_is_refused_beside_a_known_graph() -> None:
    with pytest.raises(SchemaError, match="extra: Unexpected keyword argument"):
        graph_from_json({**graph_to_json(GRAPH), "extra": {1, 2}}, known=GRAPH)
