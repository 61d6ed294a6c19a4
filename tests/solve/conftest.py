"""Random problems that brute force can still solve."""

from collections.abc import Callable

import numpy as np
import pytest

from autoshard.arrays import FloatArray
from autoshard.solve import Edge, Node, Problem

RandomProblem = Callable[[int], Problem]


@pytest.fixture(scope="session")
def random_problem() -> RandomProblem:
    return _random_problem


@pytest.fixture(scope="session")
def contested_problem() -> RandomProblem:
    return _contested_problem


def _contested_problem(seed: int) -> Problem:
    """Dense, without ties, where cheap strategies use most and the limit allows few of them."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(3, 5, int(rng.integers(5, 8)))]
    nodes = []
    for size in sizes:
        usage = rng.integers(1, 40, size) * 1.0
        first = int(rng.integers(0, 3))
        cost = 8.0 / usage + rng.random(size)
        nodes.append(Node(cost, usage, (first, first + int(rng.integers(1, 4)))))
    edges = []
    for target in range(len(sizes)):
        for source in range(target):
            if rng.random() < 0.7:
                shape = (sizes[source], sizes[target])
                rows, cols = np.arange(shape[0]), np.arange(shape[1])
                edges.append(Edge(source, target, rng.random(shape), rows, cols))
    free = Problem(tuple(nodes), tuple(edges))
    least = free.peak_usage([int(node.usage.argmin()) for node in nodes])
    most = free.peak_usage([int(node.usage.argmax()) for node in nodes])
    return Problem(free.nodes, free.edges, (), least + (most - least) * float(rng.uniform(0, 0.5)))


def _random_problem(seed: int) -> Problem:
    """At most 8 nodes with ties, intervals, parallel edges, infinities and negative prices."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 9))
    sizes = rng.integers(1, 5, num_nodes)
    ties = _random_ties(rng, num_nodes)
    for group in ties:
        sizes[list(group)] = sizes[group[0]]
    nodes = []
    unit, lowest = 10.0 ** rng.integers(-9, 12), (-3.0 if rng.random() < 0.3 else 0.0)
    for size in sizes:
        first = int(rng.integers(0, 6))
        usage = rng.integers(0, 9, size) * float(rng.choice([1, 1, 10**9 + 7]))
        interval = (first, first + int(rng.integers(0, 6)))
        nodes.append(Node(_prices(rng, (int(size),), unit, lowest), usage, interval))
    edges = []
    for _ in range(int(rng.integers(0, 3 * num_nodes)) if num_nodes > 1 else 0):
        source, target = (int(v) for v in rng.choice(num_nodes, 2, replace=False))
        num_rows, num_cols = (int(n) for n in rng.integers(1, 5, 2))
        rows = rng.integers(0, num_rows, sizes[source])
        cols = rng.integers(0, num_cols, sizes[target])
        cost = _prices(rng, (num_rows, num_cols), unit, lowest)
        edges.append(Edge(source, target, cost, rows, cols))
    free = Problem(tuple(nodes), tuple(edges), ties)
    if rng.random() < 0.3:
        return free
    least = free.peak_usage([int(node.usage.argmin()) for node in nodes])
    most = free.peak_usage([int(node.usage.argmax()) for node in nodes])
    limit = least + (most - least) * float(rng.random()) ** 2 - (rng.random() < 0.05)
    return Problem(free.nodes, free.edges, free.ties, max(limit, 0.0))


def _random_ties(rng: np.random.Generator, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    order = [int(v) for v in rng.permutation(num_nodes)]
    if num_nodes < 3 or rng.random() < 0.5:
        return ()
    return (tuple(order[:2]),) if num_nodes < 6 else (tuple(order[:3]), tuple(order[3:5]))


def _prices(
    rng: np.random.Generator, shape: tuple[int, ...], unit: float, lowest: float
) -> FloatArray:
    """Prices in some unit, whole numbers half of the time so that ties in price happen."""
    prices = rng.uniform(lowest, 9.0, shape)
    if rng.random() < 0.5:
        prices = np.rint(prices)
    forbidden = rng.random(shape) < rng.choice([0.0, 0.0, 0.15])
    return np.where(forbidden, np.inf, prices * unit)
