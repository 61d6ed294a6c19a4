"""The first plan under a budget: found also when time is over, for one or more micro-batches."""

from typing import Any

import numpy as np
import pytest
from scenarios.architectures import mlp as chain
from support.meshes import slow_devices
from support.models import Planner, gpt2, small_graph

from autoshard.base.outcome import SolveStatus
from autoshard.graph import Graph
from autoshard.plan import Plan
from autoshard.plan.options import PlanOptions
from autoshard.planner import problem_size
from autoshard.planner.baselines import ComparisonLimits
from autoshard.planner.budget.rounds import Exceeding, Outcome, Rounds
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.pipeline.pipeline_planner import make_first_plan
from autoshard.solve import Solution

MESH = slow_devices(a=2, b=2)
NO_TIME = 1e-6


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Eight layers, whose activations take more memory than their weights."""
    return chain(layers=8, batch=1024, width=32)


@pytest.fixture(scope="module")
def free(planned: Planner, graph: Graph) -> Plan:
    return planned(graph, MESH, micro_batches=8)


@pytest.mark.matrix
@pytest.mark.parametrize("share", [0.95, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batches": 8},
        {"activation_checkpointing": "always", "micro_batches": 8, "in_flight": 3},
    ],
)
def test_a_plan_is_found_although_time_is_over(
    planned: Planner, graph: Graph, options: dict[str, Any], share: float
) -> None:
    free = planned(graph, MESH, **{**options, "activation_checkpointing": "auto"})
    budget = int(share * free.memory.peak)
    plan = planned(graph, MESH, **options, memory_budget=budget, time_limit=NO_TIME)
    assert plan.found
    assert plan.memory.peak <= budget
    best = planned(graph, MESH, **options, memory_budget=budget, time_limit=20)
    assert best.costs.total <= plan.costs.total * (1 + 1e-9)
    assert best.certificate.bound <= plan.costs.total


def test_a_first_plan_has_a_bound_of_all_plans_that_fit(planned: Planner, graph: Graph) -> None:
    free = planned(graph, MESH)
    options = PlanOptions(memory_budget=int(0.9 * free.memory.peak))
    first = make_first_plan(graph, MESH, options, ComparisonLimits())
    best = planned(graph, MESH, memory_budget=options.memory.budget)
    assert first.memory.peak <= options.memory.budget
    assert first.costs.total >= best.costs.total
    # Without memory, the bound is the time of the free plan.
    assert free.costs.total * (1 + 1e-6) < first.certificate.bound <= best.costs.total


def test_a_last_plan_that_exceeds_the_budget_recomputes_more(planned: Planner) -> None:
    """The time may end with a plan that exceeds the budget: it is made to fit with its layouts."""
    small, mesh = small_graph(gpt2), slow_devices(dp=2, tp=2)
    free = planned(small, mesh)
    assert free.certificate.objective is not None
    options = PlanOptions(memory_budget=int(0.95 * free.memory.peak))
    search = BudgetSearch(Formulation.of(small, mesh, options), options)
    unlimited = search.solve(Formulation.of(small, mesh, options).problem)
    assert unlimited.choice is not None
    budget = options.memory.budget
    assert budget is not None
    rounds = Rounds(budget, unlimited.bound)
    rounds.exceeding = Exceeding(unlimited.choice, free.certificate.objective)
    search.repair(rounds)
    assert rounds.best is not None
    assert rounds.best.plan is not None
    assert rounds.best.plan.memory.peak <= budget
    kept = rounds.best
    rounds.exceeding = Exceeding(unlimited.choice, kept.solution.objective)
    search.repair(rounds)
    assert rounds.best is kept


def test_a_plan_that_exceeds_the_budget_is_kept_until_one_fits_that_is_not_slower() -> None:
    rounds, choice = Rounds(1000, 0.0), np.zeros(1, dtype=np.intp)
    rounds.exceeding = exceeding = Exceeding(choice, 2.0)
    for cost, kept in ((3.0, exceeding), (2.0, None)):
        solution = Solution(SolveStatus.FEASIBLE, choice, cost, 0.0, 0.0)
        rounds.keep(Outcome(solution, {}, None, int), choice)
        assert rounds.exceeding is kept
        assert rounds.best is not None
        assert rounds.best.solution is solution


def test_more_micro_batches_in_flight_are_recomputed(planned: Planner, graph: Graph) -> None:
    most = planned(graph, MESH, micro_batches=8, in_flight=8)
    budget = int(0.75 * most.memory.peak)
    plans = [
        planned(graph, MESH, micro_batches=8, in_flight=number, memory_budget=budget)
        for number in (1, 4, 8)
    ]
    assert [plan.costs.recompute > 0 for plan in plans] == [False, False, True]
    assert plans[0].costs.total == plans[1].costs.total < plans[2].costs.total
    assert [plan.stages[0].in_flight for plan in plans] == [1, 4, 8]


def test_waiting_micro_batches_are_in_memory(planned: Planner, graph: Graph, free: Plan) -> None:
    pins = {
        "inputs": {i.target: i.layout for i in free.stages[0].inputs if i.kind == "user"},
        "parameters": {i.target: i.layout for i in free.stages[0].inputs if i.kind == "parameter"},
    }
    held = {
        number: planned(graph, MESH, micro_batches=8, in_flight=number, pins=pins).memory.turn
        for number in (2, 3, 5)
    }
    assert held[5] - held[3] == 2 * (held[3] - held[2]) > 0


def test_inputs_that_exceed_the_budget_need_no_search(planned: Planner, graph: Graph) -> None:
    options = {"micro_batches": 8, "in_flight": 4}
    budget = problem_size(graph, MESH, PlanOptions(**options)).memory_bound - 1
    plan = planned(graph, MESH, **options, memory_budget=budget)
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    assert plan.provenance.statistics.keys() == {"nodes", "edges", "strategies"}
    assert plan.conflict is not None
    least = plan.conflict.least_budget
    assert least is not None
    assert least > budget
    assert planned(graph, MESH, **options, memory_budget=least).found
