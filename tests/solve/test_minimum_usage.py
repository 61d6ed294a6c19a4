import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.base.outcome import SolveStatus
from autoshard.errors import ProblemError
from autoshard.solve import Edge, Problem, ProblemNode, brute_force, minimum_usage

RandomProblem = Callable[[int], Problem]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_minimum_usage_is_the_least_limit_that_works(
    random_problem: RandomProblem, seed: int
) -> None:
    base = random_problem(seed)
    least = minimum_usage(base)
    if np.isinf(least):
        assert brute_force(Problem(base.nodes, base.edges, base.ties)).choice is None
        return
    assert brute_force(Problem(base.nodes, base.edges, base.ties, least)).choice is not None
    if least > 0:
        below = Problem(base.nodes, base.edges, base.ties, least * (1 - 1e-6))
        assert brute_force(below).status is SolveStatus.INFEASIBLE


def test_a_forbidden_pair_raises_the_minimum_usage() -> None:
    node = ProblemNode(np.zeros(2), np.array([1.0, 4.0]), (0, 1))
    index = np.arange(2)
    differ = np.where(np.eye(2) > 0, np.inf, 0.0)
    assert minimum_usage(Problem((node, node))) == 2.0
    assert minimum_usage(Problem((node, node), (Edge(0, 1, differ, index, index),))) == 5.0


def test_ties_over_several_times_are_weighed_against_each_other() -> None:
    """One strategy is light early, the other late; the tie needs the smaller of the peaks."""
    early = ProblemNode(np.zeros(3), np.array([1.0, 9.0, 5.0]), (0, 1))
    late = ProblemNode(np.zeros(3), np.array([9.0, 1.0, 6.0]), (1, 2))
    assert minimum_usage(Problem((early, late))) == 1.0
    assert minimum_usage(Problem((early, late), (), ((0, 1),))) == 6.0


def test_a_cancelled_search_for_the_minimum_knows_nothing() -> None:
    cancel = threading.Event()
    cancel.set()
    node = ProblemNode(np.zeros(2), np.array([1.0, 4.0]), (0, 1))
    assert minimum_usage(Problem((node,)), cancel=cancel) == np.inf


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_peaks_are_only_looked_for_where_they_can_be(
    random_problem: RandomProblem, seed: int
) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(node.num_strategies)) for node in problem.nodes]
    peak = 0.0
    for time in range(12):
        alive = [i for i, n in enumerate(problem.nodes) if n.interval[0] <= time < n.interval[1]]
        peak = max(peak, sum(problem.nodes[i].usage[choice[i]] for i in alive))
    assert problem.peak_usage(choice) == pytest.approx(peak, rel=1e-12, abs=1e-12)
    first, last = problem.peak_spans.T
    times = range(len(problem.peak_times))
    live_sets = [set(np.flatnonzero((first <= t) & (t < last)).tolist()) for t in times]
    assert not any(alive < other for alive in live_sets for other in live_sets)


@pytest.mark.parametrize(
    ("cost", "usage", "message"),
    [
        ([1.0], [-1.0], "negative usage"),
        ([1.0], [0.5], "whole number"),
        ([-np.inf], [1.0], "-inf"),
        ([np.nan], [1.0], "NaN"),
        ([1.0, 2.0], [1.0], "2 costs"),
        ([], [], "no strategies"),
    ],
)
def test_a_malformed_node_is_refused_by_name(
    cost: list[float], usage: list[float], message: str
) -> None:
    with pytest.raises(ProblemError, match=message) as raised:
        Problem((ProblemNode(np.array(cost), np.array(usage), (0, 1), "wq"),))
    assert "wq" in str(raised.value)


def test_usage_that_cannot_be_summed_exactly_is_refused() -> None:
    node = ProblemNode(np.zeros(2), np.array([2.0**52, 0.0]), (0, 1))
    with pytest.raises(ProblemError, match="count usage in larger units"):
        Problem((node, node), usage_limit=2.0**52)
    apart = replace(node, interval=(1, 2))
    assert Problem((node, apart), usage_limit=2.0**52).is_feasible((0, 0))
    assert Problem((node, node)).is_feasible((0, 0))
