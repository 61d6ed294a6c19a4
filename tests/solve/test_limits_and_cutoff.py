"""Further usage limits, usage of edges and the cut-off, compared with brute force."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoshard.base.outcome import SolveStatus
from autoshard.errors import ProblemError
from autoshard.solve import (
    Edge,
    Problem,
    ProblemNode,
    ShortestPathCost,
    SolverSettings,
    UsageLimit,
    brute_force,
    solve_problem,
)

ROUTES = {
    "everything": SolverSettings(),
    "no products": SolverSettings(max_product_work=0.0),
    "messages": SolverSettings(max_product_work=0.0, large_entries=0),
}
NUM_SEEDS = 60


def drawn(seed: int) -> Problem:
    """A problem with up to three limited resources, usage of edges, and a cut-off in half."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, int(rng.integers(2, 7)))
    horizon = 5

    def interval() -> tuple[int, int]:
        first = int(rng.integers(0, horizon))
        return first, first + int(rng.integers(0, horizon))

    nodes = [
        ProblemNode(
            rng.integers(0, 9, n).astype(float), rng.integers(0, 9, n).astype(float), interval()
        )
        for n in sizes
    ]
    edges = []
    for _ in range(int(rng.integers(1, 2 * len(sizes)))):
        source, target = (int(v) for v in rng.choice(len(sizes), 2, replace=False))
        shape = rng.integers(1, 4, 2)
        prices = np.where(rng.random(shape) < 0.1, np.inf, rng.integers(-2, 9, shape))
        rows, cols = (
            rng.integers(0, shape[0], sizes[source]),
            rng.integers(0, shape[1], sizes[target]),
        )
        uses = rng.random() < 0.5
        usage = rng.integers(0, 9, shape).astype(float) if uses else None
        edges.append(Edge(source, target, prices, rows, cols, usage, interval()))
    free = Problem(tuple(nodes), tuple(edges))
    further = tuple(_limit(rng, free) for _ in range(int(rng.integers(0, 3))))
    problem = replace(free, usage_limit=_between(rng, free, free.resources[0]))
    problem = replace(problem, further_limits=further)
    best = brute_force(problem).objective
    if np.isinf(best) or rng.random() < 0.5:
        return problem
    return replace(problem, cutoff=best + float(rng.choice([-1.0, -1e-3, 0.0, 1e-3, 2.0])))


def _limit(rng: np.random.Generator, free: Problem) -> UsageLimit:
    """A limit on another resource, used by some nodes and edges."""
    named = rng.permutation(len(free.nodes))[: int(rng.integers(1, len(free.nodes) + 1))]
    nodes = {int(v): np.floor(rng.random(free.nodes[v].num_strategies) * 99) for v in named}
    edges = {
        i: np.floor(rng.random(edge.cost.shape) * 99)
        for i, edge in enumerate(free.edges)
        if rng.random() < 0.3
    }
    limit = UsageLimit(np.inf, nodes, edges)
    return replace(limit, limit=_between(rng, free, limit))


def _between(rng: np.random.Generator, free: Problem, limit: UsageLimit) -> float:
    """A limit around the peaks of random choices."""
    limited = replace(free, further_limits=(limit,))
    sizes = [node.num_strategies for node in free.nodes]
    peaks = [float(limited.peaks(rng.integers(0, sizes))[1]) for _ in range(8)]
    return min(peaks) + (max(peaks) - min(peaks)) * float(rng.random()) - float(rng.random() < 0.1)


@pytest.mark.parametrize("route", ROUTES)
def test_random_problems_equal_brute_force(route: str) -> None:
    statuses = set()
    for seed in range(NUM_SEEDS):
        problem = drawn(seed)
        truth = brute_force(problem)
        found = solve_problem(problem, settings=ROUTES[route])
        statuses.add((found.status, bool(problem.further_limits), np.isfinite(problem.cutoff)))
        assert found.status is truth.status, seed
        if truth.choice is None:
            assert found.choice is None
            continue
        assert found.choice is not None
        assert problem.is_feasible(found.choice), seed
        assert found.objective == pytest.approx(truth.objective, abs=1e-5), seed
        assert found.bound <= truth.objective + 1e-9, seed
    assert len(statuses) == 8, "both statuses, with and without further limits and a cut-off"


