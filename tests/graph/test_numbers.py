"""Numbers in documents that are larger than anything real: an error that names them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autoshard import Plan, PlanOptions, check_plan, make_mesh, make_plan
from autoshard.base.integers import check_integers, format_integer
from autoshard.base.quantities import parse_bytes, parse_rate
from autoshard.errors import GraphError, InputError, MeshError, OptionError
from autoshard.graph import graph_from_json, graph_to_json, load_graph, rules_from_json
from autoshard.mesh import mesh_from_json, mesh_to_json, topology_from_json, topology_to_json

HUGE = (2**62, 2**63, 10**30, 10**4000, -1, -(10**30), -(10**4000), 1e308)
FLOAT32 = 7
MESH = make_mesh((2, 2))


def model_json(dim: int) -> bytes:
    """A model.json whose program adds a parameter of two dims to itself."""

    def tensor(*, requires_grad: bool) -> dict[str, Any]:
        sizes = [{"as_int": dim}, {"as_int": 8}]
        return {"dtype": FLOAT32, "sizes": sizes, "requires_grad": requires_grad}

    def reference(name: str) -> dict[str, Any]:
        return {"as_tensor": {"name": name}}

    node = {
        "target": "torch.ops.aten.add.Tensor",
        "inputs": [
            {"name": "self", "arg": reference("w"), "kind": 1},
            {"name": "other", "arg": reference("w"), "kind": 1},
            {"name": "alpha", "arg": {"as_float": 2}, "kind": 2},
        ],
        "outputs": [reference("y")],
        "metadata": {},
    }
    graph = {
        "inputs": [reference("w")],
        "outputs": [reference("y")],
        "nodes": [node],
        "tensor_values": {"w": tensor(requires_grad=True), "y": tensor(requires_grad=True)},
        "sym_int_values": {},
    }
    parameter = {"parameter": {"arg": {"name": "w"}, "parameter_name": "w"}}
    signature = {
        "input_specs": [parameter],
        "output_specs": [{"user_output": {"arg": reference("y")}}],
    }
    module = {"graph": graph, "signature": signature, "module_call_graph": []}
    version = {"major": 8, "minor": 1}
    return json.dumps({"graph_module": module, "schema_version": version}).encode()


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each number of a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield *path, key


def changed(document: Any, path: tuple[Any, ...], value: object) -> Any:
    copy = document.copy()
    copy[path[0]] = changed(copy[path[0]], path[1:], value) if path[1:] else value
    return copy


GRAPH = load_graph(model_json(4))
PLAN = make_plan(GRAPH, MESH, micro_batches=2)
RULE = {
    "operator": "my.scale.default",
    "arguments": [["x", {"ref": ""}], ["factor", 3]],
    "dtypes": ["float32"],
    "sizes": [["a", 4], ["b", 8]],
    "inputs": [[["a"], ["b"]]],
    "outputs": [[["a"], ["b"]]],
    "linear": [[0]],
    "addends": [0],
}


def read_plan(document: Any) -> object:
    plan = Plan.from_json(json.dumps(document))
    return str(plan), check_plan(plan, GRAPH), plan.to_json()


def plan_with(document: Any) -> object:
    options = PlanOptions(**document)
    return options.with_values(time_limit=1.0)


READERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "model": (
        json.loads(model_json(4)),
        lambda d: make_plan(load_graph(json.dumps(d).encode()), MESH, time_limit=5),
    ),
    "graph": (graph_to_json(GRAPH), lambda d: make_plan(graph_from_json(d), MESH, time_limit=5)),
    "rules": ([RULE], rules_from_json),
    "plan": (json.loads(PLAN.to_json()), read_plan),
    "mesh": (
        json.loads(mesh_to_json(MESH)),
        lambda d: make_plan(GRAPH, mesh_from_json(json.dumps(d)), time_limit=5),
    ),
    "topology": (
        json.loads(topology_to_json(MESH.topology)),
        lambda d: make_plan(
            GRAPH, make_mesh((2, 2), topology=topology_from_json(json.dumps(d))), time_limit=5
        ),
    ),
    "options": (
        PlanOptions(memory_budget="1GB", stages=2, balance=(1, 1)).model_dump(mode="json"),
        plan_with,
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", READERS)
def test_huge_numbers_in_a_document_are_refused_or_do_no_harm(name: str) -> None:
    document, read = READERS[name]
    read(document)
    errors: list[str] = []
    for path in places(document):
        for number in HUGE:
            try:
                read(changed(document, path, number))
            except InputError as error:
                errors.append(str(error))
    assert errors
    assert max(map(len, errors)) < 4000


@pytest.mark.parametrize("dim", [2**62, 10**30, 10**4000])
def test_a_dim_that_no_memory_holds_is_named(dim: int) -> None:
    with pytest.raises(GraphError) as caught:
        load_graph(model_json(dim))
    message = str(caught.value)
    assert "tensor_values" in message
    assert format_integer(dim) in message


@pytest.mark.parametrize("shape", [(10**15,), (2**40, 2**40), (1 << 21,)])
def test_a_mesh_of_more_devices_than_can_be_planned_for(shape: tuple[int, ...]) -> None:
    for more in ({}, {"nodes": 3}, {"intra_bandwidth": 1e9, "nodes": 1}):
        with pytest.raises(MeshError, match="at most 1,048,576"):
            make_mesh(shape, **more)


@pytest.mark.parametrize("text", ["999999999999999999e99PB", 10**30, 1e300, float("inf")])
def test_amounts_of_memory_are_at_most_two_to_the_62(text: str | float) -> None:
    with pytest.raises(InputError):
        parse_bytes(text)
    with pytest.raises(OptionError, match="memory_budget"):
        PlanOptions(memory_budget=text)


def test_a_bandwidth_is_a_float() -> None:
    with pytest.raises(InputError, match="2\\^13288"):
        parse_rate(10**4000)


def test_digits_in_texts_are_not_numbers() -> None:
    text = f'{{"a": "{"7" * 64}", "b": {2**64 - 1}}}'
    check_integers(text, json.loads(text), InputError, "text")
