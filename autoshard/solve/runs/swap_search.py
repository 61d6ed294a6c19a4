"""Swap local search: one or two groups take the strategies of other groups, within the limit."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.problem import Problem
from autoshard.solve.runs.find import Run
from autoshard.solve.runs.usage_prices import UsageWeights
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_MOST_ALIKE = 3
"""Number of moves kept of those with equal changes of price and usage."""
_DIGITS = 9
"""Digits to which equal moves agree; smaller gains count as rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Nodes that change together: a group, or a connected component outside of all groups.

    Attributes:
        nodes: shape [P].
        edges: edges of these nodes.
        kind: groups of one kind have corresponding nodes.
    """

    nodes: IntArray
    edges: IntArray
    kind: int


@dataclass(frozen=True, slots=True, eq=False)
class _Swap:
    """A group that takes the strategies of another group of its kind.

    Attributes:
        part: number of the group.
        picks: its new strategies, shape [P].
        gain: decrease of the price.
        grows: change of usage over time, shape [T].
    """

    part: int
    picks: IntArray
    gain: float
    grows: FloatArray


class SwapSearch:
    """Local search that changes one or two groups at once.

    Args:
        problem: the problem; its limit is finite.
        runs: runs in it.
        weights: its usage over time.
        effort: limits of work, and when to stop.
    """

    def __init__(
        self,
        problem: Problem,
        runs: Sequence[Run],
        weights: UsageWeights,
        *,
        effort: Effort = DEFAULT_EFFORT,
    ) -> None:
        self._problem = problem
        self._weights = weights
        self._effort = effort
        groups = [(np.array(g, np.intp), k) for k, run in enumerate(runs) for g in run.instances]
        rest = enumerate(_outside(problem, [nodes for nodes, _ in groups]), len(runs))
        groups.extend((nodes, kind) for kind, nodes in rest)
        owner = np.empty(len(problem.nodes), dtype=np.intp)
        for i, (nodes, _) in enumerate(groups):
            owner[nodes] = i
        touched: list[list[int]] = [[] for _ in groups]
        self._near: list[set[int]] = [{i} for i in range(len(groups))]
        for e, edge in enumerate(problem.edges):
            ends = {int(owner[edge.source]), int(owner[edge.target])}
            for i in ends:
                touched[i].append(e)
                self._near[i] |= ends
        self._groups = [
            _Group(nodes, np.array(edges, np.intp), kind)
            for (nodes, kind), edges in zip(groups, touched, strict=True)
        ]

    def improve(self, choice: IntArray, options: Sequence[IntArray]) -> IntArray:
        """A choice within the limit that no change of one or two groups improves.

        Args:
            choice: the start; within the limit.
            options: choices whose groups may be copied.
        """
        known: dict[int, dict[bytes, IntArray]] = {}
        for part in self._groups:
            for option in options:
                picks = option[part.nodes]
                known.setdefault(part.kind, {})[picks.tobytes()] = picks
        moves: dict[int, list[_Swap]] = {}
        choice, stale = choice.copy(), set(range(len(self._groups)))
        for _ in range(self._effort.settings.max_swaps):
            for i in sorted(stale):
                self._effort.check()
                every = known[self._groups[i].kind].values()
                moves[i] = [self._move(choice, i, picks) for picks in every]
            stale = set()
            for move in self._best(choice, [move for some in moves.values() for move in some]):
                choice[self._groups[move.part].nodes] = move.picks
                stale |= self._near[move.part]
            if not stale:
                break
        return choice

    def _move(self, choice: IntArray, i: int, picks: IntArray) -> _Swap:
        part, problem = self._groups[i], self._problem
        changed = choice.copy()
        changed[part.nodes] = picks
        paid = [
            float(problem.prices(x, nodes=part.nodes, edges=part.edges).sum())
            for x in (choice, changed)
        ]
        grows = self._weights.change(part.nodes, choice[part.nodes], picks)
        return _Swap(i, picks, paid[0] - paid[1], grows)

    def _best(self, choice: IntArray, moves: Sequence[_Swap]) -> Sequence[_Swap]:
        """The move or pair of moves with the largest gain within the limit; empty if none."""
        slack = self._problem.usage_limit - self._weights.over_time(self._weights.uses(choice))
        least = 10.0**-_DIGITS * abs(self._problem.objective(choice))
        gains = sorted((m for m in moves if m.gain > least), key=lambda m: -m.gain)
        single = next(((m,) for m in gains if (m.grows <= slack).all()), ())
        best = single[0].gain if single else 0.0
        spare = [m for m in moves if -np.inf < m.gain <= least and (m.grows < 0).any()]
        pairs = [
            (a, b)
            for a, b in product(_representatives(gains), _representatives(spare))
            if a.gain + b.gain > max(best, least) and b.part not in self._near[a.part]
        ]
        pairs.sort(key=lambda pair: -(pair[0].gain + pair[1].gain))
        fitting = (pair for pair in pairs if (pair[0].grows + pair[1].grows <= slack).all())
        return next(fitting, single)


def _representatives(moves: Iterable[_Swap]) -> list[_Swap]:
    """A few moves of each combination of gain and change of usage."""
    count: Counter[tuple[float, ...]] = Counter()
    kept = []
    for move in moves:
        most, least = float(move.grows.max(initial=0.0)), float(move.grows.min(initial=0.0))
        sort = tuple(float(f"{x:.{_DIGITS}g}") for x in (move.gain, most, least))
        count[sort] += 1
        if count[sort] <= _MOST_ALIKE:
            kept.append(move)
    return kept


def _outside(problem: Problem, groups: Sequence[IntArray]) -> Iterator[IntArray]:
    """Connected components of the nodes outside of all groups."""
    owner = np.arange(len(problem.nodes))
    for nodes in groups:
        owner[nodes] = -1
    adjacent: list[list[int]] = [[] for _ in owner]
    for edge in problem.edges:
        if owner[edge.source] >= 0 and owner[edge.target] >= 0:
            adjacent[edge.source].append(edge.target)
            adjacent[edge.target].append(edge.source)
    for root in np.flatnonzero(owner >= 0).tolist():
        if owner[root] < 0:
            continue
        owner[root], members = -1, [root]
        for v in members:
            fresh = [w for w in adjacent[v] if owner[w] >= 0]
            members.extend(dict.fromkeys(fresh))
            owner[fresh] = -1
        yield np.array(members, dtype=np.intp)