def test_the_integer_program_equals_brute_force() -> None:
    for seed in range(25):
        problem = drawn(seed)
        truth = brute_force(problem)
        for found in (solve_problem(problem, solver=s) for s in ("HIGHS", "ilp")):
            assert found.status is truth.status, seed
            if truth.choice is not None:
                assert found.objective == pytest.approx(truth.objective, abs=1e-5), seed


def _pair(**fields: Any) -> Problem:
    """Two nodes; equal strategies cost nothing on their edge."""
    nodes = tuple(ProblemNode(np.array([1.0, 3.0]), np.array([4.0, 1.0]), (0, 2)) for _ in range(2))
    index = np.arange(2)
    edge = Edge(0, 1, 9.0 * (1 - np.eye(2)), index, index, np.full((2, 2), 2.0), (1, 2))
    return replace(Problem(nodes, (edge,)), **fields)


def test_usage_of_an_edge_counts_while_it_is_alive() -> None:
    problem = _pair(usage_limit=10.0)
    assert problem.peak_usage([0, 0]) == 10.0
    assert problem.is_feasible([0, 0])
    assert not replace(problem, usage_limit=9.0).is_feasible([0, 0])
    cheapest = solve_problem(problem)
    assert cheapest.choice is not None
    assert cheapest.choice.tolist() == [0, 0]
    smaller = solve_problem(replace(problem, usage_limit=9.0))
    assert smaller.choice is not None
    assert smaller.choice.tolist() == [1, 1]
    none = solve_problem(replace(problem, usage_limit=3.0))
    assert none.status is SolveStatus.INFEASIBLE
    assert none.statistics["minimum_usage"] == 4.0


def test_a_cutoff_below_the_optimum_is_infeasible() -> None:
    assert solve_problem(_pair(cutoff=2.0)).objective == 2.0
    below = solve_problem(_pair(cutoff=1.9))
    assert below.status is SolveStatus.INFEASIBLE
    assert below.choice is None
    assert below.bound == np.inf


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"cutoff": np.nan}, "cutoff is NaN"),
        ({"further_limits": (UsageLimit(np.nan, {}),)}, "further limit 0 is NaN"),
        ({"further_limits": (UsageLimit(1.0, {2: np.zeros(2)}),)}, "node 2, which does not"),
        ({"further_limits": (UsageLimit(1.0, {0: np.zeros(3)}),)}, "2 strategies of node 0"),
        ({"further_limits": (UsageLimit(1.0, {}, {1: np.zeros((2, 2))}),)}, "edge 1, which"),
        ({"further_limits": (UsageLimit(1.0, {}, {0: np.zeros((2, 1))}),)}, "usage of shape"),
        ({"edges": (replace(_pair().edges[0], usage=-np.ones((2, 2))),)}, "negative or NaN usage"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ProblemError, match=match):
        _pair(**fields)


def test_path_costs_have_one_limit_on_nodes() -> None:
    index = np.arange(2)
    paths = ShortestPathCost(2, index, index[::-1], np.ones(2))
    edge = Edge(0, 1, paths, index, index)
    problem = replace(_pair(edges=(edge,)), further_limits=(UsageLimit(9.0, {0: np.ones(2)}),))
    with pytest.raises(ProblemError, match=r"ShortestPathCost\.dense"):
        solve_problem(problem)
    with pytest.raises(ProblemError, match=r"ShortestPathCost\.dense"):
        _pair(edges=(replace(edge, usage=np.zeros((2, 2))),))
