"""Axes with a purpose in the patterns of Megatron-LM, and the distributed optimizer."""

import numpy as np
import pytest

from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.graph import Graph, graph_from_json, load_graph
from autoshard.graph.experts import GROUPED_MM
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import solve_problem
from benchmarks.published.models import Batch, Dimensions, export_decoder

_BATCH = Batch(8, 64)


@pytest.fixture(scope="module")
def dense() -> Graph:
    dims = Dimensions(128, 2, 8, 4, 256, 512)
    return load_graph(export_decoder(dims, _BATCH, "float32"))


@pytest.fixture(scope="module")
def mixture() -> Graph:
    dims = Dimensions(128, 2, 8, 4, 256, 512, experts=8, active=2)
    return load_graph(export_decoder(dims, _BATCH, "float32"))


def placements(plan: Plan, name: str) -> tuple[str, ...]:
    (stage,) = plan.stages
    return next(p.placements for p in stage.parameters if p.target == name)


def collectives(plan: Plan) -> set[tuple[str, str, str]]:
    return {(c.kind, c.axis, c.direction) for c in plan.collectives}


def test_zero_1_stores_shards_and_gathers_them_once_per_step(dense: Graph) -> None:
    plan = make_plan(
        dense, "dp=8", algo="ddp", distributed_optimizer=True, micro_batches=4, overlap=True
    )
    parameters = plan.stages[0].parameters
    assert all("Shard" in parameter.placements[0] for parameter in parameters)
    weights = [r for r in plan.stages[0].reshardings if r.value.startswith("p_")]
    assert weights
    assert {r.frequency for r in weights} <= {"gather_step", "step"}
    without = make_plan(dense, "dp=8", algo="ddp", micro_batches=4, overlap=True)
    assert plan.memory is not None
    assert without.memory is not None
    assert plan.memory.optimizer * 8 == without.memory.optimizer


def test_with_tensor_parallelism_the_data_axis_shards_what_is_at_rest(dense: Graph) -> None:
    plan = make_plan(dense, "dp=2,tp=4", algo="megatron-sp", distributed_optimizer=True)
    assert placements(plan, "layers.0.mlp.up.weight") == (
        "_StridedShard(dim=0, sf=4)",
        "Shard(dim=0)",
    )
    assert placements(plan, "layers.0.mlp_norm.norm.weight") == ("Shard(dim=0)", "Replicate()")
    assert ("reduce_scatter", "dp", "backward") in collectives(plan)
    plain = make_plan(dense, "dp=2,tp=4", algo="megatron-sp")
    assert placements(plain, "layers.0.mlp.up.weight") == ("Replicate()", "Shard(dim=0)")


def test_gathered_activations_are_gathered_again_in_backward(dense: Graph) -> None:
    plain = make_plan(dense, "dp=2,tp=4", algo="megatron-sp", reshard_after_forward="never")
    options = plain.options.with_values(regather_activations=True)
    plan = make_plan(dense, plain.mesh, options)
    assert check_plan(plan, graph=dense) == ()
    assert plan.memory is not None
    assert plain.memory is not None
    # Of what the two norms of each layer and the last one make, a rank keeps its part of 4.
    made = 5 * 4 * 64 * 128 * 2
    assert plain.memory.activations - plan.memory.activations == 3 * made // 4
    gathered, again = (
        sum(
            c.nbytes
            for c in x.collectives
            if (c.kind, c.axis, c.direction) == ("all_gather", "tp", "backward")
        )
        for x in (plain, plan)
    )
    assert again - gathered == made
    edited = plan.stages[0].model_copy(
        update={
            "reshardings": tuple(
                c.model_copy(update={"regather": False}) for c in plan.stages[0].reshardings
            )
        }
    )
    findings = check_plan(plan.model_copy(update={"stages": (edited,)}), graph=dense)
    assert any("stays gathered, which the options rule out" in finding for finding in findings)


def test_an_axis_cp_shards_queries_and_gathers_keys_and_values(dense: Graph) -> None:
    plan = make_plan(dense, "dp=2,cp=2,tp=2", algo="megatron")
    (stage,) = plan.stages
    ids = next(i for i in stage.inputs if i.target == "ids")
    assert ids.placements == ("Shard(dim=0)", "Shard(dim=1)", "Replicate()")
    attention = next(n for n in stage.nodes if "attention" in n.name and len(n.inputs) == 3)
    assert [layout.split(",")[1] for layout in attention.inputs] == ["S(2)", "R", "R"]
    assert ("all_gather", "cp", "forward") in collectives(plan)


