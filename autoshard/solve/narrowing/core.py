"""The part of a problem that some of its strategies make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.closure import ShortestPathCost
from autoshard.solve.narrowing.folded import Folded
from autoshard.solve.problem import Edge, Node, Problem


@dataclass(frozen=True, eq=False)
class Core:
    """A smaller problem and the way back to the whole one.

    Attributes:
        problem: the nodes and edges of the whole problem with fewer strategies each.
        kept: number of each strategy in the whole problem, shape [K] for each node.
    """

    problem: Problem
    kept: tuple[IntArray, ...]

    @classmethod
    def of(
        cls,
        problem: Problem,
        folded: Folded,
        masks: Sequence[BoolArray],
        *,
        costs: Sequence[FloatArray],
        usage_limit: float = float("inf"),
    ) -> "Core":
        """The core of some strategies.

        Args:
            problem: the whole problem.
            folded: the same, folded.
            masks: which strategies of each place to keep, shape [S].
            costs: price of each strategy of a node of each place, shape [S].
            usage_limit: of the core.
        """
        shared = _Shared()
        kept = tuple(shared.positions(masks[folded.place_of[v]]) for v in range(len(problem.nodes)))
        nodes = []
        for v, node in enumerate(problem.nodes):
            cost = shared.part(costs[folded.place_of[v]], kept[v])
            usage = shared.part(node.usage, kept[v])
            nodes.append(Node(cost, usage, node.interval, node.name))
        edges = tuple(shared.edge(edge, kept) for edge in problem.edges)
        core = Problem(tuple(nodes), edges, usage_limit=usage_limit, repeats=problem.repeats)
        return cls(core, kept)

    def whole(self, choice: IntArray) -> IntArray:
        """What a choice of the core is in the whole problem."""
        return np.array([kept[s] for kept, s in zip(self.kept, choice, strict=True)])

    def part(self, choice: IntArray) -> IntArray:
        """What a choice of the whole problem is in the core, which has all its strategies."""
        places = zip(self.kept, choice, strict=True)
        return np.array([np.searchsorted(kept, s) for kept, s in places])


def one_per_run(folded: Folded, masks: Sequence[BoolArray]) -> list[BoolArray]:
    """Masks that leave runs what they are: what corresponds in its groups keeps the same."""
    united = list(masks)
    for run in folded.runs:
        before = dict(zip(run.ports, run.before, strict=True))
        for p, nodes in enumerate(zip(*run.instances, strict=True)):
            places = {folded.place_of[v] for v in (*nodes, before.get(p, nodes[0]))}
            # What stands in for a port may be something else with other strategies.
            alike = [q for q in places if len(united[q]) == len(united[folded.place_of[nodes[0]]])]
            mask = np.logical_or.reduce([united[q] for q in alike])
            for q in alike:
                united[q] = mask
    return united


class _Shared:
    """Arrays made of others, each made once: equal nodes and edges share theirs."""

    def __init__(self) -> None:
        self._positions: dict[bytes, IntArray] = {}
        self._parts: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        self._tables: dict[tuple[int, bytes, bytes], FloatArray] = {}

    def positions(self, mask: BoolArray) -> IntArray:
        """Where a mask is true, shape [K]."""
        return self._positions.setdefault(mask.tobytes(), np.flatnonzero(mask))

    def part(self, values: FloatArray, keep: IntArray) -> FloatArray:
        """Some of the values."""
        key = (id(values), id(keep))
        if key not in self._parts:
            self._parts[key] = values[keep]
        found: FloatArray = self._parts[key]
        return found

    def edge(self, edge: Edge, kept: Sequence[IntArray]) -> Edge:
        """An edge between the kept strategies, with the prices that they can pay."""
        row_labels, rows = self._view(edge.rows, kept[edge.source])
        col_labels, cols = self._view(edge.cols, kept[edge.target])
        key = (id(edge.prices), row_labels.tobytes(), col_labels.tobytes())
        if key not in self._tables:
            prices = edge.prices
            self._tables[key] = (
                prices.between(row_labels, col_labels)
                if isinstance(prices, ShortestPathCost)
                else prices[np.ix_(row_labels, col_labels)]
            )
        return Edge(edge.source, edge.target, self._tables[key], rows, cols)

    def _view(self, shown: IntArray, keep: IntArray) -> tuple[IntArray, IntArray]:
        key = (id(shown), id(keep))
        if key not in self._views:
            labels, classes = np.unique(shown[keep], return_inverse=True)
            self._views[key] = labels, classes
        return self._views[key]
