"""Random problems of several families, drawn from seeds, small enough to enumerate."""

from collections.abc import Callable

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.solve import Edge, Problem, ProblemNode
from benchmarks.random_runs import draw_runs

_MOST_TIED = 3


def draw(seed: int) -> tuple[str, Problem]:
    """The problem of a seed, with the name of its family."""
    rng = np.random.default_rng(seed)
    family = str(rng.choice(list(_SHARES), p=list(_SHARES.values())))
    return family, _MAKERS[family](rng)


def mixed(rng: np.random.Generator) -> Problem:
    """At most 8 nodes with ties, intervals, parallel edges, infinities and negative prices."""
    num_nodes = int(rng.integers(1, 9))
    sizes = rng.integers(1, 5, num_nodes)
    ties = _ties(rng, num_nodes)
    for group in ties:
        sizes[list(group)] = sizes[group[0]]
    unit, lowest = float(10.0 ** rng.integers(-9, 12)), (-3.0 if _chance(rng, 0.3) else 0.0)
    nodes = [
        ProblemNode(_prices(rng, (int(n),), unit, lowest), _usage(rng, int(n)), _interval(rng, 6))
        for n in sizes
    ]
    edges = []
    for _ in range(int(rng.integers(0, 3 * num_nodes)) if num_nodes > 1 else 0):
        source, target = (int(v) for v in rng.choice(num_nodes, 2, replace=False))
        num_rows, num_cols = (int(n) for n in rng.integers(1, 5, 2))
        rows = rng.integers(0, num_rows, sizes[source])
        cols = rng.integers(0, num_cols, sizes[target])
        cost = _prices(rng, (num_rows, num_cols), unit, lowest)
        edges.append(Edge(source, target, cost, rows, cols))
    return _limited(rng, Problem(tuple(nodes), tuple(edges), ties), always=False)


def contested(rng: np.random.Generator) -> Problem:
    """Dense, without ties; cheap strategies use most, and the limit allows few of them."""
    sizes = [int(n) for n in rng.integers(3, 5, int(rng.integers(5, 8)))]
    nodes = []
    for size in sizes:
        usage = rng.integers(1, 40, size).astype(np.float64)
        nodes.append(ProblemNode(8.0 / usage + rng.random(size), usage, _interval(rng, 4)))
    edges = [
        _dense(rng, source, target, sizes)
        for target in range(len(sizes))
        for source in range(target)
        if _chance(rng, 0.7)
    ]
    return _limited(rng, Problem(tuple(nodes), tuple(edges)), always=True)


def _layered(rng: np.random.Generator) -> Problem:
    """Equal layers around a shared node under one limit: symmetric, with many equal optima."""
    num_layers, size = int(rng.integers(2, 7)), int(rng.integers(2, 4))
    step, spoke = rng.random((size, size)), rng.random((size, size))
    usage = rng.integers(1, 9, size).astype(np.float64)
    layer = ProblemNode(4.0 / usage, usage, (0, 1))
    shared_node = ProblemNode(rng.random(size), np.zeros(size))
    index = np.arange(size)
    edges = [Edge(0, i, spoke, index, index) for i in range(1, num_layers + 1)]
    edges += [Edge(i, i + 1, step, index, index) for i in range(1, num_layers)]
    return _limited(rng, Problem((shared_node, *[layer] * num_layers), tuple(edges)), always=True)


def _followers(rng: np.random.Generator) -> Problem:
    """Chains in which a strategy determines that of the next node, as aliases do, with prices."""
    num_nodes = int(rng.integers(3, 9))
    sizes = [int(n) for n in rng.integers(2, 5, num_nodes)]
    edges = []
    for target in range(1, num_nodes):
        source = int(rng.integers(0, target))
        edge = _dense(rng, source, target, sizes)
        if _chance(rng, 0.6):
            image = rng.integers(0, sizes[target], sizes[source])
            if sizes[source] == sizes[target]:
                image = rng.permutation(sizes[source])
            cost = np.full(edge.cost.shape, np.inf)
            cost[np.arange(sizes[source]), image] = edge.cost[np.arange(sizes[source]), image]
            edge = Edge(source, target, cost, edge.rows, edge.cols)
        edges.append(edge)
    nodes = [ProblemNode(rng.random(n) * 9, _usage(rng, n), _interval(rng, 4)) for n in sizes]
    return _limited(rng, Problem(tuple(nodes), tuple(edges)), always=False)


def _chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def _dense(rng: np.random.Generator, source: int, target: int, sizes: list[int]) -> Edge:
    shape = (sizes[source], sizes[target])
    return Edge(source, target, rng.random(shape), np.arange(shape[0]), np.arange(shape[1]))


def _limited(rng: np.random.Generator, free: Problem, *, always: bool) -> Problem:
    """The problem with a limit between the least and the largest peak, or a bit below."""
    if not always and _chance(rng, 0.3):
        return free
    least = free.peak_usage([int(node.usage.argmin()) for node in free.nodes])
    most = free.peak_usage([int(node.usage.argmax()) for node in free.nodes])
    limit = least + (most - least) * float(rng.random()) ** 2 - (_chance(rng, 0.05))
    return Problem(free.nodes, free.edges, free.ties, max(limit, 0.0))


def _ties(rng: np.random.Generator, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    order = [int(v) for v in rng.permutation(num_nodes)]
    if num_nodes < _MOST_TIED or _chance(rng, 0.5):
        return ()
    return (
        (tuple(order[:2]),) if num_nodes < 2 * _MOST_TIED else (tuple(order[:3]), tuple(order[3:5]))
    )


def _interval(rng: np.random.Generator, horizon: int) -> tuple[int, int]:
    first = int(rng.integers(0, horizon))
    return first, first + int(rng.integers(0, horizon))


def _usage(rng: np.random.Generator, size: int) -> FloatArray:
    """Usage with sums far apart, or in bytes, with sums that differ in the last digits only."""
    usage = rng.integers(0, 9, size).astype(np.float64)
    if _chance(rng, 0.3):
        usage = usage * 2.0**34 + rng.integers(0, 9, size)
    return usage


def _prices(
    rng: np.random.Generator, shape: tuple[int, ...], unit: float, lowest: float
) -> FloatArray:
    """Random prices in a unit; half of the time integers, so that equal prices occur."""
    prices = rng.uniform(lowest, 9.0, shape)
    if _chance(rng, 0.5):
        prices = np.rint(prices)
    forbidden = rng.random(shape) < rng.choice([0.0, 0.0, 0.15])
    priced: FloatArray = np.where(forbidden, np.inf, prices * unit)
    return priced


_SHARES = {"mixed": 0.25, "contested": 0.1, "layered": 0.05, "followers": 0.1, "runs": 0.5}
_MAKERS: dict[str, Callable[[np.random.Generator], Problem]] = {
    "mixed": mixed,
    "contested": contested,
    "layered": _layered,
    "followers": _followers,
    "runs": draw_runs,
}
