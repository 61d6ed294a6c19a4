"""Min-marginals, compared with brute force on problems with a fixed strategy."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.solve import Edge, MinMarginals, Problem, ProblemNode, brute_force


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, size=5)
    nodes = [ProblemNode(rng.random(n), np.rint(9 * rng.random(n)), (0, 1)) for n in sizes]
    edges = []
    for source, target in ((0, 1), (1, 2), (0, 2), (3, 4)):
        cost = rng.random((sizes[source], sizes[target]))
        cost[rng.random(cost.shape) < 0.2] = np.inf
        edges.append(Edge(source, target, cost, np.arange(sizes[source]), np.arange(sizes[target])))
    return Problem(tuple(nodes), tuple(edges))


def forced(problem: Problem, node: int, strategy: int) -> Problem:
    old = problem.nodes[node]
    cost = np.where(np.arange(len(old.cost)) == strategy, old.cost, np.inf)
    nodes = [*problem.nodes]
    nodes[node] = replace(old, cost=cost)
    return replace(problem, nodes=tuple(nodes))


@pytest.mark.parametrize("seed", range(40))
def test_marginals_are_what_forcing_costs(seed: int) -> None:
    problem = random_problem(seed)
    for node in range(len(problem.nodes)):
        marginals = MinMarginals.of(problem, node)
        assert marginals is not None
        for strategy, price in enumerate(marginals.least):
            best = brute_force(forced(problem, node, strategy))
            assert price == pytest.approx(best.objective)
            if np.isfinite(price):
                choice = marginals.choice(strategy)
                assert choice[node] == strategy
                assert problem.objective(choice) == pytest.approx(price)


def test_ties_have_no_marginals() -> None:
    nodes = (ProblemNode(np.zeros(2), np.zeros(2)), ProblemNode(np.ones(2), np.zeros(2)))
    assert MinMarginals.of(Problem(nodes, ties=((0, 1),)), 0) is None
