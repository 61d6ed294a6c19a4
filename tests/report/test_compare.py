from dataclasses import astuple, replace

import pytest
from support.meshes import slow_devices
from support.models import Planner, graph_of, meta, mlp, small_graph

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Pins
from autoshard.report import compare_plans

MESH = slow_devices(a=2, b=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(mlp, 64, 256, 512, 256))


def test_a_plan_does_not_differ_from_itself(planned: Planner, graph: Graph) -> None:
    plan = planned(graph, MESH)
    difference = compare_plans(plan, plan)
    assert difference.is_empty
    assert difference.nodes == difference.inputs == difference.collectives == ()


def test_what_differs_is_listed(planned: Planner, graph: Graph) -> None:
    pins = Pins(parameters={"*.weight": "I,I"}, inputs={"x": "S(1),R"})
    before, after = planned(graph, MESH), planned(graph, MESH, pins=pins)
    difference = compare_plans(before, after)
    assert not difference.is_empty
    for side, plan in (("before", before), ("after", after)):
        lies = {i.target: i.layout for i in plan.stages[0].inputs}
        assert all(lies[c.name] == getattr(c, side) for c in difference.inputs)
        counts = {(c.kind, c.axis, c.direction): c.count for c in plan.collectives}
        for c in difference.collectives:
            assert counts.get((c.kind, c.axis, c.direction), 0) == getattr(c, side)
    assert "x" in {c.name for c in difference.inputs}
    total = {f.name: f.difference for f in difference.costs}["total"]
    assert total == after.costs.total - before.costs.total > 0
    assert {f.name for f in difference.memory} >= {"parameters", "activations", "peak"}


def test_the_other_way_round_sides_change_places(planned: Planner, graph: Graph) -> None:
    plans = planned(graph, MESH), planned(graph, MESH, algo="megatron")
    there, back = compare_plans(*plans), compare_plans(*reversed(plans))
    assert {(c.name, c.after, c.before) for c in there.nodes} == {astuple(c) for c in back.nodes}
    assert there.costs[0].difference == -back.costs[0].difference


def test_meshes_may_differ(planned: Planner, graph: Graph) -> None:
    difference = compare_plans(planned(graph, MESH), planned(graph, slow_devices(c=4)))
    assert difference.meshes == ("a=2 x b=2", "c=4")


def test_other_devices_and_options_are_named(planned: Planner, graph: Graph) -> None:
    before = planned(graph, make_mesh((2, 2)))
    same = planned(graph, make_mesh((2, 2), topology="h100-sxm"))
    assert compare_plans(before, same).settings == (), "that it was assumed makes no difference"
    other = planned(graph, make_mesh((2, 2), topology="h100-sxm", nodes=2), optimizer="sgd")
    found = {
        change.name: (change.before, change.after)
        for change in compare_plans(before, other).settings
    }
    assert found["optimizer"] == ("adamw", "sgd")
    assert found["devices"][0].startswith("1 node x 4 NVIDIA H100 SXM (NVLink, 450 GB/s")
    assert found["devices"][1].startswith("2 nodes x 2 NVIDIA H100 SXM")
    topology = replace(same.mesh.topology, collective_overhead=1e-6)
    slower = planned(graph, Mesh(same.mesh.axes, topology))
    (change,) = compare_plans(same, slower).settings
    assert (change.name, change.after) == ("topology", "the same with other figures")


@pytest.mark.thorough
def test_what_cannot_be_compared_is_refused(planned: Planner, graph: Graph) -> None:
    plan = planned(graph, MESH)
    with pytest.raises(PlanError, match="different graphs"):
        compare_plans(plan, planned(small_graph(mlp), MESH))
    with pytest.raises(PlanError, match="second document has no plan"):
        compare_plans(plan, planned(graph, MESH, memory_budget=1))
