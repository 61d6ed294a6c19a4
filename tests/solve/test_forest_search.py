"""Search by random induced forests, on small problems."""

from collections.abc import Callable

import numpy as np
import pytest

from autoshard.base.arrays import FloatArray
from autoshard.solve import Edge, Problem, ProblemNode, SolverSettings, brute_force, solve_problem
from autoshard.solve.bounds.forest_search import ForestSearch, search_forests
from autoshard.solve.network import Network
from autoshard.solve.presolve import EnforceArcConsistency, MergeTies, Presolve
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.state import SolveState

RandomProblem = Callable[[int], Problem]
INDEX = np.arange(4)
HUGE = SolverSettings(
    max_product_work=0.0,
    large_entries=0,
    huge_entries=0,
    trws_max_stalled=12,
)


def cleared(problem: Problem) -> Network:
    """A network without ties and forbidden strategies."""
    network = Network.from_problem(problem)
    Presolve((MergeTies(), EnforceArcConsistency())).apply(network)
    return network


def joined(ends: list[tuple[int, int]], num_nodes: int, usage: FloatArray, limit: float) -> Problem:
    """Nodes of random prices that are alive together, with random edges."""
    rng = np.random.default_rng(5)
    nodes = tuple(ProblemNode(rng.random(4), usage, (0, 1)) for _ in range(num_nodes))
    edges = tuple(Edge(u, v, rng.random((4, 4)), INDEX, INDEX) for u, v in ends)
    return Problem(nodes, edges, usage_limit=limit)


def test_one_forest_solves_a_tree() -> None:
    problem = joined([(v // 2, v) for v in range(1, 9)], 9, np.zeros(4), 1.0)
    search = ForestSearch(Network.from_problem(problem))
    start = np.zeros(9, dtype=np.intp)
    best = search.improved(start, start, np.zeros(1))
    assert best is not None
    assert search.price(best) == pytest.approx(brute_force(problem).objective, rel=1e-12)


def test_components_are_combined_within_the_limit() -> None:
    # Without edges, every node is a component of its own: a knapsack.
    rng = np.random.default_rng(2)
    nodes = tuple(
        ProblemNode(
            np.array([9.0, rng.random() * 9.0]),
            np.array([0.0, float(rng.integers(1, 9))]),
            (0, 1 + v % 2),
        )
        for v in range(12)
    )
    problem = Problem(nodes, usage_limit=18.0)
    search = ForestSearch(Network.from_problem(problem))
    start = np.zeros(12, dtype=np.intp)
    best = search.improved(start, start, np.zeros(1))
    assert best is not None
    assert problem.is_feasible(best)
    assert search.price(best) == pytest.approx(brute_force(problem).objective, rel=2e-3)


@pytest.mark.thorough
def test_steps_lower_the_price_and_keep_the_limits(random_problem: RandomProblem) -> None:
    num_better = 0
    for seed in range(120):
        problem = random_problem(seed)
        truth, network = brute_force(problem), cleared(problem)
        if network.infeasible or truth.choice is None:
            continue
        search = ForestSearch(network, seed=seed)
        rng = np.random.default_rng(seed)
        sizes = [len(network.variables[v].cost) for v in search.variables]
        for _ in range(20):
            picks = rng.integers(0, sizes)
            by_variable = dict(zip(search.variables, picks.tolist(), strict=True))
            fits = (network.usage(by_variable) <= network.capacity).all()
            if not (fits and np.isfinite(network.price(by_variable))):
                continue
            better = search.step(picks, rng.random(len(network.capacity)))
            if better is None:
                continue
            num_better += 1
            found = dict(zip(search.variables, better.tolist(), strict=True))
            assert (network.usage(found) <= network.capacity).all()
            assert network.price(found) < network.price(by_variable)
            gain = search.price(picks) - search.price(better)
            paid = network.price(by_variable) - network.price(found)
            assert gain == pytest.approx(paid, rel=1e-9, abs=1e-9 * abs(network.price(found)))
    assert num_better > 100


def test_the_search_reaches_the_optimum_of_a_cycle_under_a_limit() -> None:
    ends = [(v, (v + 1) % 8) for v in range(8)]
    problem = joined(ends, 8, np.array([3.0, 2.0, 1.0, 0.0]), 11.0)
    state = SolveState(problem, settings=SolverSettings(forest_patience=600))
    reduced = ReducedProblem(Network.from_problem(problem), state)
    state.offer(np.full(8, 3))
    search_forests(reduced, np.full(1, 0.1))
    assert state.objective == pytest.approx(brute_force(problem).objective, rel=1e-12)


@pytest.mark.thorough
def test_a_huge_problem_ends_with_a_feasible_choice_and_a_bound() -> None:
    rng = np.random.default_rng(1)
    ends = [(int(u), v) for v in range(1, 10) for u in rng.choice(v, min(v, 3), replace=False)]
    problem = joined(ends, 10, np.array([3.0, 2.0, 1.0, 0.0]), 12.0)
    phases: set[str] = set()
    found = solve_problem(
        problem, time_limit=60.0, settings=HUGE, on_progress=lambda p: phases.add(p.phase)
    )
    assert "search forests" in phases
    truth = brute_force(problem).objective
    assert found.objective == pytest.approx(truth, rel=0.02)
    assert found.bound <= truth
