"""Runs of equal groups: run contraction gives the solutions of a solve without hints."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layered import free_node, layered

from autoshard.base.outcome import SolveStatus
from autoshard.solve import Problem, ProblemNode, Repeat, SolverSettings, brute_force, solve_problem
from autoshard.solve.runs import RunOutcome, find_runs, solve_runs
from autoshard.solve.runs.run_tables import batched_min_plus, cheapest_path, power
from autoshard.solve.state import SolveState


def through_runs(problem: Problem, settings: SolverSettings | None = None) -> SolveState:
    state = SolveState(problem, gap=1e-9, settings=settings)
    assert solve_runs(state) is RunOutcome.UPDATED
    return state


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 4),
    num_inner=st.integers(1, 2),
    num_shared=st.integers(0, 2),
)
def test_runs_give_the_optimum(seed: int, num_layers: int, num_inner: int, num_shared: int) -> None:
    problem = layered(seed, num_layers=num_layers, num_inner=num_inner, num_shared=num_shared)
    plain = replace(problem, repeats=())
    expected = solve_problem(plain).objective
    state = through_runs(problem)
    assert state.closed
    assert state.choice is not None
    assert plain.objective(state.choice) == pytest.approx(expected)
    assert state.bound <= expected + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_runs_agree_with_trying_everything(seed: int) -> None:
    problem = layered(seed, num_layers=3, num_inner=2, num_shared=1, num_strategies=2)
    solution = solve_problem(problem)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.objective == pytest.approx(brute_force(problem).objective)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(6))
def test_shared_nodes_that_make_tables_too_large_are_relaxed(seed: int) -> None:
    """Without axes for shared nodes, runs give a bound and a choice; the rest of it the optimum."""
    problem = layered(seed, num_layers=4, num_inner=3, num_shared=2, num_strategies=4)
    plain = replace(problem, repeats=())
    expected = solve_problem(plain).objective
    settings = SolverSettings(max_group_work=0.0)
    state = through_runs(problem, settings=settings)
    assert state.choice is not None
    assert state.bound <= expected + 1e-9
    assert plain.objective(state.choice) == pytest.approx(state.objective)
    solution = solve_problem(problem, settings=settings)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.objective == pytest.approx(expected)


def with_usage(problem: Problem, seed: int, share: float) -> Problem:
    """Usage at every node, and a limit at a share of the way from the least to the most."""
    rng = np.random.default_rng(seed)
    usage: dict[bytes, np.ndarray] = {}
    nodes = []
    for node in problem.nodes:
        key = node.cost.tobytes()
        if key not in usage:
            usage[key] = rng.integers(0, 6, len(node.cost)).astype(float)
        nodes.append(ProblemNode(node.cost, usage[key], (0, 1)))
    least = sum(float(node.usage.min()) for node in nodes)
    most = sum(float(node.usage.max()) for node in nodes)
    limit = least + share * (most - least)
    return replace(problem, nodes=tuple(nodes), usage_limit=limit)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_limit_over_runs_gives_the_optimum(seed: int, share: float) -> None:
    problem = layered(seed, num_layers=3, num_inner=1, num_shared=1)
    limited = with_usage(problem, seed, share)
    expected = solve_problem(replace(limited, repeats=()))
    solution = solve_problem(limited)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.objective == pytest.approx(expected.objective)
    assert limited.is_feasible(solution.choice)


@pytest.mark.parametrize("seed", range(6))
def test_a_limit_that_nothing_keeps_is_infeasible(seed: int) -> None:
    problem = layered(seed, num_layers=3, num_inner=1, num_shared=1)
    limited = with_usage(problem, seed, -0.01)
    limited = replace(limited, usage_limit=max(limited.usage_limit - 0.5, 0.0))
    solution = solve_problem(limited)
    expected = solve_problem(replace(limited, repeats=()))
    assert solution.status is expected.status
    if solution.status is SolveStatus.INFEASIBLE:
        least = solution.statistics["minimum_usage"]
        assert solve_problem(replace(limited, usage_limit=least)).status is SolveStatus.OPTIMAL
        assert (
            solve_problem(replace(limited, usage_limit=least - 0.5)).status
            is SolveStatus.INFEASIBLE
        )


def test_many_layers_end_close_to_the_limit() -> None:
    problem = with_usage(layered(4, num_layers=40, num_inner=2, num_shared=1), 4, 0.35)
    state = SolveState(problem, gap=1e-9)
    assert solve_runs(state) is RunOutcome.UPDATED
    assert state.choice is not None
    assert problem.is_feasible(state.choice)
    assert state.objective - state.bound <= 0.02 * state.objective


@pytest.mark.long
def test_depth_costs_little() -> None:
    """The tables of 300 layers are those of 3."""
    few, many = (layered(1, num_layers=n, num_inner=2, num_shared=1) for n in (3, 300))
    assert len(find_runs(many)[0].instances) == 300
    assert find_runs(many)[0].shared_nodes == find_runs(few)[0].shared_nodes
    plain = solve_problem(replace(many, repeats=()))
    assert solve_problem(many).objective == pytest.approx(plain.objective)


def test_a_layer_that_differs_ends_the_run() -> None:
    problem = layered(2, num_layers=6, num_inner=2, num_shared=0)
    odd = problem.repeats[0].instances[3][0]
    nodes = list(problem.nodes)
    nodes[odd] = free_node(nodes[odd].cost + np.array([5.0, 0.0, 1.0]))
    changed = replace(problem, nodes=tuple(nodes))
    lengths = [len(run.instances) for run in find_runs(changed)]
    assert max(lengths) <= 3
    expected = solve_problem(replace(changed, repeats=())).objective
    assert solve_problem(changed).objective == pytest.approx(expected)


@pytest.mark.parametrize(
    "instances",
    [((1, 2), (2, 3)), ((0,), (1,)), ((1, 2), (3,)), ((1,), (1,))],
    ids=["overlapping", "unlike", "of different sizes", "twice the same"],
)
def test_a_wrong_hint_changes_no_answer(instances: Sequence[tuple[int, ...]]) -> None:
    problem = layered(3, num_layers=3, num_inner=1, num_shared=1)
    hinted = replace(problem, repeats=(Repeat(tuple(instances)),))
    expected = solve_problem(replace(problem, repeats=())).objective
    assert solve_problem(hinted).objective == pytest.approx(expected)


@given(seed=st.integers(0, 10**6), exponent=st.integers(1, 9))
def test_powers_are_repeated_products(seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    matrices = rng.integers(0, 9, (2, 3, 3)).astype(float)
    expected = matrices
    for _ in range(exponent - 1):
        expected = batched_min_plus(expected, matrices)
    assert np.array_equal(power(matrices, exponent, batched_min_plus), expected)


@given(seed=st.integers(0, 10**6), length=st.integers(1, 6))
def test_the_cheapest_path_has_the_price_of_the_power(seed: int, length: int) -> None:
    matrix = np.random.default_rng(seed).integers(0, 9, (4, 4)).astype(float)
    path = cheapest_path([matrix] * length, 0, 3)
    assert (path[0], path[-1], len(path)) == (0, 3, length + 1)
    price = sum(matrix[a, b] for a, b in pairwise(path))
    assert price == power(matrix[None], length, batched_min_plus)[0, 0, 3]
