"""Baselines are the patterns that they are named after, and no faster than the optimum."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import Planner, gpt2, llama, mlp, small_graph

from autoshard.base.outcome import SolveStatus
from autoshard.constraints import parameter_shards
from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Baseline, Plan, PlanOptions
from autoshard.plan.options.restrictions import restrictions
from autoshard.planner import compare_baselines, make_plan

LLAMA = partial(llama, layers=2)
SCALAR_BYTES = 64
"""Scalars of the loss are all-reduced in forward."""


def parameter_bytes(graph: Graph) -> int:
    return sum(graph.values[p.name].nbytes for p in graph.parameters)


def nbytes(plan: Plan | Baseline, kind: str, direction: str, axis: str | None = None) -> int:
    return sum(
        c.nbytes
        for c in plan.collectives
        if (c.kind, c.direction) == (kind, direction) and axis in (None, c.axis)
    )


def kinds(plan: Plan | Baseline) -> set[tuple[str, str]]:
    return {(c.kind, c.direction) for c in plan.collectives if c.nbytes > SCALAR_BYTES}


def by_name(baselines: tuple[Baseline, ...]) -> dict[str, Baseline]:
    return {baseline.algo: baseline for baseline in baselines}


@pytest.mark.parametrize("build", [gpt2, LLAMA])
def test_ddp_all_reduces_every_gradient_once(planned: Planner, build: Callable[[], Any]) -> None:
    graph = small_graph(build)
    plan = planned(graph, slow_devices(a=4), algo="ddp")
    assert {p.layout for p in plan.stages[0].parameters} == {"I"}
    assert kinds(plan) == {("all_reduce", "backward")}
    assert nbytes(plan, "all_reduce", "backward") == parameter_bytes(graph)
    assert nbytes(plan, "all_reduce", "forward") <= SCALAR_BYTES
    users = [i.layout for i in plan.stages[0].inputs if i.kind == "user"]
    assert set(users) == {"S(0)"}


@pytest.mark.parametrize("build", [gpt2, LLAMA])
def test_heads_that_ranks_do_not_divide_leave_every_pattern(build: Callable[[], Any]) -> None:
    """With rates of kernels, attention has a price of its own, here without any strategy."""
    mesh = make_mesh((8,), topology="h100-sxm")
    assert make_plan(small_graph(build), mesh, algo="megatron").found


@pytest.mark.parametrize("build", [gpt2, LLAMA])
def test_fsdp_gathers_parameters_and_reduce_scatters_gradients(
    planned: Planner, build: Callable[[], Any]
) -> None:
    graph = small_graph(build)
    plan = planned(graph, slow_devices(a=4), algo="fsdp2", reshard_after_forward="always")
    assert {p.layout for p in plan.stages[0].parameters} == {"S(0)"}
    assert kinds(plan) == {
        ("all_gather", "forward"),
        ("all_gather", "backward"),
        ("reduce_scatter", "backward"),
    }
    assert nbytes(plan, "all_gather", "forward") == parameter_bytes(graph)
    assert nbytes(plan, "reduce_scatter", "backward") == parameter_bytes(graph)
    names = {p.name for p in plan.stages[0].parameters}
    resharded = {r.value for r in plan.stages[0].reshardings if r.value in names}
    assert resharded == names


def test_hsdp_replicates_shards_over_the_outer_axis(planned: Planner) -> None:
    graph = small_graph(gpt2)
    plan = planned(graph, slow_devices(a=2, b=2), algo="hsdp", reshard_after_forward="always")
    assert {p.layout for p in plan.stages[0].parameters} == {"I,S(0)"}
    total = parameter_bytes(graph)
    assert nbytes(plan, "all_gather", "forward", "b") == total
    assert nbytes(plan, "reduce_scatter", "backward", "b") == total
    # The gradients that are all-reduced are shards.
    assert nbytes(plan, "all_reduce", "backward", "a") == total // 2
    assert nbytes(plan, "all_gather", "forward", "a") == 0


def test_sequence_parallelism_shards_what_is_between_the_weights(planned: Planner) -> None:
    mesh = slow_devices(dp=2, tp=2)
    graph = small_graph(LLAMA)
    plan = planned(graph, mesh, algo="megatron-sp")
    without = planned(graph, mesh, algo="megatron")
    layouts = {p.target: p.layout for p in plan.stages[0].parameters}
    assert layouts["model.layers.0.self_attn.q_proj.weight"] == "I,S(0)"
    assert layouts["model.layers.0.mlp.down_proj.weight"] == "I,S(1)"
    norms = [n for n in plan.stages[0].nodes if n.name.startswith("rms_norm")]
    norms = norms or [n for n in plan.stages[0].nodes if n.name.startswith("rsqrt")]
    assert norms
    assert {n.outputs[0] for n in norms} == {"S(0),S(1)"}
    # Reduce-scatter and all-gather take the place of all-reduces of activations.
    assert nbytes(plan, "reduce_scatter", "forward", "tp") > 0
    assert nbytes(without, "reduce_scatter", "forward", "tp") == 0
    both = (
        nbytes(plan, "all_reduce", "forward", "tp"),
        nbytes(without, "all_reduce", "forward", "tp"),
    )
    assert both[0] < both[1]


@pytest.mark.matrix
@pytest.mark.parametrize("build", [mlp, gpt2, LLAMA])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_no_baseline_beats_the_plan(build: Callable[[], Any], mode: str) -> None:
    graph, mesh = small_graph(build), slow_devices(dp=2, tp=2)
    options = PlanOptions(mode=mode, comparisons=True)
    plan = make_plan(graph, mesh, options)
    assert [b.name for b in plan.baselines] == [
        "FSDP2 (ZeRO-3)",
        "HSDP",
        "Megatron TP",
        "Megatron TP + SP",
        "DDP",
    ]
    assert plan.costs is not None
    assert plan.certificate.bound is not None
    for baseline in plan.baselines:
        assert baseline.found, baseline.reason
        assert baseline.step_time is not None
        assert baseline.step_time >= plan.certificate.bound * (1 - 1e-9)
        assert plan.costs.total <= baseline.step_time / (1 - options.solver.relative_gap)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.unrestricted is None
    assert "compare" in plan.provenance.wall_time


@pytest.mark.matrix
@pytest.mark.parametrize("algo", ["ddp", "fsdp2", "hsdp", "megatron", "megatron-sp"])
def test_a_baseline_is_the_plan_of_its_option(planned: Planner, algo: str) -> None:
    graph, mesh = small_graph(gpt2), slow_devices(dp=2, tp=2)
    baseline = by_name(compare_baselines(graph, mesh))[algo]
    zero = {"distributed_optimizer": True} if baseline.distributed_optimizer else {}
    plan = planned(graph, slow_devices(**dict(baseline.axes)), algo=algo, **zero)
    assert baseline.step_time == pytest.approx(plan.costs.total, rel=0.01)
    assert baseline.memory.peak == pytest.approx(plan.memory.peak, rel=0.05)
    assert baseline.certificate is not None
    assert f"obey algo '{algo}'" in baseline.certificate.statement


def test_a_baseline_that_does_not_fit_says_what_it_needs(planned: Planner) -> None:
    graph, mesh = small_graph(gpt2), slow_devices(a=4)
    free = by_name(compare_baselines(graph, mesh))
    budget = (free["ddp"].memory.peak + free["fsdp2"].memory.peak) // 2
    options = PlanOptions(memory_budget=budget, activation_checkpointing="never")
    limited = by_name(compare_baselines(graph, mesh, options))
    assert limited["fsdp2"].found
    ddp = limited["ddp"]
    assert not ddp.found
    assert ddp.certificate.status is SolveStatus.INFEASIBLE
    assert ddp.needed_memory is not None
    assert budget < ddp.needed_memory <= free["ddp"].memory.peak
    assert ddp.reason.startswith("does not fit: needs ")
    needed = planned(graph, mesh, algo="ddp", memory_budget=ddp.needed_memory)
    assert needed.found


def test_fsdp_gathers_again_in_backward_only_where_memory_is_short() -> None:
    graph, mesh = small_graph(partial(gpt2, layers=4)), slow_devices(a=4)
    free = by_name(compare_baselines(graph, mesh))["fsdp2"]
    assert ("all_gather", "backward") not in kinds(free)
    assert free.again is not None
    assert (free.again.gathered_again, free.again.gathered) == (0, 52)
    always = {"algo": "fsdp2", "reshard_after_forward": "always"}
    resharded = make_plan(graph, mesh, PlanOptions(**always, activation_checkpointing="never"))
    assert free.step_time < resharded.costs.total
    options = PlanOptions(memory_budget=round(1.02 * resharded.memory.peak), comparisons=True)
    plan = make_plan(graph, mesh, options)
    short = by_name(plan.baselines)["fsdp2"]
    assert ("all_gather", "backward") in kinds(short)
    assert free.step_time < short.step_time < 1.01 * resharded.costs.total
    assert short.certificate.bound >= plan.certificate.bound


def test_why_a_pattern_is_impossible() -> None:
    graph = small_graph(gpt2)
    too_many = by_name(compare_baselines(graph, slow_devices(a=2, b=8)))
    assert too_many["ddp"].reason == "the batch of 4 does not divide over 16 devices"
    assert too_many["fsdp2"].reason == too_many["hsdp"].reason == too_many["ddp"].reason
    one_axis = by_name(compare_baselines(graph, slow_devices(a=1, b=2)))
    assert one_axis["hsdp"].reason == "2 devices have no such division into axes"
    assert one_axis["fsdp2"].found
    narrow = by_name(compare_baselines(small_graph(mlp), slow_devices(b=127)))
    assert (
        narrow["megatron"].reason == "no weight can be sharded by columns or rows over 127 devices"
    )
    assert compare_baselines(graph, slow_devices(a=1)) == ()


def test_where_dim_0_does_not_divide_another_dim_is_sharded() -> None:
    assert parameter_shards((8, 3), (2, 4)) == (0, 0)
    assert parameter_shards((50257, 768), (2, 4)) == (1, 1)
    assert parameter_shards((50257,), (8,)) == (0,)
    assert parameter_shards((4, 2), (2, 4)) == (1, 0)
    assert parameter_shards((3, 5), (2, 64)) == (0, None)
    assert parameter_shards((), (2, 4)) == (None, None)


@pytest.mark.thorough
def test_what_restrictions_cost() -> None:
    graph, mesh = small_graph(gpt2), slow_devices(dp=2, tp=2)
    options = PlanOptions(comparisons=True, algo="megatron", forbid=())
    plan = make_plan(graph, mesh, options)
    free = make_plan(graph, mesh)
    assert plan.unrestricted is not None
    assert plan.unrestricted.restrictions == ("algo 'megatron'",) == restrictions(options)
    assert plan.unrestricted.step_time == free.costs.total
    assert plan.costs.total > free.costs.total
    assert "among the plans of one stage" in plan.certificate_statement
    assert "obey algo 'megatron'" in plan.certificate.statement


def test_comparisons_are_made_only_if_asked_for() -> None:
    plan = make_plan(small_graph(mlp), make_mesh((4,)), PlanOptions(algo="ddp"))
    assert plan.baselines == ()
    assert plan.unrestricted is None
    asked = make_plan(small_graph(mlp), make_mesh((4,)), PlanOptions(algo="ddp", comparisons=True))
    assert asked.stages == plan.stages
    assert asked.id != plan.id
