"""Alternatives and their regrets, each compared with the plan under the pin."""

from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import Planner, gpt2, graph_of, meta, mlp, small_graph

from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph
from autoshard.plan import Pins, Plan
from autoshard.planner import Alternative, explain

MESH = slow_devices(a=2, b=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(mlp, 64, 256, 512, 256))


@pytest.fixture(scope="module")
def plan(planned: Planner, graph: Graph) -> Plan:
    return planned(graph, MESH)


def chosen(alternatives: tuple[Alternative, ...]) -> Alternative:
    (found,) = [a for a in alternatives if a.chosen]
    return found


@pytest.mark.parametrize("name", ["linear", "relu", "up.weight", "x", "0"])
def test_the_plan_has_what_costs_least(graph: Graph, plan: Plan, name: str) -> None:
    explanation = explain(graph, plan, name)
    assert explanation.objective == plan.certificate.objective
    assert chosen(explanation.alternatives).regret == 0
    assert chosen(explanation.alternatives).override == 0
    for alternative in explanation.alternatives:
        assert alternative.exact
        assert alternative.regret is None or alternative.regret >= 0
        # To plan anew around a change never costs more than to change nothing else.
        if alternative.override is not None:
            assert alternative.regret <= alternative.override + 1e-12
    totals = [a.total for a in explanation.alternatives if a.total is not None]
    assert totals == sorted(totals)


def test_an_alternative_costs_what_a_plan_with_its_pin_costs(
    planned: Planner, graph: Graph, plan: Plan
) -> None:
    for name, pins in (("linear", "nodes"), ("down.weight", "parameters"), ("0", "outputs")):
        alternatives = explain(graph, plan, name).alternatives
        for alternative in alternatives[:: max(len(alternatives) // 4, 1)]:
            pin = Pins.model_validate({pins: {name: alternative.layouts}})
            pinned = planned(graph, MESH, pins=pin, relative_gap=0)
            assert pinned.certificate.objective == pytest.approx(alternative.total, rel=1e-9)


@pytest.fixture(scope="module")
def wide() -> Graph:
    return graph_of(meta(mlp, 2048, 1024, 1024, 1024))


@pytest.fixture(scope="module")
def tight(planned: Planner, wide: Graph) -> Plan:
    """A plan whose parameters are cut at rest only because memory is short."""
    impossible = planned(wide, (4,), memory_budget=1)
    budget = int(1.1 * impossible.conflict.least_budget)
    plan = planned(wide, (4,), memory_budget=budget, overlap=False)
    assert plan.costs.total > planned(wide, (4,), overlap=False).costs.total
    return plan


@pytest.mark.thorough
def test_totals_obey_the_budget(planned: Planner, wide: Graph, tight: Plan) -> None:
    alternatives = explain(wide, tight, "up.weight").alternatives
    assert chosen(alternatives).regret == pytest.approx(0, abs=1e-4 * tight.costs.total)
    budget = tight.memory.budget
    for alternative in alternatives:
        pin = Pins(parameters={"up.weight": alternative.layouts})
        options = {"memory_budget": budget, "overlap": False, "relative_gap": 1e-6}
        pinned = planned(wide, (4,), pins=pin, **options)
        assert pinned.found == (alternative.total is not None)
        if pinned.found:
            assert pinned.certificate.objective == pytest.approx(alternative.total, rel=1e-5)


def test_without_time_totals_are_what_an_override_costs(wide: Graph, tight: Plan) -> None:
    exact = {a.layouts: a for a in explain(wide, tight, "up.weight").alternatives}
    rushed = explain(wide, tight, "up.weight", time_limit=1e-9).alternatives
    assert not any(a.exact for a in rushed if not a.chosen)
    for alternative in rushed:
        if alternative.total is not None and not alternative.chosen:
            assert alternative.regret == pytest.approx(alternative.override)
            best = exact[alternative.layouts].total
            assert alternative.total >= best * (1 - 1e-6)


def test_what_the_options_forbid_is_said_so(planned: Planner, graph: Graph) -> None:
    pinned = planned(graph, MESH, pins=Pins(parameters={"up.*": "I,*"}))
    for alternative in explain(graph, pinned, "up.weight").alternatives:
        obeys = alternative.layouts.startswith("I,")
        assert (alternative.forbidden == ()) == obeys
        assert (alternative.total is not None) == obeys


def test_a_value_has_the_layout_that_its_consumers_share(planned: Planner) -> None:
    graph = small_graph(gpt2)
    plan = planned(graph, MESH)
    shared = next(v for v in graph.values if len(graph.consumers[v]) > 1 and v.startswith("add"))
    explanation = explain(graph, plan, shared, value=True)
    assert explanation.kind == "shared"
    assert chosen(explanation.alternatives).regret == 0
    node = explain(graph, plan, shared)
    assert (node.kind, node.operator) == ("operator", "aten.add.Tensor")
    assert explain(graph, plan, "transformer.wte.weight").name == "p_lm_head_weight"


@pytest.mark.parametrize("shape", [{"a": 4}, {"a": 1, "b": 4}])
def test_meshes_of_other_shapes_are_explained(
    planned: Planner, graph: Graph, shape: dict[str, int]
) -> None:
    plan = planned(graph, slow_devices(**shape))
    (best, *_) = explain(graph, plan, "up.weight").alternatives
    assert best.layouts.count(",") == len(shape) - 1


@pytest.mark.thorough
def test_bad_questions_are_refused(planned: Planner, graph: Graph, plan: Plan) -> None:
    with pytest.raises(OptionError, match=r"no node.*linear"):
        explain(graph, plan, "linera")
    with pytest.raises(PlanError, match="another graph"):
        explain(small_graph(mlp), plan, "linear")
    impossible: Any = planned(graph, MESH, memory_budget=1)
    with pytest.raises(PlanError, match="no plan to explain"):
        explain(graph, impossible, "linear")
