"""Modes of groups: found from forbidden pairs, and the same answers as without them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layered import free_node, layered, with_modes

from autoshard.outcome import SolveStatus
from autoshard.solve import Edge, Problem, brute_force, solve_problem
from autoshard.solve.runs import RunOutcome, find_runs, solve_runs
from autoshard.solve.runs.block_table import RunBlock, find_modes
from autoshard.solve.state import SolveState


def moded(seed: int, *, num_layers: int, num_modes: int = 2, num_hubs: int = 1) -> Problem:
    plain = layered(seed, num_layers=num_layers, num_inner=3, num_hubs=num_hubs)
    return with_modes(plain, seed, num_modes)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 4),
    num_modes=st.integers(2, 3),
    num_hubs=st.integers(0, 1),
)
def test_modes_give_the_optimum(seed: int, num_layers: int, num_modes: int, num_hubs: int) -> None:
    problem = moded(seed, num_layers=num_layers, num_modes=num_modes, num_hubs=num_hubs)
    expected = solve_problem(replace(problem, repeats=()))
    state = SolveState(problem, gap=1e-9)
    assert solve_runs(state) is RunOutcome.UPDATED
    assert state.closed
    assert state.objective == pytest.approx(expected.objective)


def test_modes_agree_with_trying_everything() -> None:
    plain = layered(5, num_layers=2, num_inner=2, num_hubs=0, num_strategies=2)
    problem = with_modes(plain, 5, 2)
    assert solve_problem(problem).objective == pytest.approx(brute_force(problem).objective)


@pytest.mark.parametrize("num_modes", [2, 3])
def test_modes_are_found(num_modes: int) -> None:
    problem = moded(3, num_layers=3, num_modes=num_modes)
    (run,) = find_runs(problem)
    modes = RunBlock(problem, run, None).modes
    assert len(modes) == num_modes
    group = run.instances[1]
    assert len(modes[0]) >= 2
    for v in modes[0]:
        taken = np.concatenate([mode[v] for mode in modes])
        assert sorted(taken) == list(range(problem.nodes[v].num_strategies))
    assert all(group[-1] not in mode for mode in modes)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), forbidden=st.floats(0.2, 0.8))
def test_every_allowed_choice_keeps_to_one_mode(seed: int, forbidden: float) -> None:
    """Random forbidden pairs: whatever is found, no choice of finite price is lost."""
    rng = np.random.default_rng(seed)
    nodes = tuple(free_node(np.zeros(3)) for _ in range(4))
    index = np.arange(3)
    edges = tuple(
        Edge(i, j, np.where(rng.random((3, 3)) < forbidden, np.inf, 0.0), index, index)
        for i, j in ((0, 1), (1, 2), (0, 2), (2, 3))
    )
    problem = Problem(nodes, edges)
    modes = find_modes(problem, range(4), edges)
    for flat in range(3**4):
        choice = np.unravel_index(flat, (3,) * 4)
        if np.isfinite(problem.objective(choice)):
            assert any(all(choice[v] in s for v, s in mode.items()) for mode in modes)


def test_free_links_have_no_modes() -> None:
    problem = layered(1, num_layers=3, num_inner=3, num_hubs=1)
    (run,) = find_runs(problem)
    assert RunBlock(problem, run, None).modes == ({},)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_modes_under_a_limit(seed: int, share: float) -> None:
    """One mode takes more, the other costs more: groups differ in mode where that fits best."""
    problem = moded(seed, num_layers=3)
    nodes = tuple(replace(node, interval=(0, 1)) for node in problem.nodes)
    least = sum(float(node.usage.min()) for node in nodes)
    most = sum(float(node.usage.max()) for node in nodes)
    problem = replace(problem, nodes=nodes, usage_limit=least + share * (most - least))
    expected = solve_problem(replace(problem, repeats=()))
    solution = solve_problem(problem)
    assert solution.status is expected.status
    assert solution.status in {SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE}
    assert solution.objective == pytest.approx(expected.objective)
