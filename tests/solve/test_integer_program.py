"""The integer program of a problem as it is given, which plain solvers get."""

from threading import Event

import numpy as np
import pytest

from autoshard.base.outcome import SolveStatus
from autoshard.solve import (
    Edge,
    Problem,
    ProblemNode,
    ProgramTooLargeError,
    Repeat,
    ShortestPathCost,
    brute_force,
    program_size,
    solve_problem,
    with_equal_groups,
)


def free(size: int) -> ProblemNode:
    return ProblemNode(np.zeros(size), np.zeros(size))


def test_the_price_of_a_path_is_stated_by_its_steps() -> None:
    """A ring of 20 states, with steps to the next one, and prices on the ends."""
    rng, states = np.random.default_rng(1), np.arange(20)
    path = ShortestPathCost(20, states, (states + 1) % 20, rng.random(20))
    index = rng.integers(0, 20, 5), rng.integers(0, 20, 6)
    nodes = ProblemNode(rng.random(5), np.zeros(5)), ProblemNode(rng.random(6), np.zeros(6))
    by_steps = Problem(nodes, (Edge(0, 1, path, *index),))
    by_matrix = Problem(nodes, (Edge(0, 1, path.dense, *index),))
    assert program_size(by_steps).columns == 5 + 6 + 20
    found = solve_problem(by_steps, solver="ilp")
    assert found.status is SolveStatus.OPTIMAL
    assert found.objective == pytest.approx(brute_force(by_matrix).objective, rel=1e-12)


def chain(groups: int) -> Problem:
    """Groups of two nodes in a row, with equal prices, and a limit that half of them may use."""
    rng, index = np.random.default_rng(3), np.arange(3)
    own, between = rng.random((3, 3)), rng.random((3, 3))
    nodes = [
        ProblemNode(np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0]), (0, 1))
        for _ in range(2 * groups)
    ]
    edges = [Edge(2 * i, 2 * i + 1, own, index, index) for i in range(groups)]
    edges += [Edge(2 * i + 1, 2 * i + 2, between, index, index) for i in range(groups - 1)]
    repeat = Repeat(tuple((2 * i, 2 * i + 1) for i in range(groups)))
    return Problem(tuple(nodes), tuple(edges), usage_limit=2.5 * groups, repeats=(repeat,))


def test_equal_groups_share_their_columns() -> None:
    problem = chain(4)
    alike = with_equal_groups(problem)
    assert alike.ties == ((0, 2, 4, 6), (1, 3, 5, 7))
    # A matrix within the groups, one between them, and two nodes of three strategies.
    assert program_size(alike).columns == 2 * 9 + 2 * 3
    assert program_size(problem).columns == 7 * 9 + 8 * 3
    found = solve_problem(alike, solver="ilp")
    assert found.objective == pytest.approx(brute_force(alike).objective, rel=1e-9)
    assert found.choice is not None
    assert len({tuple(found.choice[2 * i : 2 * i + 2].tolist()) for i in range(4)}) == 1
    mixed = solve_problem(problem, solver="ilp")
    assert mixed.objective == pytest.approx(brute_force(problem).objective, rel=1e-9)
    assert mixed.objective < found.objective


def test_a_limit_is_kept_exactly() -> None:
    """All but one choice exceed the limit, by less than a billionth of it."""
    nodes = tuple(
        ProblemNode(np.array([0.0, 1.0]), np.array([2e11, 2e11 - 2]), (0, 1)) for _ in "ab"
    )
    problem = Problem(nodes, usage_limit=4e11 - 3)
    found = solve_problem(problem, solver="ilp")
    assert (found.status, found.objective) == (SolveStatus.OPTIMAL, 2.0)


def test_a_program_that_is_too_large_is_refused_before_it_is_built() -> None:
    size = 2100
    index = np.arange(size)
    edge = Edge(0, 1, np.zeros((size, size)), index, index)
    with pytest.raises(ProgramTooLargeError, match=r"has 4,414,200 columns.*solver 'autoshard'"):
        solve_problem(Problem((free(size), free(size)), (edge,)), solver="ilp")


def test_a_plain_solver_can_be_cancelled() -> None:
    cancel = Event()
    cancel.set()
    found = solve_problem(Problem((free(2),)), solver="ilp", cancel=cancel)
    assert found.status is SolveStatus.CANCELLED
    assert found.choice is None
