"""Random problems with runs: equal groups of nodes in a row, and all that may be around them.

A problem has a few nodes before the groups, shared nodes that all groups are linked to, and nodes
after them. Features are drawn independently: modes that a group may not mix, values that follow
others, usage that lives during a group, until its backward or always, edges priced by paths, a
second run after the first, a group that differs, links between groups far apart, and wrong hints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve import Edge, Problem, ProblemNode, Repeat, ShortestPathCost

_MOST_CHOICES = 1 << 14
_BYTES = 2.0**33
"""A usage next to which a few bytes are below the tolerances of HiGHS."""


def draw_runs(rng: np.random.Generator) -> Problem:
    """A random problem with runs, with at most 16,384 choices."""
    while True:
        problem = _Drawing(rng).problem()
        sizes = [float(node.num_strategies) for node in problem.nodes]
        if np.prod(sizes) <= _MOST_CHOICES:
            return problem


@dataclass(frozen=True, slots=True)
class _Link:
    """A link of a position of a group: to a position of this group or the one before, or a node.

    Attributes:
        position: of this end.
        other: position or node at the other end.
        prices: of the strategies of this end and the other end.
        rows: row of each strategy of this end.
        cols: column of each strategy of the other end.
        reversed: true if the other end is the source.
    """

    position: int
    other: int
    prices: FloatArray | ShortestPathCost
    rows: IntArray
    cols: IntArray
    reversed: bool

    def edge(self, here: int, there: int) -> Edge:
        """The edge between two nodes."""
        if not self.reversed:
            return Edge(here, there, self.prices, self.rows, self.cols)
        turned = self.prices.T if isinstance(self.prices, np.ndarray) else _turned(self.prices)
        return Edge(there, here, turned, self.cols, self.rows)


def _turned(prices: ShortestPathCost) -> ShortestPathCost:
    sources, targets, steps = prices.steps
    return ShortestPathCost(prices.num_states, targets, sources, steps)


@dataclass
class _Group:
    """Common parts of the groups of a run.

    Attributes:
        costs: of each position.
        usages: of each position.
        lives: how long each position is alive, see `_Drawing.interval`.
        inside: links inside a group.
        back: links to the group before.
        shared: links to shared nodes.
        boundary: positions that the next group is linked to.
    """

    costs: list[FloatArray]
    usages: list[FloatArray]
    lives: list[int]
    inside: list[_Link] = field(default_factory=list)
    back: list[_Link] = field(default_factory=list)
    shared: list[_Link] = field(default_factory=list)
    boundary: tuple[int, ...] = ()


class _Drawing:
    """Draws one problem.

    Args:
        rng: the source of all that is random.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._nodes: list[ProblemNode] = []
        self._edges: list[Edge] = []
        self._repeats: list[Repeat] = []
        self._whole = self._chance(0.5)
        self._unit = float(10.0 ** rng.integers(-6, 7))
        self._lowest = -3.0 if self._chance(0.15) else 0.0
        self._forbidden = float(rng.choice([0.0, 0.0, 0.1]))
        self._in_bytes = self._chance(0.25)
        self._with_paths = self._chance(0.15)
        self._end = 100

    def problem(self) -> Problem:
        """The problem."""
        num_boundary = 2 if self._chance(0.2) else 1
        ends = [self._single() for _ in range(num_boundary)]
        shared = [self._single(0.3) for _ in range(int(self._rng.choice([0, 1, 1, 2])))]
        for node in shared:
            if self._chance(0.5):
                self._join(ends[0], node)
        ends = self._run(ends, shared)
        if self._chance(0.2):
            # A second run, like a decoder: the end of the first one may be shared by its groups.
            ends = self._run(ends if self._chance(0.5) else [self._single()], [*shared, ends[0]])
        if self._chance(0.7):
            tail = self._single()
            for node in (*ends, *shared):
                self._join(node, tail)
        self._spoil()
        return self._limited(Problem(tuple(self._nodes), tuple(self._edges), (), np.inf))

    def _run(self, before: Sequence[int], shared: Sequence[int]) -> list[int]:
        """Add a run after some nodes; return the boundary nodes of its last group."""
        shared = [v for v in shared if v not in before]
        num_groups = int(self._rng.integers(2, 6))
        modes = 2 if self._chance(0.2) else 1
        group = self._group(before, shared, modes)
        ends, instances = list(before), []
        for k in range(num_groups):
            nodes = self._add_group(group, k)
            for link in group.inside:
                self._edges.append(link.edge(nodes[link.position], nodes[link.other]))
            for link in group.back:
                self._edges.append(link.edge(nodes[link.position], ends[link.other]))
            for link in group.shared:
                self._edges.append(link.edge(nodes[link.position], link.other))
            instances.append(nodes)
            ends = [nodes[p] for p in group.boundary]
        self._repeats.append(Repeat(tuple(instances)))
        return ends

    def _group(self, before: Sequence[int], shared: Sequence[int], modes: int) -> _Group:
        """Draw a group: inner positions with modes, then its boundary positions without."""
        inner = int(self._rng.integers(0, 3))
        sizes = [2 * modes if modes > 1 else self._size() for _ in range(inner)]
        sizes += [self._nodes[v].num_strategies for v in before]
        boundary = tuple(range(inner, len(sizes)))
        group = _Group(
            [self._prices(n) for n in sizes],
            [self._usage(n) for n in sizes],
            [int(self._rng.integers(0, 4)) for _ in sizes],
            boundary=boundary,
        )
        link = partial(self._link, sizes)
        for p in range(len(sizes)):
            for q in range(p):
                if self._chance(0.6):
                    together = modes if max(p, q) < inner else 1
                    group.inside.append(link(p, q, sizes[q], modes=together))
        for q, size in enumerate(sizes[inner:]):
            takers = [p for p in range(len(sizes)) if self._chance(0.5)] or [len(sizes) - 1]
            group.back.extend(link(p, q, size) for p in takers)
        for node in shared:
            takers = [p for p in range(len(sizes)) if self._chance(0.4)]
            size = self._nodes[node].num_strategies
            group.shared.extend(link(p, node, size) for p in takers)
        return group

    def _link(
        self, sizes: Sequence[int], position: int, other: int, size: int, *, modes: int = 1
    ) -> _Link:
        """Draw a link of a position to another one, or to a node, of some size."""
        prices, rows, cols = self._pairs(sizes[position], size)
        if modes > 1:
            # Strategies of different modes are never combined; modes alternate.
            apart = np.arange(sizes[position])[:, None] % modes != np.arange(size)[None] % modes
            dense = _dense(prices)[np.ix_(rows, cols)]
            prices, rows, cols = np.where(apart, np.inf, dense), *map(np.arange, dense.shape)
        return _Link(position, other, prices, rows, cols, reversed=self._chance(0.5))

    def _add_group(self, group: _Group, k: int) -> tuple[int, ...]:
        first = len(self._nodes)
        positions = zip(group.costs, group.usages, group.lives, strict=True)
        for p, (cost, usage, life) in enumerate(positions):
            self._nodes.append(
                ProblemNode(cost, usage, self._interval(first + p, life), f"{k}.{p}")
            )
        return tuple(range(first, len(self._nodes)))

    def _interval(self, number: int, life: int) -> tuple[int, int]:
        """Never, for a moment, until the way back, or always."""
        spans = [(0, 0), (number, number + 2), (number, self._end - number), (0, self._end)]
        return spans[life]

    def _single(self, usage: float = 0.7) -> int:
        """Add a node outside of groups."""
        size, number = self._size(), len(self._nodes)
        used = self._usage(size) if self._chance(usage) else np.zeros(size)
        life = int(self._rng.integers(0, 4))
        self._nodes.append(ProblemNode(self._prices(size), used, self._interval(number, life)))
        return number

    def _join(self, source: int, target: int) -> None:
        sizes = (self._nodes[source].num_strategies, self._nodes[target].num_strategies)
        self._edges.append(Edge(source, target, *self._pairs(*sizes)))

    def _spoil(self) -> None:
        """Make groups differ or hints wrong, now and then; the solution must not change."""
        repeat = self._repeats[int(self._rng.integers(len(self._repeats)))]
        group = repeat.instances[int(self._rng.integers(len(repeat.instances)))]
        node = int(self._rng.choice(group))
        if self._chance(0.1):
            size = self._nodes[node].num_strategies
            self._nodes[node] = replace(self._nodes[node], cost=self._prices(size))
        if self._chance(0.1):
            others = [v for v in range(len(self._nodes)) if v not in group]
            self._join(node, int(self._rng.choice(others)))
        if self._chance(0.05):
            nodes = self._rng.permutation(sorted({v for i in repeat.instances for v in i}))
            number = len(repeat.instances)
            wrong = nodes[: len(nodes) // number * number].reshape(number, -1).tolist()
            self._repeats[self._repeats.index(repeat)] = Repeat(tuple(map(tuple, wrong)))

    def _limited(self, free: Problem) -> Problem:
        free = replace(free, repeats=tuple(self._repeats))
        if self._chance(0.3):
            return free
        least = free.peak_usage([int(node.usage.argmin()) for node in free.nodes])
        most = free.peak_usage([int(node.usage.argmax()) for node in free.nodes])
        limit = least + (most - least) * float(self._rng.random()) ** 1.5
        return replace(free, usage_limit=max(limit - self._chance(0.05), 0.0))

    def _size(self) -> int:
        return int(self._rng.integers(2, 4))

    def _prices(self, *shape: int) -> FloatArray:
        prices = self._rng.uniform(self._lowest, 9.0, shape)
        prices = (np.rint(prices) if self._whole else prices) * self._unit
        forbidden = self._rng.random(shape) < self._forbidden
        priced: FloatArray = np.where(forbidden, np.inf, prices)
        return priced

    def _pairs(
        self, first: int, second: int
    ) -> tuple[FloatArray | ShortestPathCost, IntArray, IntArray]:
        """Prices of pairs: any, of a follower that takes the other's value, or of paths."""
        if self._with_paths and self._chance(0.7):
            return self._paths(first, second)
        if first == second and self._chance(0.2):
            follows = np.full((first, second), np.inf)
            np.fill_diagonal(follows, self._prices(first))
            return follows, np.arange(first), np.arange(second)
        if self._chance(0.3):
            rows, cols = (self._rng.integers(0, 2, n) for n in (first, second))
            return self._prices(2, 2), rows, cols
        return self._prices(first, second), np.arange(first), np.arange(second)

    def _paths(self, first: int, second: int) -> tuple[ShortestPathCost, IntArray, IntArray]:
        num_states = 4
        ends = [(a, b) for a in range(num_states) for b in range(num_states) if a != b]
        kept = [pair for pair in ends if self._chance(0.6)] or ends[:1]
        sources, targets = (np.array(side, dtype=np.intp) for side in zip(*kept, strict=True))
        steps = np.abs(self._rng.integers(1, 9, len(kept)) * self._unit)
        rows, cols = (self._rng.integers(0, num_states, n) for n in (first, second))
        return ShortestPathCost(num_states, sources, targets, steps), rows, cols

    def _usage(self, size: int) -> FloatArray:
        usage = self._rng.integers(0, 6, size).astype(np.float64)
        if self._in_bytes:
            usage = usage * _BYTES + self._rng.integers(0, 6, size)
        return usage

    def _chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)


def _dense(prices: FloatArray | ShortestPathCost) -> FloatArray:
    return prices.dense if isinstance(prices, ShortestPathCost) else prices
