"""Images sharded by rows and columns: found by the planner, with a priced halo exchange."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from support.meshes import slow_devices
from support.models import Planner, graph_of
from torch import nn

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.plan import Plan, PlanOptions
from autoshard.plan.stage import InnerStep, PlacedNode
from autoshard.planner import make_plan
from autoshard.pricing import simulate

MESH = slow_devices(a=4)
SIDE = 64


class Segments(nn.Module):
    """The class of every place of an image, from two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        fine = self.first(x)
        coarse = self.second(nn.functional.max_pool2d(fine, 3, 2, 1))
        coarse = nn.functional.interpolate(coarse, scale_factor=2.0, mode="bilinear")
        return nn.functional.cross_entropy(self.head(torch.cat([fine, coarse], 1)), labels)


@cache
def one_image() -> Graph:
    with torch.device("meta"):
        labels = torch.empty(1, SIDE, SIDE, dtype=torch.int64)
        return graph_of((Segments(), {"x": torch.empty(1, 3, SIDE, SIDE), "labels": labels}))


@pytest.fixture(scope="module")
def plan(planned: Planner) -> Plan:
    return planned(one_image(), MESH)


def exchanging(plan: Plan) -> Iterator[PlacedNode]:
    for node in plan.stages[0].nodes:
        if any(step.operation == "halo" for step in node.inside):
            yield node


def test_one_image_is_cut_by_rows(plan: Plan, planned: Planner) -> None:
    names = {node.name for node in exchanging(plan)}
    assert {"conv2d", "conv2d_1", "conv2d_2"} <= names
    assert {node.outputs for node in exchanging(plan)} <= {("S(2)",), ("S(3)",)}
    whole = planned(one_image(), MESH, forbid=({"kind": "halo_exchange"},))
    assert not any(exchanging(whole))
    assert plan.certificate.objective is not None
    assert whole.certificate.objective is not None
    assert plan.certificate.objective < 0.8 * whole.certificate.objective


def test_a_plan_states_each_exchange_and_its_copies(plan: Plan) -> None:
    """A rank between two others sends a row to each; what is extended is copied."""
    (node,) = (node for node in exchanging(plan) if node.name == "conv2d_2")
    row, rows = 16 * SIDE * 4, SIDE // 4
    assert [(s.action, s.direction, s.nbytes) for s in node.inside] == [
        ("halo_exchange", "forward", 2 * row),
        ("halo_exchange", "backward", 2 * row),
    ]
    exchange = MESH.collective_time("halo_exchange", 0, 2 * row)
    extended = (rows + 2) * row
    assert [step.time for step in node.inside] == pytest.approx(
        [exchange + MESH.copy_time(extended), exchange + MESH.copy_time(extended + rows * row)]
    )
    counted = {c.direction: c for c in plan.collectives if c.kind == "halo_exchange"}
    listed = [s for node in plan.stages[0].nodes for s in node.inside if s.operation == "halo"]
    for direction, count in counted.items():
        sizes = [step.nbytes for step in listed if step.direction == direction]
        assert (count.count, count.nbytes) == (len(sizes), sum(sizes))
    # Nobody wants the gradient of the image.
    assert counted["forward"].count == counted["backward"].count + 1
    assert simulate(plan).seconds == pytest.approx(plan.certificate.objective)


def test_the_checker_knows_what_is_exchanged(plan: Plan) -> None:
    (stage,) = plan.stages
    name = next(node.name for node in exchanging(plan))

    def changed(change: Callable[[InnerStep], InnerStep]) -> Plan:
        nodes = tuple(
            node.model_copy(update={"inside": tuple(map(change, node.inside))})
            if node.name == name
            else node
            for node in stage.nodes
        )
        return plan.model_copy(update={"stages": (stage.model_copy(update={"nodes": nodes}),)})

    assert check_plan(changed(lambda step: step)) == ()
    for update in ({"nbytes": 1}, {"time": 1e-9}, {"action": "all_to_all"}):
        findings = check_plan(changed(lambda step, update=update: step.model_copy(update=update)))
        assert any("inside" in finding for finding in findings)


def test_a_budget_is_kept_with_exchanges(plan: Plan) -> None:
    assert plan.memory is not None
    budget = int(0.75 * plan.memory.peak)
    tight = make_plan(one_image(), MESH, PlanOptions(memory_budget=budget))
    assert tight.found, tight.reason
    assert tight.memory is not None
    assert tight.memory.peak <= budget
    assert check_plan(tight, one_image()) == ()
