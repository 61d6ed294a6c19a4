"""Plans of pipelines: stages, schedules and what stages exchange."""

from itertools import pairwise

import pytest
import torch
from support.models import gpt2, graph_of, llama, meta, residuals
from torch import nn

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.graph import (
    Graph,
    InputKind,
    export_model,
    graph_from_json,
    load_graph,
    resized,
)
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import choose_micro_batches, make_plan
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.simulation import simulate_schedule
from benchmarks.random_pipelines import compare


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(gpt2, layers=4))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stages", "schedule", "shape"),
    [
        (2, "1F1B", (2, 2)),
        (4, "GPipe", (4,)),
        (4, "Interleaved1F1B", (2, 2)),
        (4, "ZBVZeroBubble", (2, 2)),
        (3, "auto", (3, 2)),
    ],
)
def test_a_pipeline_has_exactly_the_stages_that_are_asked_for(
    graph: Graph, stages: int, schedule: str, shape: tuple[int, ...]
) -> None:
    options = PlanOptions(stages=stages, schedule=schedule, micro_batches=8)
    plan = make_plan(graph, make_mesh(shape, topology="h100-sxm"), options)
    assert plan.pipeline is not None
    assert len(plan.stages) == stages
    assert sorted(s for held in plan.pipeline.ranks for s in held) == list(range(stages))
    assert schedule in ("auto", plan.pipeline.schedule)
    check_joined(plan, graph)


def check_joined(plan: Plan, graph: Graph) -> None:
    """Stages hold every node, agree on what they exchange, and use all devices."""
    pipeline = plan.pipeline
    assert pipeline is not None
    programs = [graph_from_json(stage.program) for stage in plan.stages]
    names = {node.name for program in programs for node in program.nodes}
    assert names == {node.name for node in graph.nodes}
    assert len(pipeline.transfers) == len(plan.stages) - 1
    for transfers, (one, following) in zip(pipeline.transfers, pairwise(plan.stages), strict=True):
        sent = {output.name: output.layout for output in one.outputs}
        received = {i.name: i.layout for i in following.inputs if i.kind == "received"}
        assert {t.value: t.target for t in transfers} == received
        assert all(sent[t.value] == t.source for t in transfers)
    devices = set()
    for held in pipeline.ranks:
        places = {(plan.stages[s].first_device, plan.stages[s].axes) for s in held}
        assert len(places) == 1
        ((first, axes),) = places
        size = 1
        for _, length in axes:
            size *= length
        devices.update(range(first, first + size))
    assert devices == set(range(plan.mesh.num_devices))


def test_the_objective_is_the_simulated_step(graph: Graph) -> None:
    options = PlanOptions(stages=2, schedule="1F1B", micro_batches=4)
    plan = make_plan(graph, make_mesh((2, 2)), options)
    pipeline = plan.pipeline
    assert pipeline is not None
    assert plan.costs is not None
    times = [summary.times for summary in pipeline.stages]
    simulated = simulate_schedule(Schedule("1F1B", 2, 1, 4), times)
    assert plan.certificate.objective == plan.costs.total == simulated.seconds
    assert plan.certificate.bound is not None
    assert plan.certificate.bound <= simulated.seconds
    costs = plan.costs
    parts = costs.compute + costs.communication + costs.optimizer + costs.recompute
    assert costs.total == pytest.approx(parts - costs.overlapped + costs.idle)


def test_stages_of_several_layers_are_fused_as_the_check_expects(graph: Graph) -> None:
    options = PlanOptions(stages=2, micro_batches=4, schedule="1F1B", execution="compile")
    plan = make_plan(graph, make_mesh((2,), topology="h100-sxm"), options)
    assert plan.found
    assert check_plan(plan, graph) == ()


def test_tied_embeddings_are_held_by_both_ends(graph: Graph) -> None:
    plan = make_plan(graph, make_mesh((2,)), PlanOptions(stages=2, micro_batches=2))
    assert plan.pipeline is not None
    (tied,) = plan.pipeline.tied
    assert tied.stages == (0, 1)
    assert tied.time > 0


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says(graph: Graph) -> None:
    options = PlanOptions(stages=4, schedule="1F1B", micro_batches=8)
    plan = make_plan(graph, make_mesh((4,)), options)
    assert [stage.in_flight for stage in plan.stages] == [4, 3, 2, 1]


def test_sub_meshes_of_stages_may_differ(graph: Graph) -> None:
    options = PlanOptions(stages=3, schedule="1F1B", micro_batches=8, sub_meshes="any")
    plan = make_plan(graph, make_mesh((4,), topology="h100-sxm"), options)
    sizes = [stage.axes[-1][1] for stage in plan.stages]
    assert sorted(sizes) == [1, 1, 2]
    check_joined(plan, graph)


def test_required_cuts_are_obeyed(graph: Graph) -> None:
    name = next(node.module for node in graph.nodes if node.module.endswith("h.1.ln_1"))
    options = PlanOptions(stages=2, cuts=(f"before:{name}",), micro_batches=2)
    plan = make_plan(graph, make_mesh((2,)), options)
    first = graph_from_json(plan.stages[1].program)
    makers = [node for node in first.nodes if node.module == name]
    assert makers[0].name == first.nodes[0].name


