"""Expert parallelism is found where it is cheapest; its all-to-alls are stated and checked."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from autoshard.checker import check_plan
from autoshard.graph import Graph, export_model, load_graph
from autoshard.graph.experts import COMBINE, DISPATCH, GROUPED_MM, ragged_values
from autoshard.layouts import Action
from autoshard.mesh import Link, make_mesh
from autoshard.plan import PlacedNode, Plan, PlanOptions
from autoshard.plan.stage import InnerStep, PlannedStep, Resharding
from autoshard.planner import make_plan

NUM_LAYERS = 2
ROW_BYTES = 2 * 8192 * 4096 * 2 // 8
"""Two experts for each of 8,192 tokens, in 16 bits, over eight devices."""


@pytest.fixture(scope="module")
def mixtral() -> Graph:
    """Two layers of Mixtral 8x7B at its own width, on 8,192 tokens."""
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=NUM_LAYERS)).bfloat16()
        ids = torch.zeros(8, 1024, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return load_graph(export_model(model, (), inputs))


def placed(plan: Plan, graph: Graph, operator: str) -> Iterator[PlacedNode]:
    return (
        found
        for node, found in zip(graph.nodes, plan.stages[0].nodes, strict=True)
        if node.operator == operator
    )


@pytest.fixture(scope="module")
def plan(mixtral: Graph) -> Plan:
    plan = make_plan(mixtral, make_mesh((8,)))
    assert check_plan(plan) == ()
    return plan


def test_eight_devices_take_an_expert_each(plan: Plan, mixtral: Graph) -> None:
    (stage,) = plan.stages
    experts = [p for p in stage.parameters if ".experts." in p.target]
    assert {p.layout for p in experts} == {"S(0)"}
    assert {p.local_shape[0] for p in experts} == {1}
    assert {node.inputs for node in placed(plan, mixtral, GROUPED_MM)} == {("S(0)", "S(0)", "R")}


def test_what_experts_return_is_not_kept_if_their_weights_are_in_the_activation(
    plan: Plan, mixtral: Graph
) -> None:
    options = PlanOptions(runtime="other", weighted_activations=True)
    lean = make_plan(mixtral, make_mesh((8,)), options)
    assert check_plan(lean) == ()
    assert plan.memory is not None
    assert lean.memory is not None
    assert plan.memory.per_micro_batch - lean.memory.per_micro_batch == NUM_LAYERS * ROW_BYTES
    claimed = plan.model_copy(update={"options": options})
    assert any("memory peaks at" in finding for finding in check_plan(claimed))


def test_its_error_is_that_of_mixtures_of_experts(plan: Plan) -> None:
    assert plan.performance is not None
    assert "(mixture of experts, Hopper GPUs" in plan.performance.comparison


def test_rows_move_twice_forward_and_twice_backward(plan: Plan, mixtral: Graph) -> None:
    moved = [
        (step.action, step.operation, step.direction, step.nbytes)
        for operator in (DISPATCH, COMBINE)
        for node in placed(plan, mixtral, operator)
        for step in node.inside
    ]
    assert sorted(set(moved)) == [
        ("all_to_all", "move", direction, ROW_BYTES) for direction in ("backward", "forward")
    ]
    assert len(moved) == 4 * NUM_LAYERS
    # All else that rows might need, such as their counts, follows from the ids.
    names = ragged_values(mixtral)
    assert not [c for c in plan.stages[0].reshardings if c.value in names]


def test_ids_are_gathered_once_for_a_layer(plan: Plan, mixtral: Graph) -> None:
    ids = {node.inputs[1] for node in mixtral.nodes if node.operator == DISPATCH}
    found = [c for c in plan.stages[0].reshardings if c.value in ids]
    assert [(c.source, c.target, c.consumer) for c in found] == [("S(0)", "R", None)] * NUM_LAYERS
    assert {step.forward for c in found for step in c.steps} == {"all_gather"}


def test_slow_links_leave_rows_where_they_are(mixtral: Graph) -> None:
    """Over slow links even eight devices are no faster than one that does everything."""
    mesh = make_mesh((8,))
    level = Link("ethernet", None, bandwidth=1e9, latency=1e-5)
    slow = replace(mesh, topology=replace(mesh.topology, levels=(level,)))
    plan = make_plan(mixtral, slow)
    assert check_plan(plan) == ()
    assert {node.outputs for node in placed(plan, mixtral, DISPATCH)} == {("I",)}


def test_experts_stay_inside_a_node(mixtral: Graph) -> None:
    """Of two nodes of eight devices, rows move over the links inside a node."""
    plan = make_plan(mixtral, make_mesh((2, 8)))
    assert check_plan(plan) == ()
    inner = plan.mesh.axis_names[1]
    moved = [step.axis for node in placed(plan, mixtral, DISPATCH) for step in node.inside]
    assert moved == [inner] * 2 * NUM_LAYERS


def test_a_forbidden_all_to_all_is_not_run_inside(mixtral: Graph, plan: Plan) -> None:
    other = make_plan(mixtral, make_mesh((8,)), PlanOptions(forbid=[{"kind": "all_to_all"}]))
    assert check_plan(other) == ()
    assert "all_to_all" not in {c.kind for c in other.collectives}
    assert plan.certificate.objective is not None
    assert other.certificate.objective is not None
    assert plan.certificate.objective < other.certificate.objective


def test_the_checker_knows_what_runs_inside(plan: Plan, mixtral: Graph) -> None:
    (stage,) = plan.stages
    name = next(node.name for node in placed(plan, mixtral, DISPATCH))

    def with_inside(inside: tuple[InnerStep, ...]) -> Plan:
        nodes = tuple(
            node.model_copy(update={"inside": inside}) if node.name == name else node
            for node in stage.nodes
        )
        return plan.model_copy(update={"stages": (stage.model_copy(update={"nodes": nodes}),)})

    steps = next(node.inside for node in stage.nodes if node.name == name)
    assert any("inside" in finding for finding in check_plan(with_inside(())))
    fewer = tuple(step.model_copy(update={"nbytes": step.nbytes // 2}) for step in steps)
    assert any("inside" in finding for finding in check_plan(with_inside(fewer)))


def test_the_checker_refuses_to_convert_rows_of_experts(plan: Plan, mixtral: Graph) -> None:
    """From the experts' ranks to the tokens' there is no way but the operators'."""
    (stage,) = plan.stages
    products = {node.name: node for node in mixtral.nodes if node.operator == GROUPED_MM}
    placed_one = next(node for node in stage.nodes if node.name in products)
    rows = products[placed_one.name].inputs[0]
    tensor = mixtral.values[rows]
    mesh = plan.mesh
    nbytes = tensor.nbytes // 8
    step = PlannedStep(
        axis=mesh.axis_names[0],
        source="S(0)",
        target="S(1)",
        forward="all_to_all",
        backward="all_to_all",
        nbytes=nbytes,
        time=2 * mesh.collective_time(Action.ALL_TO_ALL, 0, nbytes),
    )
    resharding = Resharding(
        value=rows,
        consumer=placed_one.name,
        position=0,
        source="S(0)",
        target="S(1)",
        steps=(step,),
    )
    wrong = stage.model_copy(update={"reshardings": (*stage.reshardings, resharding)})
    findings = check_plan(plan.model_copy(update={"stages": (wrong,)}))
    assert any("moves rows of experts" in finding for finding in findings)
