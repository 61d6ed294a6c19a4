"""Infeasible requests: the conflicting options, and whether memory is one of them."""

from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import graph_of, meta, mlp

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

MESH = slow_devices(a=2, b=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(mlp, 64, 64, 64, 64))


def planned(graph: Graph, **options: Any) -> Plan:
    return make_plan(graph, MESH, PlanOptions(**options))


CONTRADICTION: dict[str, Any] = {
    "pins": {
        "nodes": {"linear": "P,R", "rel*": "S(0),*"},
        "parameters": {"down.weight": "S(0),*"},
    },
    "forbid": [{"kind": "reduce_scatter"}, {"kind": "all_to_all"}, {"kind": "all_reduce"}],
}


def test_a_contradiction_is_cut_down_to_what_is_needed(graph: Graph) -> None:
    plan = planned(graph, **CONTRADICTION)
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    assert plan.conflict is not None
    assert plan.conflict.minimal
    assert plan.conflict.budget is None
    assert set(plan.conflict.options) == {
        "pin of node 'linear' to 'P,R'",
        "forbidden reduce_scatter",
        "forbidden all_reduce",
    }
    assert all(option in plan.reason for option in plan.conflict.options)


@pytest.mark.parametrize("dropped", ["pin", "reduce_scatter", "all_reduce"])
def test_without_any_one_member_there_is_a_plan(graph: Graph, dropped: str) -> None:
    options = {
        "pins": {} if dropped == "pin" else CONTRADICTION["pins"],
        "forbid": [f for f in CONTRADICTION["forbid"] if f["kind"] != dropped],
    }
    plan = planned(graph, **options)
    assert plan.found
    assert plan.conflict is None
    assert check_plan(plan, graph) == ()


def test_two_pins_on_one_thing_conflict(graph: Graph) -> None:
    pins = {"up.weight": "S(0),*", "up.*": "I,*", "down.*": "*,I"}
    plan = planned(graph, pins={"parameters": pins})
    assert plan.conflict is not None
    assert plan.conflict.options == (
        "pin of parameter 'up.weight' to 'S(0),*'",
        "pin of parameter 'up.*' to 'I,*'",
    )


@pytest.mark.thorough
def test_memory_that_is_short_for_the_pins_is_told_apart(graph: Graph) -> None:
    cut = planned(graph, pins={"parameters": {"*.weight": "S(0),S(1)"}})
    whole = {"parameters": {"*.weight": "I,I", "*.bias": "*,*"}}
    budget = cut.memory.peak
    plan = planned(graph, pins=whole, memory_budget=budget)
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    assert plan.conflict is not None
    assert plan.conflict.options == ("pin of parameter '*.weight' to 'I,I'",)
    assert plan.conflict.budget == budget
    least = plan.conflict.least_budget
    assert least is not None
    assert f"{least:,}" in plan.reason
    assert planned(graph, pins=whole, memory_budget=least).found
    assert not planned(graph, pins=whole, memory_budget=least - 1).found
    assert planned(graph, memory_budget=budget).found


@pytest.mark.thorough
def test_memory_that_is_short_anyway_blames_no_pin(graph: Graph) -> None:
    plan = planned(graph, pins={"parameters": {"*.weight": "I,I"}}, memory_budget=1000)
    assert plan.conflict is not None
    assert plan.conflict.options == ()
    assert "the smallest feasible budget is" in plan.reason
    assert plan.conflict.least_budget > planned_least(graph)


def planned_least(graph: Graph) -> int:
    plan = planned(graph, memory_budget=1000)
    assert plan.conflict is not None
    assert plan.conflict.least_budget is not None
    return plan.conflict.least_budget