def test_with_given_cuts_no_rank_works_less_than_its_stages_at_best(graph: Graph) -> None:
    given = {"stages": 4, "stages_per_rank": 2, "micro_batches": 8, "schedule": "Interleaved1F1B"}
    mesh = make_mesh((2, 2), topology="h100-sxm")
    plan = make_plan(graph, mesh, PlanOptions(**given | {"balance": (1, 1, 1, 1)}))
    assert plan.pipeline is not None
    bounds = [one.certificate.bound or 0.0 for one in plan.pipeline.stages]
    work = max(sum(bounds[stage] for stage in held) for held in plan.pipeline.ranks)
    assert plan.certificate.bound == pytest.approx(work)
    assert "these cuts" in plan.pipeline.proof
    open_cuts = make_plan(graph, mesh, PlanOptions(**given))
    assert open_cuts.pipeline is not None
    assert "mean work of a rank" in open_cuts.pipeline.proof
    assert 0 < (open_cuts.certificate.bound or 0.0) <= work * (1 + 1e-9)


def test_memory_that_no_stage_fits_is_explained(graph: Graph) -> None:
    options = PlanOptions(stages=2, memory_budget=1000, micro_batches=2)
    plan = make_plan(graph, make_mesh((2,)), options)
    assert not plan.found
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    assert "memory" in plan.reason


@pytest.mark.thorough
def test_two_stages_of_a_rank_share_its_memory() -> None:
    graph = graph_of(meta(residuals, layers=8))
    mesh, wanted = make_mesh((2, 2), topology="h100-sxm"), {"stages": 4, "micro_batches": 8}
    options = PlanOptions(**wanted | {"schedule": "ZBVZeroBubble"})
    free = make_plan(graph, mesh, options)
    assert free.memory is not None
    budget = int(0.8 * free.memory.peak)
    tight = make_plan(graph, mesh, options.with_values(memory_budget=budget))
    assert tight.memory is not None, tight.reason
    assert tight.memory.peak <= budget
    assert check_plan(tight, graph) == ()


def test_more_stages_than_places_are_refused(graph: Graph) -> None:
    with pytest.raises(OptionError, match="at most"):
        make_plan(graph, make_mesh((2,)), PlanOptions(stages=10_000))


def test_a_schedule_that_needs_more_micro_batches_says_so(graph: Graph) -> None:
    options = PlanOptions(stages=2, schedule="1F1B", micro_batches=1)
    with pytest.raises(OptionError, match="micro"):
        make_plan(graph, make_mesh((2,)), options)


def test_inference_pipelines_have_no_backward() -> None:
    graph = graph_of(meta(llama, layers=2))
    options = PlanOptions(mode="inference", stages=2)
    plan = make_plan(graph, make_mesh((2, 2)), options)
    assert plan.pipeline is not None
    assert all(not t.has_gradient for t in plan.pipeline.transfers[0])
    received = [i for i in plan.stages[1].inputs if i.kind == InputKind.RECEIVED]
    assert received


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_best_of_all_partitions_of_a_random_model(seed: int) -> None:
    """`make prove-pipelines` compares 200."""
    assert not compare(seed).failure


def test_the_number_of_micro_batches_is_that_of_the_fastest_plan() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch = torch.export.Dim("batch", min=2, max=64)
    archive = export_model(model, (torch.zeros(32, 64),), dynamic_shapes=({0: batch},))
    graph, mesh = load_graph(archive), make_mesh((2,), topology="cpu-10gbe")
    assert graph.dynamic is not None
    (symbol,) = graph.dynamic.symbols
    options = PlanOptions(stages=2, schedule="GPipe")
    chosen = choose_micro_batches(graph, mesh, options)
    times = {}
    for number in (1, 2, 4, 8, 16):
        program = resized(graph, {symbol.name: 32 // number})
        plan = make_plan(program, mesh, options.with_values(micro_batches=number))
        assert plan.costs is not None
        times[number] = plan.costs.total
    assert times[chosen.number] == min(times.values())
    assert chosen.seconds.items() <= times.items()
    assert chosen.graph.values[chosen.graph.inputs[-1].name].shape == (32 // chosen.number, 64)


def test_a_static_batch_size_cannot_be_divided(graph: Graph) -> None:
    with pytest.raises(OptionError, match="dynamic_shapes"):
        choose_micro_batches(graph, make_mesh((2,)))


def test_a_stage_of_one_layer_can_recompute_it(graph: Graph) -> None:
    options = PlanOptions(
        stages=4,
        cuts=tuple(f"before:transformer.h.{layer}" for layer in (1, 2, 3)),
        schedule="GPipe",
        micro_batches=8,
        activation_checkpointing="always",
    )
    plan = make_plan(graph, make_mesh((4,)), options)
    assert [len(stage.checkpoints) for stage in plan.stages] == [1, 1, 1, 1]
    without = options.with_values(activation_checkpointing="never")
    assert plan.memory is not None
    kept = make_plan(graph, make_mesh((4,)), without).memory
    assert kept is not None
    assert plan.memory.activations < kept.activations