def test_an_axis_ep_shards_experts_and_the_batch(mixture: Graph) -> None:
    plan = make_plan(mixture, "dp=2,ep=4", algo="megatron", distributed_optimizer=True)
    assert placements(plan, "layers.0.mlp.experts.up")[1] == "Shard(dim=0)"
    (stage,) = plan.stages
    ids = next(i for i in stage.inputs if i.target == "ids")
    assert ids.placements == ("Shard(dim=0)", "Shard(dim=0)")
    graph = graph_from_json(stage.program)
    products = {node.name for node in graph.nodes if node.operator == GROUPED_MM}
    layouts = [node.inputs for node in stage.nodes if node.name in products]
    assert len(layouts) == 4
    assert all(matrices.split(",")[1] == "S(0)" for _, matrices, _ in layouts)


def test_a_distributed_optimizer_needs_replicated_parameters(dense: Graph) -> None:
    with pytest.raises(OptionError, match="algo is 'fsdp2'"):
        make_plan(dense, "dp=8", algo="fsdp2", distributed_optimizer=True)
    with pytest.raises(OptionError, match="needs an algo"):
        make_plan(dense, "dp=8", distributed_optimizer=True)


def test_equal_stages_of_a_pattern_are_as_fast_as_stages_planned_alone(dense: Graph) -> None:
    options = {"algo": "megatron", "micro_batches": 4, "balance": (1, 1), "schedule": "1F1B"}
    plan = make_plan(dense, "pp=2,dp=2,tp=2", **options)
    assert plan.pipeline is not None
    assert [len(s.parameters) for s in plan.stages] == [10, 11]
    assert all("Shard" in placements_of(s, "tp") for s in plan.stages)


def placements_of(stage: object, axis: str) -> str:
    axes = [name for name, _ in stage.axes]
    return " ".join(p.placements[axes.index(axis)] for p in stage.parameters)


def test_equal_stages_multiply_in_float8_where_asked(dense: Graph) -> None:
    options = {"algo": "megatron", "micro_batches": 4, "balance": (1, 1), "schedule": "1F1B"}
    every, none, first = (
        make_plan(dense, "pp=2,dp=2,tp=2", runtime="other", float8_modules=modules, **options)
        for modules in (("layers.*",), (), ("layers.0.*",))
    )
    seconds = [
        [stage.costs.compute for stage in plan.pipeline.stages]
        for plan in (every, none, first)
        if plan.pipeline is not None
    ]
    assert seconds[0][0] == seconds[2][0] != seconds[1][0]
    assert seconds[0][1] != seconds[2][1] == seconds[1][1]


def test_equal_stages_run_eager_where_asked(dense: Graph) -> None:
    options = {"algo": "megatron", "micro_batches": 4, "balance": (1, 1), "schedule": "1F1B"}
    options |= {"runtime": "other", "execution": "compile"}
    fused, first, both = (
        make_plan(
            dense,
            "pp=2,dp=2,tp=2",
            eager_modules=modules,
            **options,
        )
        for modules in ((), ("layers.0",), ("layers.*",))
    )
    seconds = [
        [stage.costs.compute for stage in plan.pipeline.stages]
        for plan in (fused, first, both)
        if plan.pipeline is not None
    ]
    assert seconds[0][0] < seconds[1][0] == seconds[2][0]
    assert seconds[0][1] == seconds[1][1] < seconds[2][1]


def test_experts_of_an_axis_cp_have_the_tokens_of_their_ranks(mixture: Graph) -> None:
    """Each rank has a part of one sequence, whose tokens it sends to their experts."""
    plan = make_plan(mixture, "dp=2,ep=4,cp=2", algo="megatron")
    (stage,) = plan.stages
    graph = graph_from_json(stage.program)
    products = {node.name for node in graph.nodes if node.operator == GROUPED_MM}
    layouts = [node.inputs[0] for node in stage.nodes if node.name in products]
    assert layouts
    assert all("R" not in rows.split(",") for rows in layouts)


@pytest.mark.parametrize("algo", ["megatron-sp", "ddp", "fsdp2"])
def test_strategies_that_constraints_forbid_are_left_out(mixture: Graph, algo: str) -> None:
    """Nothing else is left out: the same strategies and the same optimum remain."""
    mesh = make_mesh((2, 2), axes=("dp", "tp"))
    options = PlanOptions(algo=algo, overlap=True)
    every = Formulation.of(mixture, mesh, options, keeps_forbidden=True)
    allowed = Formulation.of(mixture, mesh, options)
    for one, other in zip(allowed.variables, every.variables, strict=True):
        kept = np.flatnonzero(np.isfinite(other.time))
        # Partial sums of a value that constraints never leave partial are not listed either.
        strategies = [other.strategies[i] for i in kept]
        places = [strategies.index(strategy) for strategy in one.strategies]
        assert places == sorted(places)
        assert one.time == pytest.approx(other.time[kept][places])
        assert np.isfinite(one.time).all()
    num_allowed, num_all = (
        sum(len(variable.strategies) for variable in x.variables) for x in (allowed, every)
    )
    assert num_allowed < num_all
    best = [solve_problem(x.problem, relative_gap=0.0).objective for x in (allowed, every)]
    assert best[0] == pytest.approx(best[1])
