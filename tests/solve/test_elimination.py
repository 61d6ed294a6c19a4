from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.base.arrays import FloatArray
from autoshard.solve import Edge, MinMarginals, Problem, ProblemNode, SolverSettings, brute_force
from autoshard.solve.bounds.elimination import Elimination
from autoshard.solve.network import Network
from autoshard.solve.presolve import MergeTies
from autoshard.solve.settings import Effort

RandomProblem = Callable[[int], Problem]


def compiled(problem: Problem) -> tuple[Network, Elimination, dict[int, FloatArray]]:
    network = Network.from_problem(problem, limited=False)
    MergeTies().apply(network)
    plan = Elimination.compile(network)
    assert plan is not None
    return network, plan, {v: x.cost for v, x in network.variables.items()}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_elimination_finds_what_brute_force_finds(random_problem: RandomProblem, seed: int) -> None:
    base = random_problem(seed)
    problem = Problem(base.nodes, base.edges, base.ties)
    network, plan, costs = compiled(problem)
    result = plan.evaluate(costs)
    truth = brute_force(problem)
    assert result.value == pytest.approx(truth.objective, rel=1e-9, abs=1e-9)
    if truth.choice is not None:
        assert network.price(result.picks) == pytest.approx(result.value, rel=1e-9, abs=1e-9)


def test_forbidden_strategies_have_infinite_min_marginals() -> None:
    same = np.where(np.eye(3) > 0, 0.0, np.inf)
    index = np.arange(3)
    nodes = (
        ProblemNode(np.array([np.inf, 1.0, 2.0]), np.zeros(3)),
        ProblemNode(np.zeros(3), np.zeros(3)),
    )
    problem = Problem(nodes, (Edge(0, 1, same, index, index),))
    for node in (0, 1):
        marginals = MinMarginals.of(problem, node)
        assert marginals is not None
        assert marginals.least.tolist() == [np.inf, 1.0, 2.0]


def test_tables_are_over_layouts_not_strategies() -> None:
    """A clique of three with 100 strategies in 4 layouts needs a table of 4 x 4 only."""
    rng = np.random.default_rng(3)
    nodes = tuple(ProblemNode(rng.random(100), np.zeros(100)) for _ in range(3))
    shown = [rng.integers(0, 4, 100) for _ in range(3)]
    edges = tuple(
        Edge(u, v, rng.random((4, 4)), shown[u], shown[v]) for u, v in ((0, 1), (1, 2), (0, 2))
    )
    _, plan, _ = compiled(Problem(nodes, edges))
    assert plan.entries <= 4 * 4 + 4 + 1


def test_a_wide_network_is_refused() -> None:
    rng = np.random.default_rng(1)
    nodes = tuple(ProblemNode(rng.random(9), np.zeros(9)) for _ in range(6))
    index = np.arange(9)
    edges = tuple(Edge(u, v, rng.random((9, 9)), index, index) for v in range(6) for u in range(v))
    network = Network.from_problem(Problem(nodes, edges))
    assert Elimination.compile(network, most_work=1000) is None
    small = Effort(SolverSettings(max_table_entries=100))
    assert Elimination.compile(network, effort=small) is None
