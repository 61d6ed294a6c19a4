"""Slow machines: work limits the steps, so time changes neither the solution nor the bound."""

import time
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from autoshard.base.outcome import SolveStatus
from autoshard.solve import Edge, Problem, ProblemNode, Solution, SolverSettings, solve_problem

TIME_LIMIT = 600.0
FAST, SLOW = 1e-6, 5e-4
"""Seconds between two readings of the clock."""


def dense(num_nodes: int, *, limit: float = np.inf) -> Problem:
    """Every node is linked to every other one."""
    size = 4
    rng = np.random.default_rng(1)
    index = np.arange(size)
    nodes = tuple(
        ProblemNode(rng.random(size), np.rint(100 * rng.random(size)), (v // 4, v // 4 + 2))
        for v in range(num_nodes)
    )
    edges = tuple(
        Edge(u, v, rng.random((size, size)), index, index)
        for v in range(num_nodes)
        for u in range(v)
    )
    return Problem(nodes, edges, usage_limit=limit)


FEW_NODES = {"branch_work": 2e3}
CASES = {
    "branch and bound": (dense(7, limit=250.0), {}),
    "branch and bound with too many nodes": (dense(10, limit=250.0), FEW_NODES),
    "messages with prices of usage": (dense(8, limit=250.0), {"large_entries": 0, **FEW_NODES}),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the speed: the seconds that pass from one reading of the clock to the next."""

    def set_speed(seconds: float) -> None:
        readings = count()
        monkeypatch.setattr(time, "perf_counter", lambda: seconds * next(readings))

    return set_speed


def solved(name: str) -> Solution:
    problem, limits = CASES[name]
    return solve_problem(problem, time_limit=TIME_LIMIT, settings=SolverSettings(**limits))


@pytest.mark.parametrize("name", CASES)
def test_a_slow_machine_finds_the_same(name: str, machine: Callable[[float], None]) -> None:
    machine(FAST)
    fast = solved(name)
    machine(SLOW)
    slow = solved(name)
    assert slow.wall_time > 100 * fast.wall_time
    assert slow.choice.tolist() == fast.choice.tolist()
    assert (slow.bound, slow.status) == (fast.bound, fast.status)
    assert not fast.reached_time_limit
    assert not slow.reached_time_limit


def test_branch_and_bound_ends_after_its_work() -> None:
    ended = solved("branch and bound with too many nodes")
    assert ended.status is SolveStatus.FEASIBLE
    assert -np.inf < ended.bound < ended.objective


def test_a_time_limit_that_ends_a_solve_is_recorded(machine: Callable[[float], None]) -> None:
    machine(SLOW)
    problem, _ = CASES["branch and bound"]
    late = solve_problem(problem, time_limit=40 * SLOW)
    assert late.status in {SolveStatus.FEASIBLE, SolveStatus.TIMED_OUT}
    assert late.reached_time_limit
