"""Modes of a group: sets of strategies of its nodes that no finite price joins.

A group that may be run in two ways, say, has strategies of both at most of its nodes, and
links that forbid to mix them. Its table is the elementwise least of the tables of either way
by itself, and these are far smaller on the way there.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.closure import ShortestPathCost
from autoshard.solve.problem import Edge, Problem

Mode = Mapping[int, IntArray]
"""The strategies of some nodes in a mode, ascending; other nodes may take any."""

_MOST_MODES = 8
_LEAST_SHARE = 0.25
"""Share of the nodes that modes must concern to be worth separate tables."""


def find_modes(problem: Problem, nodes: Sequence[int], edges: Iterable[Edge]) -> tuple[Mode, ...]:
    """The modes of some nodes: every choice of finite price keeps to one of them.

    Args:
        problem: the problem.
        nodes: the nodes.
        edges: edges of the problem; those that leave the nodes are not looked at.

    Returns:
        one empty mode where nothing is gained.
    """
    sizes = [problem.nodes[v].num_strategies for v in nodes]
    place = dict(zip(nodes, np.cumsum([0, *sizes]).tolist(), strict=False))
    known: dict[int, tuple[int, IntArray]] = {}
    splitting: list[tuple[Edge, IntArray]] = []
    for edge in edges:
        prices = edge.prices
        if isinstance(prices, ShortestPathCost) or not {edge.source, edge.target} <= place.keys():
            continue
        if id(prices) not in known:
            known[id(prices)] = _parts(prices)
        num_parts, parts = known[id(prices)]
        if num_parts > 1:
            splitting.append((edge, parts))
    ways = _ways(splitting, place, sizes)
    if not 1 < prod(map(len, ways)) <= _MOST_MODES:
        return ({},)
    return tuple({v: s for way in ways for v, s in way.items()} for ways in product(*ways))


def _parts(cost: FloatArray) -> tuple[int, IntArray]:
    """How many parts of a matrix finite prices join, and the part of each row and column.

    Rows and columns without a finite price are parts of their own that do not count.
    """
    finite = np.isfinite(cost)
    num_rows, num_cols = cost.shape
    if finite.all(axis=1).any() and finite.any(axis=1).all():
        return 1, np.zeros(num_rows + num_cols, dtype=np.intp)
    rows, cols = np.nonzero(finite)
    size = num_rows + num_cols
    links = coo_array((np.ones(len(rows)), (rows, num_rows + cols)), shape=(size, size))
    _, parts = connected_components(links, directed=False)
    return len(np.intersect1d(parts[:num_rows], parts[num_rows:])), parts.astype(np.intp)


def _ways(
    splitting: Sequence[tuple[Edge, IntArray]], place: Mapping[int, int], sizes: Sequence[int]
) -> list[list[Mode]]:
    """The modes of each set of nodes that splitting edges join."""
    size, first, second = sum(sizes), [], []
    for edge, parts in splitting:
        num_rows = edge.prices.shape[0]
        for v, seen in ((edge.source, edge.rows), (edge.target, num_rows + edge.cols)):
            first.append(place[v] + np.arange(len(seen)))
            second.append(size + parts[seen])
        size += int(parts.max()) + 1
    if not splitting:
        return []
    left, right = np.concatenate(first), np.concatenate(second)
    links = coo_array((np.ones(len(left)), (left, right)), shape=(size, size))
    _, joined = connected_components(links, directed=False)
    spans = {v: joined[place[v] : place[v] + n] for v, n in zip(place, sizes, strict=True)}
    return [
        [
            {v: np.flatnonzero(spans[v] == part) for v in piece}
            # What some node has no strategy for leads to no finite price.
            for part in sorted(set.intersection(*(set(spans[v].tolist()) for v in piece)))
        ]
        for piece in _pieces([edge for edge, _ in splitting])
        if len(piece) >= _LEAST_SHARE * len(place)
    ]


def _pieces(edges: Sequence[Edge]) -> list[list[int]]:
    """Nodes by what edges join, ascending."""
    nodes = sorted({v for edge in edges for v in (edge.source, edge.target)})
    ends = np.searchsorted(nodes, [(edge.source, edge.target) for edge in edges])
    shape = (len(nodes), len(nodes))
    links = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=shape)
    num_pieces, piece = connected_components(links, directed=False)
    members: list[list[int]] = [[] for _ in range(num_pieces)]
    for v, i in zip(nodes, piece.tolist(), strict=True):
        members[i].append(v)
    return members
