from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.base.arrays import IntArray
from autoshard.base.outcome import SolveStatus
from autoshard.errors import OptionError
from autoshard.solve import (
    Edge,
    Problem,
    ProblemNode,
    Solution,
    SolverSettings,
    brute_force,
    solve_problem,
)

RandomProblem = Callable[[int], Problem]
seeds = st.integers(0, 2**32 - 1)
thorough = settings(max_examples=150, derandomize=True, deadline=None)
brief = settings(max_examples=30, derandomize=True, deadline=None)


def paid(problem: Problem, choice: Sequence[int] | IntArray) -> float:
    """Sum of the absolute prices of a choice: what rounding is measured against."""
    total = sum(abs(node.cost[s]) for node, s in zip(problem.nodes, choice, strict=True))
    for edge in problem.edges:
        total += abs(edge.cost[edge.rows[choice[edge.source]], edge.cols[choice[edge.target]]])
    return total


def assert_same_outcome(problem: Problem, found: Solution, truth: Solution, *, rtol: float) -> None:
    assert found.status is truth.status
    if truth.choice is None:
        assert found.choice is None
        return
    tolerance = rtol * paid(problem, truth.choice)
    assert problem.is_feasible(found.choice)
    assert found.objective == pytest.approx(problem.objective(found.choice), rel=1e-12, abs=0)
    assert abs(found.objective - truth.objective) <= tolerance
    assert found.bound <= truth.objective + 1e-12 * paid(problem, truth.choice)
    assert found.bound >= truth.objective - 2 * tolerance


@thorough
@given(seed=seeds)
def test_finds_what_brute_force_finds(random_problem: RandomProblem, seed: int) -> None:
    problem = random_problem(seed)
    assert_same_outcome(problem, solve_problem(problem), brute_force(problem), rtol=1e-6)


@thorough
@given(seed=seeds)
def test_prices_on_usage_and_min_marginals_find_what_brute_force_finds(
    random_problem: RandomProblem, seed: int
) -> None:
    problem = random_problem(seed)
    settings = SolverSettings(max_product_work=0)
    found = solve_problem(problem, relative_gap=0, settings=settings)
    assert_same_outcome(problem, found, brute_force(problem), rtol=1e-9)


@thorough
@given(seed=seeds)
def test_highs_alone_finds_what_brute_force_finds(random_problem: RandomProblem, seed: int) -> None:
    problem = random_problem(seed)
    settings = SolverSettings(max_product_work=0)
    found = solve_problem(problem, settings=settings)
    assert_same_outcome(problem, found, brute_force(problem), rtol=1e-6)


@brief
@given(seed=seeds)
def test_a_binding_limit_is_solved_to_optimality(
    contested_problem: RandomProblem, seed: int
) -> None:
    problem = contested_problem(seed)
    found = solve_problem(problem)
    assert_same_outcome(problem, found, brute_force(problem), rtol=1e-6)


@brief
@given(seed=seeds)
def test_reference_model_finds_what_brute_force_finds(
    random_problem: RandomProblem, seed: int
) -> None:
    problem = random_problem(seed)
    truth = brute_force(problem)
    found = solve_problem(problem, solver="HIGHS")
    assert found.status is truth.status
    if truth.choice is not None:
        assert problem.is_feasible(found.choice)
        assert abs(found.objective - truth.objective) <= 1e-6 * paid(problem, truth.choice)
        assert found.bound <= truth.objective


@brief
@given(seed=seeds)
@pytest.mark.parametrize("solver", ["ilp", "SCIPY"])
def test_plain_solvers_find_what_brute_force_finds(
    random_problem: RandomProblem, contested_problem: RandomProblem, solver: str, seed: int
) -> None:
    for problem in (random_problem(seed), contested_problem(seed)):
        truth = brute_force(problem)
        found = solve_problem(problem, solver=solver, time_limit=60.0)
        assert_same_outcome(problem, found, truth, rtol=1e-6)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_the_unit_of_price_does_not_matter(random_problem: RandomProblem, unit: float) -> None:
    base = random_problem(11)
    nodes = tuple(ProblemNode(n.cost * unit, n.usage, n.interval) for n in base.nodes)
    edges = tuple(Edge(e.source, e.target, e.cost * unit, e.rows, e.cols) for e in base.edges)
    problem = Problem(nodes, edges, base.ties, base.usage_limit)
    assert_same_outcome(problem, solve_problem(problem), brute_force(problem), rtol=1e-6)


def test_empty_problem_costs_nothing() -> None:
    solution = solve_problem(Problem(()))
    assert (solution.status, solution.objective, solution.bound) == (SolveStatus.OPTIMAL, 0.0, 0.0)
    assert solution.choice is not None
    assert len(solution.choice) == 0


