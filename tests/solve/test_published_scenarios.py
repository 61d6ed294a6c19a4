"""Problems with published optima: data of the solver tests of OpenXLA and nnScaler."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autoshard.base.arrays import FloatArray
from autoshard.base.outcome import SolveStatus
from autoshard.solve import (
    Edge,
    Problem,
    ProblemNode,
    Solution,
    brute_force,
    minimum_usage,
    solve_problem,
)

A, B, C, D, E = range(5)
SIZES = (4, 3, 4, 4, 3)


def _two_part_prices(row_offset: int, num_rows: int) -> FloatArray:
    rows, cols = np.arange(num_rows)[:, None], np.arange(4)
    return 1000.0 * (rows + row_offset) + 100.0 * cols


@pytest.fixture
def five_nodes() -> Problem:
    """Five operators; D follows C, and B and E share a buffer, so each pair agrees."""
    intervals = {A: (0, 5), B: (0, 5), C: (2, 4), D: (3, 5), E: (0, 0)}
    nodes = []
    for i, size in enumerate(SIZES):
        s = np.arange(size)
        compute, communication = 10.0 * (i + 1) + s, 100.0 * (i + 1) + 10.0 * s
        usage = 100_000.0 * (i + 1) + 10_000.0 * s
        if i == A:
            usage[2] = 990_000.0
        nodes.append(ProblemNode(compute + communication, usage, intervals[i], "ABCDE"[i]))
    edges = (
        Edge(A, C, _two_part_prices(1, 4), np.arange(4), np.arange(4)),
        Edge(B, C, _two_part_prices(5, 3), np.arange(3), np.arange(4)),
    )
    return Problem(tuple(nodes), edges, ((C, D), (B, E)), 1_500_000.0)


SOLVERS = pytest.mark.parametrize(
    "solve", [solve_problem, brute_force, partial(solve_problem, solver="HIGHS")]
)


@SOLVERS
def test_followers_aliases_and_limit_together(
    solve: Callable[[Problem], Solution], five_nodes: Problem
) -> None:
    solution = solve(five_nodes)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.choice.tolist() == [0, 0, 0, 0, 0]
    assert solution.objective == 7650.0
    assert solution.bound == pytest.approx(7650.0, rel=1e-5)


@SOLVERS
def test_strategies_of_infinite_cost_are_avoided(
    solve: Callable[[Problem], Solution], five_nodes: Problem
) -> None:
    first = five_nodes.nodes[A]
    blocked = ProblemNode(
        np.where(np.arange(4) < 3, np.inf, first.cost), first.usage, first.interval
    )
    solution = solve(replace(five_nodes, nodes=(blocked, *five_nodes.nodes[1:])))
    assert solution.choice.tolist() == [3, 0, 0, 0, 0]
    assert solution.objective == 10683.0


@SOLVERS
def test_an_edge_to_a_follower_is_parallel_to_the_edge_to_its_leader(
    solve: Callable[[Problem], Solution], five_nodes: Problem
) -> None:
    extra = replace(five_nodes.edges[1], target=D)
    solution = solve(replace(five_nodes, edges=(*five_nodes.edges, extra)))
    assert solution.choice.tolist() == [0, 0, 0, 0, 0]
    assert solution.objective == 12650.0


@SOLVERS
def test_only_nodes_alive_together_count_against_the_limit(
    solve: Callable[[Problem], Solution], five_nodes: Problem
) -> None:
    """All nodes together use 1.5e6; those alive at one time 1.0e6 at most."""
    assert solve(replace(five_nodes, usage_limit=1_000_000.0)).objective == 7650.0
    assert solve(replace(five_nodes, usage_limit=999_999.0)).status is SolveStatus.INFEASIBLE


def test_an_infeasible_limit_is_answered_with_the_least_that_works(five_nodes: Problem) -> None:
    solution = solve_problem(replace(five_nodes, usage_limit=100_000.0))
    assert solution.status is SolveStatus.INFEASIBLE
    assert (solution.choice, solution.objective, solution.bound) == (None, np.inf, np.inf)
    assert solution.statistics["minimum_usage"] == 1_000_000.0
    assert minimum_usage(five_nodes) == 1_000_000.0


def test_a_choice_is_evaluated_as_published(five_nodes: Problem) -> None:
    choice = [3, 1, 2, 2, 1]
    assert five_nodes.objective(choice) == 12149.0
    assert five_nodes.peak_usage(choice) == 130_000 + 210_000 + 320_000 + 420_000
    assert not five_nodes.is_feasible([0, 0, 0, 1, 0]), "D does not follow C"
    assert not five_nodes.is_feasible([0, 0, 0, 0, 1]), "B and E disagree"
    assert not five_nodes.is_feasible([2, 0, 0, 0, 0]), "A uses too much"


@SOLVERS
def test_a_chain_of_three_operators_in_two_partitions(solve: Callable[[Problem], Solution]) -> None:
    times = ([1.0, 2.0], [0.5, 1.0], [1.0, 2.0])
    nodes = tuple(ProblemNode(np.array(time), np.zeros(2)) for time in times)
    index = np.arange(2)
    edges = (
        Edge(0, 1, np.array([[0.1, 1.0], [1.0, 0.0]]), index, index),
        Edge(1, 2, np.array([[0.2, 1.0], [1.0, 0.0]]), index, index),
    )
    solution = solve(Problem(nodes, edges))
    assert solution.choice.tolist() == [0, 0, 0]
    assert solution.objective == pytest.approx(2.8, rel=1e-15)


@SOLVERS
def test_an_operator_larger_than_the_limit_has_no_plan(
    solve: Callable[[Problem], Solution],
) -> None:
    nodes = tuple(ProblemNode(np.zeros(1), np.array([use]), (0, 1)) for use in (8.0, 5.0, 11.0))
    assert solve(Problem(nodes, usage_limit=10.0)).status is SolveStatus.INFEASIBLE
