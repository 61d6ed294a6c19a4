"""Components of groups, found from forbidden pairs; solutions equal those without components."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layered import free_node, layered, with_modes

from autoshard.base.outcome import SolveStatus
from autoshard.solve import Edge, Problem, brute_force, solve_problem
from autoshard.solve.runs import RunOutcome, find_runs, solve_runs
from autoshard.solve.runs.block_table import RunBlock, find_components
from autoshard.solve.state import SolveState


def moded(seed: int, *, num_layers: int, num_components: int = 2, num_shared: int = 1) -> Problem:
    plain = layered(seed, num_layers=num_layers, num_inner=3, num_shared=num_shared)
    return with_modes(plain, seed, num_components)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 4),
    num_components=st.integers(2, 3),
    num_shared=st.integers(0, 1),
)
def test_modes_give_the_optimum(
    seed: int, num_layers: int, num_components: int, num_shared: int
) -> None:
    problem = moded(
        seed, num_layers=num_layers, num_components=num_components, num_shared=num_shared
    )
    expected = solve_problem(replace(problem, repeats=()))
    state = SolveState(problem, gap=1e-9)
    assert solve_runs(state) is RunOutcome.UPDATED
    assert state.closed
    assert state.objective == pytest.approx(expected.objective)


def test_modes_agree_with_trying_everything() -> None:
    plain = layered(5, num_layers=2, num_inner=2, num_shared=0, num_strategies=2)
    problem = with_modes(plain, 5, 2)
    assert solve_problem(problem).objective == pytest.approx(brute_force(problem).objective)


@pytest.mark.parametrize("num_components", [2, 3])
def test_modes_are_found(num_components: int) -> None:
    problem = moded(3, num_layers=3, num_components=num_components)
    (run,) = find_runs(problem)
    components = RunBlock(problem, run, None).components
    assert len(components) == num_components
    group = run.instances[1]
    assert len(components[0]) >= 2
    for v in components[0]:
        assert (np.sum([component[v] for component in components], axis=0) == 1).all()
    assert all(group[-1] not in component for component in components)


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
    components = find_components(problem, range(4), edges)
    for flat in range(3**4):
        choice = np.unravel_index(flat, (3,) * 4)
        if np.isfinite(problem.objective(choice)):
            assert any(all(s[choice[v]] for v, s in component.items()) for component in components)


def test_free_links_have_no_modes() -> None:
    problem = layered(1, num_layers=3, num_inner=3, num_shared=1)
    (run,) = find_runs(problem)
    assert RunBlock(problem, run, None).components == ({},)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_modes_under_a_limit(seed: int, share: float) -> None:
    """One component uses more, the other costs more: the best choice mixes groups of both."""
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