def test_long_chain_is_solved_by_reductions_alone() -> None:
    rng = np.random.default_rng(5)
    index = np.arange(12)
    nodes = tuple(ProblemNode(rng.random(12), np.zeros(12)) for _ in range(60))
    edges = tuple(Edge(i, i + 1, rng.random((12, 12)), index, index) for i in range(59))
    problem = Problem(nodes, edges)
    best = nodes[0].cost
    for node, edge in zip(nodes[1:], edges, strict=True):
        best = (best[:, None] + edge.cost).min(axis=0) + node.cost
    solution = solve_problem(problem)
    assert solution.objective == pytest.approx(best.min(), rel=1e-12)
    assert solution.bound == solution.objective
    assert solution.statistics["eliminate_neighbours.nodes"] == 60


def test_repeated_layers_under_one_limit_are_mixed() -> None:
    """All layers alike and slack for half of them: the optimum treats equal layers differently."""
    layers = 10
    nodes = tuple(
        ProblemNode(np.array([1.0, 2.0]), np.array([3.0, 1.0]), (0, 1)) for _ in range(layers)
    )
    solution = solve_problem(Problem(nodes, usage_limit=20.0))
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.objective == 15.0
    assert solution.choice is not None
    assert solution.choice.sum() == 5


def test_a_dense_graph_under_a_limit_goes_through_branch_and_bound() -> None:
    rng = np.random.default_rng(2)
    index = np.arange(6)
    nodes = tuple(
        ProblemNode(rng.random(6), np.floor(100 * rng.random(6)), (0, 1)) for _ in range(7)
    )
    edges = tuple(Edge(i, j, rng.random((6, 6)), index, index) for i in range(7) for j in range(i))
    problem = Problem(nodes, edges, usage_limit=200.0)
    found = solve_problem(problem)
    assert_same_outcome(problem, found, brute_force(problem), rtol=1e-6)


def test_brute_force_refuses_what_it_cannot_enumerate() -> None:
    nodes = tuple(ProblemNode(np.zeros(10), np.zeros(10)) for _ in range(10))
    with pytest.raises(OptionError, match="solve_problem"):
        brute_force(Problem(nodes))


def test_unknown_solver_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="NOSUCH"):
        solve_problem(Problem((ProblemNode(np.zeros(1), np.zeros(1)),)), solver="nosuch")


def test_time_limit_is_refused_where_it_would_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.solve.reference._OPTIONS", {})
    with pytest.raises(OptionError, match="time limit"):
        solve_problem(Problem(()), solver="SCIPY", time_limit=1.0)


@pytest.mark.parametrize("options", [{"time_limit": 0.0}, {"time_limit": -1.0}])
def test_time_limit_must_be_positive(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="time_limit"):
        solve_problem(Problem(()), **options)


def test_relative_gap_must_be_a_fraction() -> None:
    with pytest.raises(OptionError, match="relative_gap"):
        solve_problem(Problem(()), relative_gap=1.5)


def limited_in_the_last_bytes(seed: int) -> Problem:
    """Usage of tens of gigabytes in which some choices exceed the limit by a few bytes."""
    rng = np.random.default_rng(seed)
    nodes = []
    for _ in range(6):
        usage = 2.0**34 + rng.integers(0, 40, 3).astype(float)
        # The strategies that use most are the cheapest.
        nodes.append(ProblemNode(1e3 - (usage - 2.0**34) + rng.random(3), usage, (0, 1)))
    ends = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    index = np.arange(3)
    edges = tuple(Edge(i, j, rng.random((3, 3)), index, index) for i, j in ends)
    free = Problem(tuple(nodes), edges)
    least, most = (
        free.peak_usage([int(find(node.usage)) for node in nodes])
        for find in (np.argmin, np.argmax)
    )
    return replace(free, usage_limit=np.floor((least + most) / 2))


NO_PRODUCTS = SolverSettings(max_product_work=0)
LIMITED_SOLVERS: dict[str, Callable[[Problem], Solution]] = {
    "everything": solve_problem,
    "no products": partial(solve_problem, settings=NO_PRODUCTS),
    "messages": partial(solve_problem, settings=replace(NO_PRODUCTS, large_entries=0)),
    "reference": partial(solve_problem, solver="HIGHS"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("solver", LIMITED_SOLVERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_is_kept_to_the_last_byte(seed: int, solver: str) -> None:
    problem = limited_in_the_last_bytes(seed)
    found = LIMITED_SOLVERS[solver](problem)
    assert_same_outcome(problem, found, brute_force(problem), rtol=1e-6)
    assert found.choice is not None
    used = sum(int(n.usage[s]) for n, s in zip(problem.nodes, found.choice, strict=True))
    assert used <= problem.usage_limit
    below = replace(problem, usage_limit=used - 1.0)
    assert_same_outcome(below, LIMITED_SOLVERS[solver](below), brute_force(below), rtol=1e-6)
