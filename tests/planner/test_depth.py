"""Depth: repeated blocks are formulated once, and checked everywhere."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Case, Planner, graph_of, meta
from torch import nn

from autoshard.checker import check_plan
from autoshard.constraints import UNCONSTRAINED
from autoshard.graph import Graph, find_blocks
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner.formulation.formulation import Formulation

Tamper = Callable[[dict[str, Any]], None]


class Layer(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """Residual layers; the input goes through a parameter, so that all layers are alike."""

    def __init__(self, layers: int, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(Layer(features) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def tower(layers: int) -> Case:
    return Tower(layers, 8192), {"x": torch.zeros(1, 8192)}


def formulation(graph: Graph) -> Formulation:
    return Formulation.of(graph, make_mesh((2, 2)), PlanOptions())


def test_deeper_models_have_more_choices_but_no_further_prices() -> None:
    shallow, deep = (formulation(graph_of(meta(tower, n))).problem for n in (4, 9))
    assert len(deep.nodes) > len(shallow.nodes)
    assert len({id(n.cost) for n in deep.nodes}) == len({id(n.cost) for n in shallow.nodes})
    assert len({id(e.cost) for e in deep.edges}) == len({id(e.cost) for e in shallow.edges})


def test_formulations_share_their_prices() -> None:
    """The same program with other options is not priced again."""
    first = formulation(graph_of(meta(tower, 2)))
    again = first.constrained(UNCONSTRAINED)
    pairs = zip(first.problem.nodes, again.problem.nodes, strict=True)
    operators = [(one.cost, other.cost) for one, other in pairs if one.name.startswith("operator:")]
    assert operators
    assert all(one is other for one, other in operators)


@pytest.fixture(scope="module")
def deep(planned: Planner) -> Plan:
    return planned(meta(tower, 5), (2, 2))


@pytest.fixture(scope="module")
def middle() -> dict[str, str]:
    """Names of the nodes of the third of five layers, by operator."""
    graph = graph_of(meta(tower, 5))
    (block,) = find_blocks(graph)
    assert block.count == 5
    nodes = [graph.nodes[i] for i in list(block.instances())[2]]
    return {node.operator: node.name for node in nodes}


def _node(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(n for n in document["stages"][0]["nodes"] if n["name"] == name)
    return found


def test_a_node_tampered_with_inside_a_repeated_layer_is_named(
    deep: Plan, middle: dict[str, str]
) -> None:
    name = middle["aten.relu.default"]
    changes: list[tuple[str, Callable[[Any], Any], str]] = [
        ("time", lambda t: t / 2, f"node {name} takes"),
        ("inputs", lambda _: ["R,P"], f"{name} wants"),
        ("inputs", lambda _: ["R,P"], f"node {name}: no rule"),
        ("outputs", lambda _: ["S(1),S(5)"], f"node {name}: S(1),S(5) is illegal"),
        ("outputs", lambda _: [], f"node {name}: wrong number"),
    ]
    for key, change, finding in changes:
        document = json.loads(deep.to_json())
        node = _node(document, name)
        node[key] = change(node[key])
        findings = check_plan(Plan.from_json(json.dumps(document)))
        assert any(f.startswith(finding) for f in findings), findings


def test_a_resharding_tampered_with_inside_a_repeated_layer_is_named(
    deep: Plan, middle: dict[str, str]
) -> None:
    alike = [c for c in deep.stages[0].reshardings if c.consumer == middle["aten.add.Tensor"]]
    assert alike
    where = deep.stages[0].reshardings.index(alike[0])
    changes: dict[str, Tamper] = {
        "moves": lambda c: c["steps"][0].update(nbytes=8),
        "a step takes": lambda c: c["steps"][0].update(time=1.0),
        "not as stated": lambda c: c["steps"][0].update(forward="nothing"),
        "ends in": lambda c: c.update(target="S(1),S(1)"),
        "starts from": lambda c: c.update(source="S(1),S(1)"),
    }
    for finding, change in changes.items():
        document = json.loads(deep.to_json())
        resharding = document["stages"][0]["reshardings"][where]
        change(resharding)
        findings = check_plan(Plan.from_json(json.dumps(document)))
        named = f"resharding of {resharding['value']} for {resharding['consumer']}"
        assert any(f.startswith(named) and finding in f for f in findings), findings


def test_only_what_was_tampered_with_is_accused(deep: Plan, middle: dict[str, str]) -> None:
    document = json.loads(deep.to_json())
    node = _node(document, middle["aten.relu.default"])
    node["time"] *= 2
    findings = check_plan(Plan.from_json(json.dumps(document)))
    assert [f.split()[0] for f in findings] == ["node", "compute"]
