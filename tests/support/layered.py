"""Problems with layers: a head, equal groups in a row, a tail, shared_nodes that all groups see."""

from dataclasses import replace

import numpy as np

from autoshard.solve import Edge, Problem, ProblemNode, Repeat


def free_node(cost: np.ndarray) -> ProblemNode:
    return ProblemNode(cost, np.zeros_like(cost))


def edge(source: int, target: int, cost: np.ndarray) -> Edge:
    return Edge(source, target, cost, np.arange(cost.shape[0]), np.arange(cost.shape[1]))


def layered(
    seed: int, *, num_layers: int, num_inner: int, num_shared: int, num_strategies: int = 3
) -> Problem:
    """A head, equal layers in a row, a tail; shared_nodes are linked to every layer.

    Costs are multiples of a half, so that sums are exact and ties between choices occur.
    """
    rng = np.random.default_rng(seed)

    def prices(*shape: int) -> np.ndarray:
        return rng.integers(0, 12, shape) / 2

    s = num_strategies
    nodes = [free_node(prices(s)) for _ in range(1 + num_shared)]
    head, shared_nodes = 0, range(1, 1 + num_shared)
    edges = [edge(head, shared_node, prices(s, s)) for shared_node in shared_nodes]
    costs = [prices(s) for _ in range(num_inner + 1)]
    inside = [(i, j, prices(s, s)) for i in range(num_inner) for j in range(i + 1, num_inner + 1)]
    inside = [link for k, link in enumerate(inside) if k % 2 == 0 or link[1] == num_inner]
    entries = [(i, prices(s, s)) for i in range(min(2, num_inner))]
    spokes = [(i, h, prices(s, s)) for h in range(num_shared) for i in range(num_inner)]
    before, instances = head, []
    for _ in range(num_layers):
        first = len(nodes)
        nodes.extend(free_node(cost) for cost in costs)
        edges.extend(edge(first + i, first + j, cost) for i, j, cost in inside)
        edges.extend(edge(before, first + i, cost) for i, cost in entries)
        edges.extend(edge(first + i, shared_nodes[h], cost) for i, h, cost in spokes)
        instances.append(tuple(range(first, len(nodes))))
        before = len(nodes) - 1
    nodes.append(free_node(prices(s)))
    edges.append(edge(before, len(nodes) - 1, prices(s, s)))
    if num_shared:
        edges.append(edge(shared_nodes[0], len(nodes) - 1, prices(s, s)))
    return Problem(tuple(nodes), tuple(edges), repeats=(Repeat(tuple(instances)),))


def with_times(problem: Problem, seed: int, share: float) -> Problem:
    """Usage at every node, held always, for a short time, or until the way back.

    Args:
        problem: a layered one.
        seed: of the random numbers.
        share: place of the limit on the way from about the least to the most.
    """
    rng = np.random.default_rng(seed)
    num_nodes = len(problem.nodes)
    end = 3 * num_nodes
    nodes = []
    for v, node in enumerate(problem.nodes):
        usage = rng.integers(0, 4, node.num_strategies).astype(float)
        span = (0, end) if rng.random() < 0.5 else (v, v + int(rng.integers(1, 4)))
        nodes.append(replace(node, usage=usage, interval=span))
    groups = problem.repeats[0].instances
    for place, first in enumerate(groups[0]):
        usage = rng.integers(0, 6, problem.nodes[first].num_strategies).astype(float)
        kind = int(rng.integers(0, 3))
        for group in groups:
            v = group[place]
            spans = [(0, end), (v, v + 1 + place % 3), (v, end - v)]
            nodes[v] = replace(nodes[v], usage=usage, interval=spans[kind])
    free = replace(problem, nodes=tuple(nodes))
    least = free.peak_usage([int(node.usage.argmin()) for node in nodes])
    most = free.peak_usage([int(node.usage.argmax()) for node in nodes])
    return replace(free, usage_limit=least + share * (most - least))


def with_modes(problem: Problem, seed: int, num_modes: int) -> Problem:
    """The same layers with several modes: each has all strategies, and groups do not mix them.

    Values that a group passes on, and nodes in no group, belong to no component.
    """
    rng = np.random.default_rng(seed)
    groups = problem.repeats[0].instances
    moded = {v for group in groups for v in group[:-1]}
    nodes = list(problem.nodes)
    for place in range(len(groups[0]) - 1):
        size = nodes[groups[0][place]].num_strategies * num_modes
        cost, usage = rng.integers(0, 12, size) / 2, rng.integers(0, 6, size).astype(float)
        for group in groups:
            nodes[group[place]] = replace(nodes[group[place]], cost=cost, usage=usage)
    matrices: dict[int, np.ndarray] = {}
    edges = []
    for old in problem.edges:
        rows, cols, cost = old.rows, old.cols, old.cost
        if old.source in moded:
            rows = np.tile(rows, num_modes)
        if old.target in moded:
            cols = np.tile(cols, num_modes)
        if old.source in moded and old.target in moded:
            blocks = np.kron(np.eye(num_modes), np.ones(cost.shape)) > 0
            tiled = np.where(blocks, np.tile(cost, (num_modes, num_modes)), np.inf)
            cost = matrices.setdefault(id(cost), tiled)
            rows, cols = np.arange(cost.shape[0]), np.arange(cost.shape[1])
        edges.append(Edge(old.source, old.target, cost, rows, cols))
    return replace(problem, nodes=tuple(nodes), edges=tuple(edges))
