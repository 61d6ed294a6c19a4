"""One group of a run, reduced to a table over what it shares with the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.solve.elimination import Elimination, Evaluation
from autoshard.solve.network import Network
from autoshard.solve.problem import BoolArray, Edge, FloatArray, IntArray, Node, Problem
from autoshard.solve.repeats.runs import Run

MOST_ENTRIES = 1 << 22
"""Largest number of entries of a group's table."""
_BLOCK = 1 << 20

Hubs = Mapping[int, BoolArray | None]
"""For each hub the strategies that are still open, or None where it is relaxed: every
group may then pick one of its own, which gives a lower bound."""


class Template:
    """The second group of a run with what it sees: the ports before it, its own, the hubs.

    Args:
        problem: what the run is of.
        run: the run.
        hubs: what is open at each hub.
        check: called now and then; raises to stop.
    """

    def __init__(
        self, problem: Problem, run: Run, hubs: Hubs, *, check: Callable[[], None]
    ) -> None:
        self._check = check
        self._problem = problem
        self._run = run
        self.kept_hubs = tuple(h for h in run.hubs if hubs[h] is not None)
        self._hubs = hubs
        group = run.instances[1]
        own = [group[p] for p in run.ports]
        seen = [*run.before_of(1), *own, *self.kept_hubs]
        inner = [v for v in group if v not in set(own)]
        self._place = {v: i for i, v in enumerate([*seen, *inner])}
        self._seen = len(seen)
        self.shape = tuple(self._size(v) for v in seen)
        self._free = np.zeros(0)
        self._relaxed: dict[int, FloatArray] = {}
        self._plan: Elimination | None = None

    @property
    def entries(self) -> int:
        """Size of the table."""
        return prod(self.shape)

    def compile(self, most_work: float) -> bool:
        """Find an order of elimination; False where its tables would be too large."""
        if self.entries > MOST_ENTRIES:
            return False
        edges = [edge for edge in map(self._edge, self._edges()) if edge is not None]
        nodes = [self._node(v) for v in self._place]
        network = Network.from_problem(Problem(tuple(nodes), tuple(edges)))
        self._plan = Elimination.compile(
            network, most_work=most_work, keep=range(self._seen), check=self._check
        )
        return self._plan is not None

    def evaluate(self, costs: Mapping[int, FloatArray]) -> "GroupTable":
        """The table for given costs per strategy of each node of the problem."""
        assert self._plan is not None
        local = {}
        group = set(self._run.instances[1])
        for v, i in self._place.items():
            cost = costs[v] if v in group else np.zeros(self._size(v))
            local[i] = cost + self._relaxed.get(v, 0.0)
        result = self._plan.evaluate(local, check=self._check)
        table = self._plan.joint_table(result, range(self._seen))
        return GroupTable(self, self._plan, result, table)

    def interior(self, result: Evaluation, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Strategies of the nodes of a group, given those of what it sees."""
        assert self._plan is not None
        picks = self._plan.complete(result, dict(enumerate(seen)))
        return tuple(picks[self._place[v]] for v in self._run.instances[1])

    def open_strategies(self, hub: int) -> IntArray:
        """Numbers of the strategies that are still open at a kept hub."""
        mask = self._hubs[hub]
        assert mask is not None
        return np.flatnonzero(mask)

    def _size(self, v: int) -> int:
        if v in self._run.hubs:
            return len(self.open_strategies(v))
        return self._problem.nodes[v].num_strategies

    def _node(self, v: int) -> Node:
        zeros = np.zeros(self._size(v))
        return Node(zeros, zeros)

    def _edges(self) -> list[Edge]:
        group, before = set(self._run.instances[1]), set(self._run.before_of(1))
        around = group | before | set(self._run.hubs)
        return [
            e
            for e in self._problem.edges
            if {e.source, e.target} <= around and not {e.source, e.target}.isdisjoint(group)
        ]

    def _edge(self, edge: Edge) -> Edge | None:
        """An edge inside the template; that to a relaxed hub becomes a cost."""
        rows, cols = edge.rows, edge.cols
        for hub, other in ((edge.source, edge.target), (edge.target, edge.source)):
            if hub not in self._run.hubs:
                continue
            if self._hubs[hub] is None:
                dense = edge.dense() if other == edge.target else edge.dense().T
                self._relaxed[other] = self._relaxed.get(other, 0.0) + dense.min(axis=0)
                return None
            if hub == edge.source:
                rows = rows[self.open_strategies(hub)]
            else:
                cols = cols[self.open_strategies(hub)]
        return Edge(self._place[edge.source], self._place[edge.target], edge.cost, rows, cols)


@dataclass(frozen=True, eq=False)
class GroupTable:
    """A group's least price by what it sees.

    Attributes:
        template: of which group.
        plan: the elimination that made the table.
        result: its intermediate tables, to find the way back.
        values: prices: one axis per port before, per own port, per kept hub.
    """

    template: Template
    plan: Elimination
    result: Evaluation
    values: FloatArray

    def as_batch(self, num_ports: int) -> FloatArray:
        """The table as one matrix, ports before by own ports, per state of the hubs."""
        shape = self.values.shape
        rows, cols = prod(shape[:num_ports]), prod(shape[num_ports : 2 * num_ports])
        return np.ascontiguousarray(np.moveaxis(self.values.reshape(rows, cols, -1), 2, 0))

    def interior(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Strategies of the nodes of a group, given those of what it sees."""
        return self.template.interior(self.result, seen)


def batched_min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """Min-plus products of stacks of matrices, [M, I, K] by [M, K, J] to [M, I, J]."""
    out = np.empty((left.shape[0], left.shape[1], right.shape[2]))
    step = max(1, _BLOCK // max(right.shape[1] * right.shape[2], 1))
    for m in range(left.shape[0]):
        for start in range(0, left.shape[1], step):
            part = left[m, start : start + step]
            out[m, start : start + step] = (part[:, :, None] + right[m][None]).min(axis=1)
    return out


def min_plus_power(matrices: FloatArray, exponent: int) -> FloatArray:
    """Min-plus power of a stack of square matrices [M, N, N] by repeated squaring."""
    result: FloatArray | None = None
    square = matrices
    while exponent:
        if exponent & 1:
            result = square if result is None else batched_min_plus(result, square)
        exponent >>= 1
        if exponent:
            square = batched_min_plus(square, square)
    assert result is not None
    return result


def cheapest_path(matrix: FloatArray, length: int, start: int, end: int) -> list[int]:
    """States of the cheapest walk of `length` steps from start to end, both included.

    Args:
        matrix: price of each step, shape [N, N].
        length: number of steps, at least 1.
        start: first state.
        end: last state.
    """
    remaining = [np.where(np.arange(len(matrix)) == end, 0.0, np.inf)]
    for _ in range(length):
        remaining.append((matrix + remaining[-1][None, :]).min(axis=1))
    path = [start]
    for left in range(length - 1, -1, -1):
        path.append(int((matrix[path[-1]] + remaining[left]).argmin()))
    return path
