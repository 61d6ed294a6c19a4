"""Plans under a memory budget: recomputation, its cost, and invalid budgets."""

import time
from itertools import count, pairwise
from typing import Any

import pytest
from scenarios.architectures import mlp as chain
from support.meshes import slow_devices
from support.models import Planner, graph_of, llama, meta, mlp

from autoshard.graph import Graph
from autoshard.plan import Plan, Stage
from autoshard.planner.budget.rounds import LimitSearch

MESH = slow_devices(a=2, b=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Six layers, of which three repeat and can be checkpointed."""
    return chain(layers=6, batch=256, width=32)


@pytest.fixture(scope="module")
def free(planned: Planner, graph: Graph) -> Plan:
    return planned(graph, MESH)


def stage_of(plan: Plan) -> Stage:
    (stage,) = plan.stages
    return stage


def again(plan: Plan) -> list[str]:
    return [c.value for c in stage_of(plan).reshardings if c.regather]


def test_with_ample_memory_nothing_is_done_twice(free: Plan) -> None:
    assert free.costs.recompute == 0
    assert stage_of(free).checkpoints == ()
    assert again(free) == []


@pytest.mark.thorough
def test_less_memory_never_costs_less(planned: Planner, graph: Graph, free: Plan) -> None:
    shares = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
    plans = [planned(graph, MESH, memory_budget=int(s * free.memory.peak)) for s in shares]
    for roomy, tight in pairwise([free, *plans]):
        assert tight.memory.peak <= tight.memory.budget
        # What was found may be worse than the best by the gap that is proven, and not more.
        # The same plan's seconds are added up in another order for bounds.
        assert roomy.certificate.bound <= tight.costs.total * (1 + 1e-12)
        assert roomy.costs.total * (1 - roomy.certificate.gap) <= tight.costs.total
    assert plans[-1].costs.recompute > 0


def test_limits_stay_within_the_budget_although_a_choice_counts_too_much() -> None:
    """A choice may keep what its plan does not need, so that it counts more than the peak."""
    limits = LimitSearch(1000)
    limits.record(usage=990.0, peak=960)
    assert limits.limit == limits.fits == 1000
    assert limits.is_over


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_the_bound_allows_a_plan_that_fits_to_the_last_byte(
    planned: Planner, graph: Graph, free: Plan, share: float
) -> None:
    """Counted memory is a lower bound of the peak, so a budget of a plan's peak admits it."""
    plan = planned(graph, MESH, memory_budget=int(share * free.memory.peak))
    exact = planned(graph, MESH, memory_budget=plan.memory.peak)
    assert exact.found
    assert exact.certificate.bound <= plan.costs.total
    assert exact.costs.total * (1 - exact.certificate.gap) <= plan.costs.total


@pytest.mark.thorough
def test_a_slow_machine_finds_the_same_plan(
    planned: Planner, graph: Graph, free: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes with each reading of the clock, a thousand times faster in the second plan."""
    found = []
    for seconds in (1e-7, 1e-4):
        readings = count()
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", lambda s=seconds, r=readings: s * next(r))
            budget = int(0.8 * free.memory.peak)
            found.append(planned(graph, MESH, memory_budget=budget, time_limit=600))
    fast, slow = (plan.certificate for plan in found)
    assert (fast.objective, fast.bound, fast.status) == (slow.objective, slow.bound, slow.status)
    assert not any("time_limit_reached" in plan.provenance.statistics for plan in found)


@pytest.mark.thorough
def test_what_is_ruled_out_is_not_done(planned: Planner, graph: Graph, free: Plan) -> None:
    budget = int(0.8 * free.memory.peak)
    options: dict[str, Any] = {"memory_budget": budget}
    either = planned(graph, MESH, **options)
    assert either.found
    no_blocks = planned(graph, MESH, **options, activation_checkpointing="never")
    assert stage_of(no_blocks).checkpoints == () if no_blocks.found else True
    held = planned(
        graph, MESH, **options, activation_checkpointing="never", reshard_after_forward="never"
    )
    for narrower in (no_blocks, held):
        if narrower.found:
            assert narrower.costs.recompute == 0 or again(narrower)
            assert narrower.costs.total >= either.certificate.bound


def test_every_block_is_checkpointed_where_that_is_asked_for(
    planned: Planner, graph: Graph, free: Plan
) -> None:
    plan = planned(graph, MESH, activation_checkpointing="always")
    spans = [(c.first, c.last) for c in stage_of(plan).checkpoints]
    assert len(spans) > 1
    assert plan.costs.recompute > 0
    assert plan.costs.total > free.costs.total
    assert plan.memory.turn < free.memory.turn


def test_parameters_are_gathered_again_where_that_is_asked_for(planned: Planner) -> None:
    """Fully sharded data parallelism that reshards after forward."""
    pins = {"parameters": {"*weight": "S(0)"}, "inputs": {"*": "S(0)"}}
    plans = {
        option: planned(
            meta(mlp, 65536, 512, 512, 512), (4,), pins=pins, reshard_after_forward=option
        )
        for option in ("never", "always")
    }
    assert again(plans["never"]) == []
    # Nothing asks for the gradient of the first product's input, so its weight is not held.
    assert again(plans["always"]) == ["p_down_weight"]
    counts = {
        option: {(c.kind, c.direction): c.count for c in plan.collectives}
        for option, plan in plans.items()
    }
    # Two weights, which share one.
    assert counts["never"]["all_gather", "forward"] == 1
    assert counts["always"]["all_gather", "backward"] == 1
    assert plans["always"].costs.recompute > 0
    assert plans["always"].memory.turn < plans["never"].memory.turn


@pytest.mark.thorough
def test_the_least_budget_works_and_less_does_not(planned: Planner, graph: Graph) -> None:
    impossible = planned(graph, MESH, memory_budget=10_000)
    assert impossible.conflict is not None
    least = impossible.conflict.least_budget
    assert least is not None
    plan = planned(graph, MESH, memory_budget=least)
    assert plan.memory.peak <= least
    assert plan.costs.recompute > 0
    below = planned(graph, MESH, memory_budget=least - 1)
    assert not below.found
    assert f"{least:,}" in below.reason


def test_what_the_optimizer_keeps_takes_memory(planned: Planner) -> None:
    graph = graph_of(meta(llama))
    plans = {
        name: planned(graph, MESH, **options)
        for name, options in {
            "plain": {},
            "narrow": {"state_dtype": "bfloat16"},
            "none": {"optimizer": "sgd"},
        }.items()
    }
    state = {name: plan.memory.optimizer / plan.memory.parameters for name, plan in plans.items()}
    assert state == {"plain": 2, "narrow": 1, "none": 0}
