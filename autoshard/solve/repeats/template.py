"""One group of a run, reduced to a table over what it shares with the rest."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.elimination import Elimination, Evaluation
from autoshard.solve.network import Matrix, Network
from autoshard.solve.problem import Edge, Node, Problem
from autoshard.solve.reductions import (
    Chain,
    DropDominated,
    EliminateNeighbours,
    Inverse,
    Losses,
    SimplifyLinks,
)
from autoshard.solve.repeats.block import Block
from autoshard.solve.tables import FoundTable, KeptTable

MOST_ENTRIES = 1 << 22
"""Largest number of entries of a group's table."""

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
        block: the group, and where its tables are kept.
        still_open: what is open at hubs and ports; everything where nothing is said.
        known: what reductions have worked out already.
        mode: number of the only mode that counts, if the block has as many; all if None.
        check: called now and then; raises to stop.
    """

    def __init__(
        self,
        problem: Problem,
        block: Block,
        still_open: Open,
        known: Known,
        *,
        mode: int | None = None,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._mode = mode if mode is not None and mode < len(block.modes) else None
        self._modes = block.modes if self._mode is None else (block.modes[self._mode],)
        self._known = known
        self._problem = problem
        self._block = block
        self.run = run = block.run
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
        self._seen = seen
        self.shape = tuple(len(self.labels[v]) for v in seen)

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
        kept = self._block.kept_table(costs, self.view(most_work))
        solve = partial(self._solve, costs, most_work)
        found = None if kept is None else kept.find(self.shape)
        self._block.count(reused=found is not None)
        solved = None
        if found is None:
            solved = solve()
            found = FoundTable(None, 0.0)
            if solved is not None:
                found = FoundTable(solved.values, sum(way.plan.work for way in solved.ways))
            if kept is not None:
                kept.keep(found)
        if found.values is None:
            return None
        return GroupTable(self, found.values, found.work, _Interiors(self, kept, solve, solved))

    def interior(self, solved: "_Solved", seen: tuple[int, ...]) -> tuple[int, ...]:
        """Strategies of the nodes of a group, given those of what it sees."""
        way = min(solved.ways, key=lambda one: float(one.values[seen]))
        choice = np.zeros(len(self._place), dtype=np.intp)
        for i, s in way.plan.complete(way.result, dict(enumerate(seen))).items():
            choice[i] = way.left[i][s]
        way.inverse(choice)
        for v, labels in way.labels.items():
            choice[self._place[v]] = labels[choice[self._place[v]]]
        return tuple(int(choice[self._place[v]]) for v in self.run.instances[1])

    def group_sizes(self) -> tuple[int, ...]:
        """Number of strategies of each node of the group, open or not."""
        return tuple(self.num_strategies(v) for v in self.run.instances[1])

    def num_strategies(self, v: int) -> int:
        """Strategies of a node, open or not."""
        return self._problem.nodes[v].num_strategies

    def port_labels(self, axis: int) -> IntArray:
        """Numbers of the strategies that are still open at a port."""
        return self.labels[self.run.instances[1][self.run.ports[axis]]]

    def view(self, most_work: float) -> bytes:
        """What distinguishes this table from others of the group at the same costs."""
        kept = [hub in self.labels for hub in self.run.hubs]
        labels = [self.labels[v].tolist() for v in self._seen]
        return repr((kept, labels, most_work, self._mode)).encode()

    def _solve(self, costs: Mapping[int, FloatArray], most_work: float) -> "_Solved | None":
        """Make the table, mode by mode."""
        ways = []
        for mode in self._modes:
            way = self._solve_mode(costs, {**mode, **self.labels}, most_work)
            if way is None:
                return None
            ways.append(way)
        return _Solved(tuple(ways), np.minimum.reduce([way.values for way in ways]))

    def _solve_mode(
        self, costs: Mapping[int, FloatArray], labels: Mapping[int, IntArray], most_work: float
    ) -> "_Way | None":
        """The table of one mode; `labels` are the strategies of the nodes that are not free."""
        relaxed: dict[int, FloatArray] = {}
        every = (self._edge(edge, labels, relaxed) for edge in self._block.edges)
        edges = [edge for edge in every if edge is not None]
        group = set(self.run.instances[1])
        nodes = []
        for v in self._place:
            cost = costs[v] if v in group else np.zeros(self.num_strategies(v))
            if v in labels:
                cost = cost[labels[v]]
            nodes.append(Node(cost + relaxed.get(v, 0.0), np.zeros_like(cost)))
        network = Network.from_problem(Problem(tuple(nodes), tuple(edges)))
        seen = range(len(self._seen))
        inverse = reduce_around(network, seen, self._known, check=self._check)
        plan = Elimination.compile(network, most_work=most_work, keep=seen, check=self._check)
        if plan is None:
            return None
        cost_left = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(cost_left, check=self._check)
        left = {v: x.labels for v, x in network.variables.items()}
        return _Way(labels, plan, result, left, inverse, plan.joint_table(result, seen))

    def _edge(
        self, edge: Edge, labels: Mapping[int, IntArray], relaxed: dict[int, FloatArray]
    ) -> Edge | None:
        """An edge inside the template; that to a relaxed hub becomes a cost."""
        for hub, other in ((edge.source, edge.target), (edge.target, edge.source)):
            if hub in self._relaxed_hubs:
                dense = edge.dense() if other == edge.target else edge.dense().T
                free = dense.min(axis=0)
                if other in labels:
                    free = free[labels[other]]
                relaxed[other] = relaxed.get(other, 0.0) + free
                return None
        rows = edge.rows[labels[edge.source]] if edge.source in labels else edge.rows
        cols = edge.cols[labels[edge.target]] if edge.target in labels else edge.cols
        return Edge(self._place[edge.source], self._place[edge.target], edge.cost, rows, cols)


@dataclass(frozen=True, eq=False)
class _Way:
    """The table of one mode, with the way back.

    Attributes:
        labels: the strategies that it is about, of the nodes of which not all are.
        plan: the elimination that made the table.
        result: its intermediate tables, to find the way back.
        left: strategies that each variable of the elimination still has.
        inverse: the way back from what was left to eliminate to the whole group.
        values: the table.
    """

    labels: Mapping[int, IntArray]
    plan: Elimination
    result: Evaluation
    left: Mapping[int, IntArray]
    inverse: Inverse
    values: FloatArray


@dataclass(frozen=True, eq=False)
class _Solved:
    """A table that was made: the elementwise least of those of all modes."""

    ways: tuple[_Way, ...]
    values: FloatArray


@dataclass(eq=False)
class _Interiors:
    """The way back from a table; a table that was kept is only made if that is not.

    Attributes:
        template: of which group.
        kept: where the table is kept, if anywhere.
        solve: makes the table.
        solved: the table, once it was made.
    """

    template: Template
    kept: KeptTable | None
    solve: Callable[[], _Solved | None]
    solved: _Solved | None

    def __call__(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Strategies of the nodes of a group, given those of what it sees."""
        if self.solved is None and self.kept is not None:
            found = self.kept.find_interior(seen, self.template.group_sizes())
            if found is not None:
                return found
        self.solved = self.solved or self.solve()
        assert self.solved is not None, "the same table was made before"
        strategies = self.template.interior(self.solved, seen)
        if self.kept is not None:
            self.kept.keep_interior(seen, strategies)
        return strategies


@dataclass(frozen=True, eq=False)
class GroupTable:
    """A group's least price by what it sees.

    Attributes:
        template: of which group.
        values: prices: one axis per port before, per own port, per kept hub.
        work: additions that making it takes, whether it was made or kept.
        interior: strategies of the nodes of a group, given those of what it sees.
    """

    template: Template
    values: FloatArray
    work: float
    interior: Callable[[tuple[int, ...]], tuple[int, ...]]

    def as_batch(self, num_ports: int) -> FloatArray:
        """The table as one matrix, ports before by own ports, per state of the hubs."""
        shape = self.values.shape
        rows, cols = prod(shape[:num_ports]), prod(shape[num_ports : 2 * num_ports])
        return np.ascontiguousarray(np.moveaxis(self.values.reshape(rows, cols, -1), 2, 0))


def reduce_around(
    network: Network, keep: Collection[int], known: Known, *, check: Callable[[], None]
) -> Inverse:
    """Shrink a network exactly, but for some variables that keep all their strategies."""
    links = SimplifyLinks()
    eliminate = EliminateNeighbours(links, keep=keep, products=known.products)
    dominated = DropDominated(keep=keep, losses=known.losses)
    return Chain((links, eliminate, dominated), check).apply(network)
