"""Time limits, cancellation and progress."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from autoshard.base.outcome import SolveStatus
from autoshard.solve import Edge, Problem, ProblemNode, Progress, solve_problem

RandomProblem = Callable[[int], Problem]


@pytest.fixture
def hard_problem() -> Problem:
    """A dense graph under a tight limit, too large to be solved at once by HiGHS."""
    rng = np.random.default_rng(0)
    index = np.arange(6)
    nodes = tuple(
        ProblemNode(rng.random(6), np.rint(1000 * rng.random(6)), (0, 1)) for _ in range(24)
    )
    edges = tuple(Edge(u, v, rng.random((6, 6)), index, index) for v in range(24) for u in range(v))
    return Problem(nodes, edges, usage_limit=6500.0)


def test_cancelled_before_the_start_has_no_answer(hard_problem: Problem) -> None:
    cancel = threading.Event()
    cancel.set()
    solution = solve_problem(hard_problem, cancel=cancel)
    assert solution.status is SolveStatus.CANCELLED
    assert solution.choice is None
    assert solution.bound == -np.inf


@pytest.mark.parametrize("phase", ["relax", "branch and bound"])
def test_cancelled_on_the_way_keeps_the_best_choice(hard_problem: Problem, phase: str) -> None:
    cancel = threading.Event()

    def listen(progress: Progress) -> None:
        if progress.phase == phase and np.isfinite(progress.incumbent):
            cancel.set()

    solution = solve_problem(hard_problem, cancel=cancel, on_progress=listen)
    assert solution.status is SolveStatus.CANCELLED
    assert hard_problem.is_feasible(solution.choice)
    assert solution.bound <= solution.objective
    assert solution.gap > 0


def test_the_time_limit_ends_branch_and_bound_with_a_choice(hard_problem: Problem) -> None:
    solution = solve_problem(hard_problem, time_limit=3.0)
    assert solution.status is SolveStatus.FEASIBLE
    assert hard_problem.is_feasible(solution.choice)
    assert 0 < solution.bound < solution.objective


def test_no_time_at_all_is_a_time_out(hard_problem: Problem) -> None:
    solution = solve_problem(hard_problem, time_limit=1e-9)
    assert solution.status is SolveStatus.TIMED_OUT
    assert (solution.choice, solution.objective, solution.gap) == (None, np.inf, np.inf)


def test_progress_never_goes_back(contested_problem: RandomProblem) -> None:
    seen: list[Progress] = []
    solution = solve_problem(contested_problem(5), on_progress=seen.append)
    assert [p.elapsed for p in seen] == sorted(p.elapsed for p in seen)
    assert [p.bound for p in seen] == sorted(p.bound for p in seen)
    assert [p.incumbent for p in seen] == sorted((p.incumbent for p in seen), reverse=True)
    assert seen[-1].incumbent == solution.objective
    assert seen[-1].gap <= 1e-6
    assert "reduce under the limit" in {p.phase for p in seen}


def test_a_wide_gap_is_enough_when_asked_for(contested_problem: RandomProblem) -> None:
    problem = contested_problem(5)
    wide = solve_problem(problem, relative_gap=0.5)
    assert wide.status is SolveStatus.OPTIMAL
    assert wide.gap <= 0.5


def test_the_same_seed_gives_the_same_choice(contested_problem: RandomProblem) -> None:
    first, second = (solve_problem(contested_problem(9), seed=3) for _ in range(2))
    assert first.choice.tolist() == second.choice.tolist()
