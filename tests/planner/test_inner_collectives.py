"""Collectives inside operators: priced, stated, counted, constrained and checked."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from support.models import Planner, graph_of
from torch import nn

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.plan import Pins, Plan, PlanOptions
from autoshard.planner import make_plan

LOSS = "cross_entropy_loss_cross_entropy_loss"
MESH = slow_devices(a=2, b=2)
ROWS = 16 // 2  # of 16 positions half are on a rank


class Head(nn.Module):
    """A norm of features, a head and the loss of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1024)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.features(x))), labels)


@cache
def head() -> Graph:
    labels = torch.empty(16, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        return graph_of((Head(), {"x": torch.empty(16, 8), "labels": labels}))


PINS = Pins(nodes={LOSS: "S(0),S(1) * -> *", "layer_norm": "S(0),S(1) * * -> *"})


@pytest.fixture(scope="module")
def plan(planned: Planner) -> Plan:
    return planned(head(), MESH, pins=PINS)


def inside(plan: Plan, node: str) -> list[tuple[str, str, str, int]]:
    (placed,) = (placed for placed in plan.stages[0].nodes if placed.name == node)
    return [(s.operation, s.axis, s.direction, s.nbytes) for s in placed.inside]


def test_a_plan_states_what_runs_inside(plan: Plan) -> None:
    """One number per row and statistic; a cut batch has less rows."""
    row = ROWS * 4
    assert inside(plan, LOSS) == [("max", "b", "forward", row), ("sum", "b", "forward", 2 * row)]
    assert inside(plan, "layer_norm") == [
        ("sum", "b", "forward", row),
        ("sum", "b", "forward", row),
        ("sum", "b", "backward", 2 * row),
    ]
    assert Plan.from_json(plan.to_json()) == plan


def test_nothing_runs_backward_for_a_gradient_that_nobody_wants(planned: Planner) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
        graph = graph_of((model, {"input": torch.empty(16, 8)}))
    plan = planned(graph, MESH, pins=Pins(nodes={"layer_norm": "S(0),S(1) * * -> *"}))
    assert [step[2] for step in inside(plan, "layer_norm")] == ["forward", "forward"]


def test_costs_and_counts_include_what_runs_inside(plan: Plan) -> None:
    (stage,) = plan.stages
    found = [step for node in stage.nodes for step in node.inside]
    for step in found:
        axis = plan.mesh.axis_names.index(step.axis)
        assert step.time == plan.mesh.collective_time("all_reduce", axis, step.nbytes)
    reshardings = sum(resharding.time for resharding in stage.reshardings)
    assert plan.costs is not None
    assert plan.costs.communication == pytest.approx(reshardings + sum(s.time for s in found))
    (forward,) = (
        c
        for c in plan.collectives
        if (c.kind, c.axis, c.direction) == ("all_reduce", "b", "forward")
    )
    assert forward.count >= 4
    assert forward.nbytes >= 5 * ROWS * 4


def test_inference_runs_nothing_backward(planned: Planner) -> None:
    plan = planned(head(), MESH, pins=PINS, mode="inference")
    assert {step[2] for step in inside(plan, "layer_norm")} == {"forward"}


def test_nothing_that_is_forbidden_runs_inside(planned: Planner) -> None:
    scores = Pins(nodes={"linear_1": "S(0),S(1)"})
    assert inside(planned(head(), MESH, pins=scores), LOSS)
    forbid = {"kind": "all_reduce", "axis": "b"}
    for of in (None, "activations"):
        assert not inside(planned(head(), MESH, pins=scores, forbid=[{**forbid, "of": of}]), LOSS)
    of_parameters = [{**forbid, "of": "parameters"}]
    assert inside(planned(head(), MESH, pins=scores, forbid=of_parameters), LOSS)


def test_a_pin_that_needs_what_is_forbidden_has_no_plan() -> None:
    options = PlanOptions(pins=PINS, forbid=[{"kind": "all_reduce", "axis": "b"}])
    plan = make_plan(head(), MESH, options)
    assert not plan.found
    assert plan.conflict is not None
    assert "forbidden all_reduce@b" in " ".join(plan.conflict.options)


@pytest.mark.parametrize("scope", ["", ":activations", ":parameters"])
def test_the_checker_sees_what_is_forbidden_inside(plan: Plan, scope: str) -> None:
    options = PlanOptions(forbid=[{"kind": "all_reduce", "of": scope[1:] or None, "axis": "b"}])
    claimed = plan.model_copy(update={"options": options})
    finding = f"node {LOSS} runs all_reduce on b against the forbidden all_reduce{scope}@b"
    assert (finding in check_plan(claimed)) == (scope != ":parameters")


def _changed(**changes: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda steps: [{**steps[0], **changes}, *steps[1:]]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda _: [],
        lambda steps: steps[1:],
        lambda steps: [*steps, steps[-1]],
        _changed(axis="a"),
        _changed(operation="sum"),
        _changed(direction="backward"),
        _changed(nbytes=4),
        _changed(time=0.0),
    ],
)
def test_the_checker_knows_what_runs_inside_from_the_rule(
    plan: Plan, tamper: Callable[[list[dict[str, Any]]], Any]
) -> None:
    document = plan.model_dump(mode="json")
    (node,) = (n for n in document["stages"][0]["nodes"] if n["name"] == LOSS)
    node["inside"] = tamper(node["inside"])
    findings = check_plan(Plan.from_document(document))
    assert any(f.startswith(f"node {LOSS} runs ") for f in findings), findings
