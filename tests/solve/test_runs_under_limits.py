"""Runs with a binding usage limit, at one time or at many."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.layered import edge, free_node, layered, with_times

from autoshard.base.outcome import SolveStatus
from autoshard.solve import (
    Problem,
    ProblemNode,
    Repeat,
    Solution,
    WarmStart,
    minimum_usage,
    solve_problem,
)
from autoshard.solve.runs import RunOutcome, find_runs, solve_runs
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.cutting_planes import best_mixture, best_prices
from autoshard.solve.runs.group_master import GroupMaster
from autoshard.solve.runs.usage_prices import UsageWeights
from autoshard.solve.state import SolveState

SHARES = st.sampled_from([0.0, 0.05, 0.2, 0.4, 0.7])


def limited(
    seed: int, share: float, num_layers: int, num_inner: int = 2, num_shared: int = 0
) -> Problem:
    """Layers with a usage limit at many times."""
    plain = layered(seed, num_layers=num_layers, num_inner=num_inner, num_shared=num_shared)
    return with_times(plain, seed, share)


def solved_through_runs(problem: Problem, *, gap: float = 1e-9) -> tuple[RunOutcome, SolveState]:
    """The outcome of runs, and the state they leave."""
    state = SolveState(problem, gap=gap)
    return solve_runs(state), state


@pytest.mark.thorough
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 4),
    num_inner=st.integers(1, 2),
    num_shared=st.integers(0, 1),
    share=SHARES,
)
def test_bounds_and_choices_under_a_limit_at_many_times(
    seed: int, num_layers: int, num_inner: int, num_shared: int, share: float
) -> None:
    problem = limited(seed, share, num_layers, num_inner, num_shared)
    expected = check_bounds_and_choices(problem)
    solution = solve_problem(problem)
    assert solution.status is expected.status
    assert solution.objective == pytest.approx(expected.objective)


def check_bounds_and_choices(problem: Problem) -> Solution:
    """Bounds are true and choices are possible; gives what is right."""
    expected = solve_problem(replace(problem, repeats=()))
    outcome, state = solved_through_runs(problem)
    if outcome is RunOutcome.INFEASIBLE:
        assert expected.status is SolveStatus.INFEASIBLE
        return expected
    assert state.bound <= expected.objective * (1 + 1e-12)
    assert (state.choice is None) or problem.is_feasible(state.choice)
    assert state.objective >= expected.objective - 1e-9
    return expected


def with_twins(problem: Problem) -> Problem:
    """The problem with a second copy of each strategy, which uses more and costs the same."""
    nodes: dict[tuple[int, int], ProblemNode] = {}
    labels: dict[int, NDArray[np.intp]] = {}
    for node in problem.nodes:
        twins = np.tile(node.cost, 2), np.concatenate((node.usage, node.usage + 5.0))
        nodes.setdefault((id(node.cost), id(node.usage)), ProblemNode(*twins))
    for link in problem.edges:
        for ends in (link.rows, link.cols):
            labels.setdefault(id(ends), np.tile(ends, 2))
    twins_of = (nodes[id(node.cost), id(node.usage)] for node in problem.nodes)
    return replace(
        problem,
        nodes=tuple(
            replace(twins, interval=node.interval)
            for twins, node in zip(twins_of, problem.nodes, strict=True)
        ),
        edges=tuple(
            replace(link, rows=labels[id(link.rows)], cols=labels[id(link.cols)])
            for link in problem.edges
        ),
    )


@pytest.mark.thorough
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(3, 5),
    num_shared=st.integers(0, 1),
    share=SHARES,
)
def test_of_choices_that_cost_the_same_one_with_little_usage_is_taken(
    seed: int, num_layers: int, num_shared: int, share: float
) -> None:
    plain = limited(seed, share, num_layers, num_shared=num_shared)
    problem = with_twins(plain)
    expected = check_bounds_and_choices(problem)
    _, state = solved_through_runs(problem)
    if state.choice is None:
        return
    assert expected.status is not SolveStatus.INFEASIBLE
    size = np.array([node.num_strategies for node in plain.nodes])
    is_priced = UsageWeights(problem, find_runs(problem)).everywhere > 0
    assert not (is_priced & (state.choice >= size)).any()


@pytest.mark.long
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(2, 4))
def test_a_warm_start_changes_no_answer(seed: int, num_layers: int) -> None:
    plain, warm_start = layered(seed, num_layers=num_layers, num_inner=1, num_shared=0), WarmStart()
    for share in (0.4, 0.2, 0.0, 0.7):
        problem = with_times(plain, seed, share)
        expected = solve_problem(replace(problem, repeats=()))
        state = SolveState(problem, gap=1e-9, warm_start=warm_start)
        if solve_runs(state) is RunOutcome.INFEASIBLE:
            assert expected.status is SolveStatus.INFEASIBLE
            continue
        assert state.bound <= expected.objective * (1 + 1e-12)
        assert (state.choice is None) or problem.is_feasible(state.choice)
        assert state.objective >= expected.objective - 1e-9
        solution = solve_problem(problem, warm_start=warm_start)
        assert solution.status is expected.status
        assert solution.objective == pytest.approx(expected.objective)


@pytest.mark.thorough
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(2, 4), share=SHARES)
def test_known_choices_change_no_answer(seed: int, num_layers: int, share: float) -> None:
    """A solve that starts from given choices: three at random, and the best one if there is one."""
    problem = limited(seed, share, num_layers, num_inner=1)
    expected = solve_problem(replace(problem, repeats=()))
    rng = np.random.default_rng(seed)
    known = [rng.integers([node.num_strategies for node in problem.nodes]) for _ in range(3)]
    known += [] if expected.choice is None else [expected.choice]
    solution = solve_problem(problem, warm_start=WarmStart(known=known))
    assert solution.status is expected.status
    assert solution.objective == pytest.approx(expected.objective)


@pytest.mark.thorough
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(2, 4), share=SHARES)
def test_a_known_bound_without_the_limit_changes_no_answer(
    seed: int, num_layers: int, share: float
) -> None:
    problem = limited(seed, share, num_layers, num_inner=1)
    expected = solve_problem(replace(problem, repeats=()))
    unlimited = solve_problem(replace(problem, usage_limit=np.inf))
    warm_start = WarmStart(unlimited_bound=unlimited.bound)
    solution = solve_problem(problem, warm_start=warm_start)
    assert solution.status is expected.status
    assert solution.objective == pytest.approx(expected.objective)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.15, 0.4])
def test_many_layers_end_near_the_bound(seed: int, share: float) -> None:
    problem = limited(seed, share, 60)
    outcome, state = solved_through_runs(problem, gap=1e-3)
    assert outcome is RunOutcome.UPDATED
    assert state.choice is not None
    assert problem.is_feasible(state.choice)
    assert state.objective - state.bound <= 0.02 * state.objective


@pytest.mark.thorough
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(2, 4))
def test_the_least_limit_of_layers(seed: int, num_layers: int) -> None:
    problem = limited(seed, 0.0, num_layers, num_shared=1)
    expected = minimum_usage(replace(problem, repeats=()))
    least = minimum_usage(problem)
    assert expected * (1 - 1e-9) <= least <= expected * (1 + 1e-5)
    below = replace(problem, usage_limit=least * (1 - 1e-4) - 1e-9)
    outcome, state = solved_through_runs(below)
    assert outcome is RunOutcome.INFEASIBLE or state.choice is None


@pytest.mark.thorough
@given(seed=st.integers(0, 10**6), share=SHARES)
def test_weighted_usage_is_at_most_the_peak(seed: int, share: float) -> None:
    problem = limited(seed, share, 3, num_shared=1)
    rng = np.random.default_rng(seed)
    usage_weights = UsageWeights(problem, find_runs(problem))
    choices = [
        np.array([int(rng.integers(node.num_strategies)) for node in problem.nodes])
        for _ in range(6)
    ]
    for choice in choices:
        assert usage_weights.over_time(usage_weights.uses(choice)).max() == problem.peak_usage(
            choice
        )
        usage_weights.add(usage_weights.uses(choice))
    for weights in (*usage_weights.weights, usage_weights.everywhere):
        for group, other in zip(*find_runs(problem)[0].instances[:2], strict=True):
            assert weights[group] == weights[other]
        for choice in choices:
            assert weights @ usage_weights.uses(choice) <= problem.peak_usage(choice) * (1 + 1e-12)


@pytest.mark.long
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 4),
    num_shared=st.integers(0, 1),
    share=SHARES,
)
def test_combined_groups_keep_the_limit_and_the_links(
    seed: int, num_layers: int, num_shared: int, share: float
) -> None:
    """Of random choices; nothing better than the optimum, nothing worse than one that fits."""
    problem = limited(seed, share, num_layers, num_shared=num_shared)
    rng, state = np.random.default_rng(seed), SolveState(problem)
    master, fitting = GroupMaster(state), [np.inf]
    for _ in range(12):
        choice = np.array([int(rng.integers(node.num_strategies)) for node in problem.nodes])
        master.add(choice)
        if problem.is_feasible(choice):
            fitting.append(problem.objective(choice))
    master.combine()
    expected = solve_problem(replace(problem, repeats=()))
    assert state.objective >= expected.objective - 1e-9
    if min(fitting) < np.inf:
        assert state.objective <= min(fitting) + 1e-9


@pytest.mark.parametrize("limit", [7.0, 8.0, 11.0])
def test_as_many_groups_as_fit_use_the_cheap_column(limit: float) -> None:
    """Six groups of one node: the cheap strategy takes 2, the expensive one takes 1."""
    problem = chain(6, limit)
    state = SolveState(problem)
    master = GroupMaster(state)
    alternating = np.arange(len(problem.nodes)) % 2
    for choice in (np.zeros_like(alternating), np.ones_like(alternating), alternating):
        master.add(choice)
    master.combine()
    assert state.choice is not None
    assert problem.peak_usage(state.choice) == limit
    assert state.objective == 12 - limit


def test_cuts_meet_where_they_promise_most() -> None:
    """A falling and a rising line meet at price 2, where both promise 3."""
    prices, promised = best_prices(np.array([5.0, 1.0]), np.array([[-1.0], [1.0]]), 100.0)
    assert prices == pytest.approx([2.0])
    assert promised == pytest.approx(3.0)


def test_the_best_mixture_evens_out() -> None:
    assert best_mixture(np.array([[3.0, 0.0], [0.0, 1.0]])) == pytest.approx([0.25, 0.75])


def chain(num_groups: int, limit: float) -> Problem:
    """Groups of one node: of two strategies, the cheap one takes 2 and the expensive one 1."""
    head, node = (
        free_node(np.zeros(2)),
        ProblemNode(np.array([0.0, 1.0]), np.array([2.0, 1.0]), (0, 1)),
    )
    edges = [edge(v, v + 1, np.zeros((2, 2))) for v in range(num_groups + 1)]
    groups = tuple((v,) for v in range(1, num_groups + 1))
    nodes = (head, *[node] * num_groups, free_node(np.zeros(2)))
    return Problem(nodes, tuple(edges), usage_limit=limit, repeats=(Repeat(groups),))


@pytest.mark.parametrize("limit", [7.5, 8.25])
def test_a_group_cannot_be_switched_in_part(limit: float) -> None:
    """Prices alone prove no more than that groups that are switched in part fill the slack."""
    solution = solve_problem(chain(6, limit))
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.objective == 12 - int(limit)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 5),
    num_inner=st.integers(1, 2),
    num_shared=st.integers(0, 1),
)
def test_the_last_group_may_be_priced_otherwise(
    seed: int, num_layers: int, num_inner: int, num_shared: int
) -> None:
    problem = layered(seed, num_layers=num_layers, num_inner=num_inner, num_shared=num_shared)
    rng, costs = np.random.default_rng(seed), [node.cost for node in problem.nodes]
    for v in problem.repeats[0].instances[-1]:
        costs[v] = rng.integers(0, 12, len(costs[v])) / 2
    priced = tuple(replace(node, cost=c) for node, c in zip(problem.nodes, costs, strict=True))
    contracted = ContractedProblem(problem)
    if not contracted.worthwhile:
        return
    answer = contracted.minimise(costs)
    other = replace(problem, nodes=priced, repeats=())
    assert answer is not None
    value, choice = answer
    assert value == pytest.approx(solve_problem(other).objective)
    assert other.objective(choice) == pytest.approx(value)
