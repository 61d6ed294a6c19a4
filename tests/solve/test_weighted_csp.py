"""Problems too large for brute force, against toulbar2, a solver of weighted CSPs."""

import numpy as np
import pytest
from support.layered import edge, free_node, layered
from support.weighted_csp import weighted_csp_optimum

from autoshard.base.outcome import SolveStatus
from autoshard.solve import Problem, solve_problem


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_shared", [0, 2])
def test_equal_layers(seed: int, num_shared: int) -> None:
    check(layered(seed, num_layers=30, num_inner=4, num_shared=num_shared, num_strategies=5))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("degree", [3, 4])
def test_wide_networks(seed: int, degree: int) -> None:
    check(random_network(seed, num_nodes=40, degree=degree, num_strategies=4))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_nodes_that_follow_each_other_and_forbidden_pairs(seed: int) -> None:
    problem = random_network(seed, num_nodes=40, degree=3, num_strategies=4, forbidden=0.2)
    ties = tuple((v, v + 20) for v in range(0, 12, 3))
    check(Problem(problem.nodes, problem.edges, ties))


def check(problem: Problem) -> None:
    """The optimum is that of toulbar2, or both find no choice."""
    found = solve_problem(problem, relative_gap=0.0)
    # All costs are multiples of a half.
    expected = weighted_csp_optimum(problem, scale=2)
    if expected is None:
        assert found.status is SolveStatus.INFEASIBLE
        return
    assert found.status is SolveStatus.OPTIMAL
    assert found.objective == expected
    assert found.bound <= expected * (1 + 1e-12)


def random_network(
    seed: int, *, num_nodes: int, degree: int, num_strategies: int, forbidden: float = 0.0
) -> Problem:
    """Nodes in random order, each linked to some later ones; some pairs are forbidden."""
    rng = np.random.default_rng(seed)

    def costs(*shape: int) -> np.ndarray:
        return rng.integers(0, 40, shape) / 2

    nodes = tuple(free_node(costs(num_strategies)) for _ in range(num_nodes))
    pairs = {
        (v, int(w))
        for v in range(num_nodes - 1)
        for w in rng.integers(v + 1, num_nodes, degree // 2 + 1)
    }
    shape = (num_strategies, num_strategies)
    tables = (np.where(rng.random(shape) < forbidden, np.inf, costs(*shape)) for _ in pairs)
    return Problem(
        nodes, tuple(edge(v, w, table) for (v, w), table in zip(sorted(pairs), tables, strict=True))
    )
