"""Prepared inputs: tensors that are equal in every step are computed once."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import SchemaError
from autoshard.graph import (
    Graph,
    InputKind,
    Output,
    export_model,
    graph_digest,
    graph_from_json,
    graph_to_json,
    load_graph,
)

Check = Callable[..., Graph]


class Masked(nn.Module):
    """Two layers that make one mask each, of nothing but sizes, and see a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            places = torch.arange(x.shape[1])
            mask = (places[:, None] >= places[None, :]).expand(x.shape[0], -1, -1)
            x = x.masked_fill(~mask[:, :1], 0.0).cumsum(1)
        return x + torch.full((x.shape[1], 1), 2.0)


class Drawn(nn.Module):
    """Makes a mask of random numbers, and returns positions."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand_like(torch.zeros(x.shape[1])) > 0.5
        return x * noise, torch.arange(x.shape[1]) + 1


def prepared(graph: Graph) -> dict[str, Any]:
    return {i.name: graph.values[i.name] for i in graph.inputs if i.kind is InputKind.PREPARED}


def operators(graph: Graph) -> list[str]:
    return [node.operator.removeprefix("aten.").split(".")[0] for node in graph.nodes]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load_graph(export_model(Masked(), (), {"x": torch.randn(3, 4, 4)}))


def test_a_mask_is_prepared_once_for_all_layers(check_equal: Check) -> None:
    graph = check_equal(Masked(), x=torch.randn(3, 4, 4))
    (held,) = prepared(graph).values()
    # The comparison is held, and neither its expansion nor what is filled with one number.
    assert held.shape == (3, 1, 4)
    assert operators(graph).count("full") == 1
    assert not {"arange", "ge", "bitwise_not"} & set(operators(graph))
    assert graph.preparation is not None
    assert operators(graph.preparation).count("arange") == 1
    assert [o.name for o in graph.preparation.outputs] == list(prepared(graph))


def test_random_numbers_and_what_is_returned_stay_in_the_step() -> None:
    graph = load_graph(export_model(Drawn(), (), {"x": torch.randn(3, 4)}))
    assert {"rand_like", "add"} <= set(operators(graph))
    assert all(name in graph.values for node in graph.nodes for name in node.inputs)


class Large(nn.Module):
    """Counts in a square that is far larger than what it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0]) + 1
        return x * (places[:, None] >= places).sum(1)


def test_what_is_very_large_stays_in_the_step() -> None:
    graph = load_graph(export_model(Large(), (torch.randn(1 << 16),), {}))
    (held,) = prepared(graph).values()
    assert held.shape == (1 << 16,)
    assert {"ge", "sum"} <= set(operators(graph))


def test_what_follows_from_weights_buffers_or_inputs_is_not_prepared() -> None:
    model = nn.BatchNorm1d(4)
    graph = load_graph(export_model(model, (torch.randn(3, 4),), {}))
    assert graph.preparation is None
    assert "preparation" not in graph_to_json(graph)


def test_a_preparation_travels_with_its_graph(graph: Graph) -> None:
    back = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert back == graph
    assert graph_digest(back) == graph_digest(graph)
    assert graph.preparation is not None
    other = replace(graph, preparation=replace(graph.preparation, in_spec="[1]"))
    assert graph_digest(other) != graph_digest(graph)


def spoilt(graph: Graph) -> dict[str, Callable[[dict[str, Any]], object]]:
    """Ways to spoil a graph's document, by what is said of it."""
    assert graph.preparation is not None
    (name,) = prepared(graph)
    return {
        "is missing in the preparation": lambda document: document.pop("preparation"),
        "must not have a preparation": lambda document: document["preparation"].update(
            preparation={"inputs": [], "nodes": [], "outputs": [], "values": {}}
        ),
        "must have no inputs and return": lambda document: document["preparation"].update(
            outputs=[]
        ),
        "in the preparation": lambda document: document["values"][name].update(dtype="int8"),
        "inputs: Field required": lambda document: document["preparation"].pop("inputs"),
    }


@pytest.mark.parametrize(
    "said",
    [
        "is missing in the preparation",
        "must not have a preparation",
        "must have no inputs and return",
        "in the preparation",
        "inputs: Field required",
    ],
)
def test_a_preparation_that_does_not_fit_is_refused(graph: Graph, said: str) -> None:
    document = json.loads(json.dumps(graph_to_json(graph)))
    spoilt(graph)[said](document)
    with pytest.raises(SchemaError, match=said):
        graph_from_json(document)


def test_a_preparation_takes_nothing(graph: Graph) -> None:
    assert graph.preparation is not None
    user = next(i for i in graph.inputs if i.kind is InputKind.USER)
    taking = replace(
        graph.preparation,
        inputs=(user,),
        values={**graph.preparation.values, user.name: graph.values[user.name]},
    )
    with pytest.raises(SchemaError, match="must have no inputs"):
        graph_from_json(graph_to_json(replace(graph, preparation=taking)))
    assert Output(user.name) not in graph.preparation.outputs


def test_a_preparation_draws_no_random_numbers(graph: Graph) -> None:
    assert graph.preparation is not None
    first, *rest = graph.preparation.nodes
    drawn = replace(first, operator="aten.rand.default", arguments=(("size", (4,)),))
    broken = replace(graph, preparation=replace(graph.preparation, nodes=(drawn, *rest)))
    with pytest.raises(SchemaError, match=r"aten\.rand\.default\) of the preparation may differ"):
        graph_from_json(graph_to_json(broken))
