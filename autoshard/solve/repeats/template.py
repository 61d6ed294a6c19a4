"""One group of a run, reduced to a table over what it shares with the rest."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from autoshard.solve.elimination import Elimination, Evaluation
from autoshard.solve.network import Matrix, Network
from autoshard.solve.problem import BoolArray, Edge, FloatArray, IntArray, Node, Problem
from autoshard.solve.reductions import (
    Chain,
    DropDominated,
    EliminateNeighbours,
    Inverse,
    Losses,
    SimplifyLinks,
)
from autoshard.solve.repeats.runs import Run

MOST_ENTRIES = 1 << 22
"""Largest number of entries of a group's table."""
_BLOCK = 1 << 20

Open = Mapping[int, BoolArray | None]
"""Strategies that are still open, by hub, and by a port's node of the last group for that
port in all groups. A hub may be None: it is relaxed, every group may pick a strategy of its
own for it, which gives a lower bound."""


@dataclass(frozen=True, slots=True)
class Known:
    """What reductions have worked out already, by content."""

    products: dict[bytes, Matrix] = field(default_factory=dict)
    losses: dict[bytes, Losses] = field(default_factory=dict)


class Template:
    """The second group of a run with what it sees: the ports before it, its own, the hubs.

    Args:
        problem: what the run is of.
        run: the run.
        still_open: what is open at hubs and ports; everything where nothing is said.
        known: what reductions have worked out already.
        check: called now and then; raises to stop.
    """

    def __init__(
        self,
        problem: Problem,
        run: Run,
        still_open: Open,
        known: Known,
        *,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._known = known
        self._problem = problem
        self.run = run
        self.kept_hubs = tuple(h for h in run.hubs if still_open.get(h, True) is not None)
        group = run.instances[1]
        own = [group[p] for p in run.ports]
        before = run.before_of(1)
        seen = [*before, *own, *self.kept_hubs]
        self._relaxed_hubs = set(run.hubs) - set(self.kept_hubs)
        masks = {h: still_open.get(h) for h in self.kept_hubs}
        for nodes in (before, own):
            masks.update(zip(nodes, (still_open.get(v) for v in run.last_ports), strict=True))
        self.labels = {
            v: np.arange(problem.nodes[v].num_strategies) if mask is None else np.flatnonzero(mask)
            for v, mask in masks.items()
        }
        inner = [v for v in group if v not in set(own)]
        self._place = {v: i for i, v in enumerate([*seen, *inner])}
        self._seen = len(seen)
        self.shape = tuple(self._size(v) for v in seen)
        self._relaxed: dict[int, FloatArray] = {}

    @property
    def entries(self) -> int:
        """Size of the table."""
        return prod(self.shape)

    def evaluate(self, costs: Mapping[int, FloatArray], *, most_work: float) -> "GroupTable | None":
        """The table for given costs per strategy of each node of the problem.

        Args:
            costs: shape [S] for each node of the group.
            most_work: largest number of additions.

        Returns:
            None where the table would be too large.
        """
        if self.entries > MOST_ENTRIES:
            return None
        edges = [edge for edge in map(self._edge, self._edges()) if edge is not None]
        group = set(self.run.instances[1])
        nodes = []
        for v in self._place:
            cost = costs[v] if v in group else np.zeros(self._problem.nodes[v].num_strategies)
            if v in self.labels:
                cost = cost[self.labels[v]]
            nodes.append(Node(cost + self._relaxed.get(v, 0.0), np.zeros_like(cost)))
        network = Network.from_problem(Problem(tuple(nodes), tuple(edges)))
        seen = range(self._seen)
        inverse = reduce_around(network, seen, self._known, check=self._check)
        plan = Elimination.compile(network, most_work=most_work, keep=seen, check=self._check)
        if plan is None:
            return None
        left = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(left, check=self._check)
        labels = {v: x.labels for v, x in network.variables.items()}
        return GroupTable(self, plan, result, labels, inverse, plan.joint_table(result, seen))

    def interior(self, table: "GroupTable", seen: tuple[int, ...]) -> tuple[int, ...]:
        """Strategies of the nodes of a group, given those of what it sees."""
        choice = np.zeros(len(self._place), dtype=np.intp)
        names = list(self._place)
        for i, s in table.plan.complete(table.result, dict(enumerate(seen))).items():
            choice[i] = table.labels[i][s]
        table.inverse(choice)
        for i in range(self._seen):
            choice[i] = self.labels[names[i]][choice[i]]
        return tuple(int(choice[self._place[v]]) for v in self.run.instances[1])

    def num_strategies(self, v: int) -> int:
        """Strategies of a node, open or not."""
        return self._problem.nodes[v].num_strategies

    def port_labels(self, axis: int) -> IntArray:
        """Numbers of the strategies that are still open at a port."""
        return self.labels[self.run.instances[1][self.run.ports[axis]]]

    def _size(self, v: int) -> int:
        return len(self.labels[v])

    def _edges(self) -> list[Edge]:
        group, before = set(self.run.instances[1]), set(self.run.before_of(1))
        around = group | before | set(self.run.hubs)
        return [
            e
            for e in self._problem.edges
            if {e.source, e.target} <= around and not {e.source, e.target}.isdisjoint(group)
        ]

    def _edge(self, edge: Edge) -> Edge | None:
        """An edge inside the template; that to a relaxed hub becomes a cost."""
        for hub, other in ((edge.source, edge.target), (edge.target, edge.source)):
            if hub in self._relaxed_hubs:
                dense = edge.dense() if other == edge.target else edge.dense().T
                free = dense.min(axis=0)
                if other in self.labels:
                    free = free[self.labels[other]]
                self._relaxed[other] = self._relaxed.get(other, 0.0) + free
                return None
        rows = edge.rows[self.labels[edge.source]] if edge.source in self.labels else edge.rows
        cols = edge.cols[self.labels[edge.target]] if edge.target in self.labels else edge.cols
        return Edge(self._place[edge.source], self._place[edge.target], edge.cost, rows, cols)


@dataclass(frozen=True, eq=False)
class GroupTable:
    """A group's least price by what it sees.

    Attributes:
        template: of which group.
        plan: the elimination that made the table.
        result: its intermediate tables, to find the way back.
        labels: strategies that each variable of the elimination still has.
        inverse: the way back from what was left to eliminate to the whole group.
        values: prices: one axis per port before, per own port, per kept hub.
    """

    template: Template
    plan: Elimination
    result: Evaluation
    labels: Mapping[int, IntArray]
    inverse: Inverse
    values: FloatArray

    def as_batch(self, num_ports: int) -> FloatArray:
        """The table as one matrix, ports before by own ports, per state of the hubs."""
        shape = self.values.shape
        rows, cols = prod(shape[:num_ports]), prod(shape[num_ports : 2 * num_ports])
        return np.ascontiguousarray(np.moveaxis(self.values.reshape(rows, cols, -1), 2, 0))

    def interior(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Strategies of the nodes of a group, given those of what it sees."""
        return self.template.interior(self, seen)


def reduce_around(
    network: Network, keep: Collection[int], known: Known, *, check: Callable[[], None]
) -> Inverse:
    """Shrink a network exactly, but for some variables that keep all their strategies."""
    links = SimplifyLinks()
    eliminate = EliminateNeighbours(links, keep=keep, products=known.products)
    dominated = DropDominated(keep=keep, losses=known.losses)
    return Chain((links, eliminate, dominated), check).apply(network)


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
