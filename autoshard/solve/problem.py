"""The optimization problem and its solution: pure numpy, no tensors, no torch.

A problem is a graph. Every node picks one of its strategies; it pays the strategy's
cost and, while it is alive, uses the strategy's share of a limited resource. Every
edge pays an entry of its cost matrix, picked by the strategies at its two ends. Nodes
in a tie pick the same strategy index. The public contest format IOPDDL is a special
case of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import ProblemError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
BoolArray = NDArray[np.bool_]

USAGE_TOLERANCE = 1e-9
"""Relative excess over a usage limit that counts as rounding."""


@dataclass(frozen=True, slots=True)
class Node:
    """One choice.

    Attributes:
        cost: price of each strategy, shape [S]; `inf` forbids a strategy.
        usage: use of the limited resource by each strategy while alive, shape [S].
        interval: half-open span of time [first, last) in which the node is alive.
        name: for messages only.
    """

    cost: FloatArray
    usage: FloatArray
    interval: tuple[int, int] = (0, 0)
    name: str = ""

    @property
    def num_strategies(self) -> int:
        """How many strategies there are to choose from."""
        return len(self.cost)


@dataclass(frozen=True, slots=True)
class Edge:
    """A price on a pair of choices: `cost[rows[s], cols[t]]` for strategies s and t.

    Many strategies share a row because they produce the same layout. The matrix is kept
    at the size of the distinct rows and columns, and may be shared between edges.

    Attributes:
        source: index of the first node.
        target: index of the second node; differs from `source`.
        cost: distinct prices, shape [R, C]; `inf` forbids a pair.
        rows: row of each strategy of the source, shape [S_source].
        cols: column of each strategy of the target, shape [S_target].
    """

    source: int
    target: int
    cost: FloatArray
    rows: IntArray
    cols: IntArray

    def dense(self) -> FloatArray:
        """The full matrix, shape [S_source, S_target]."""
        return self.cost[np.ix_(self.rows, self.cols)]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Groups of nodes that are alike and follow each other, such as the layers of a model.

    A hint that makes solving faster; it changes no answer, and where it is wrong it is
    ignored.

    Attributes:
        instances: nodes of each group; nodes at the same place correspond to each other.
    """

    instances: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Problem:
    """Minimise node costs plus edge costs under ties and a usage limit.

    Attributes:
        nodes: the choices.
        edges: prices on pairs; parallel edges are allowed and add up.
        ties: disjoint groups of nodes that must pick the same strategy index.
        usage_limit: upper bound of the usage summed over the nodes alive at any time.
        repeats: disjoint hints of repeated structure.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    usage_limit: float = np.inf
    repeats: tuple[Repeat, ...] = ()

    def __post_init__(self) -> None:
        _validate_nodes(self.nodes)
        _validate_edges(self.nodes, self.edges)
        _validate_ties(self.nodes, self.ties)
        if np.isnan(self.usage_limit):
            raise ProblemError("usage_limit is NaN; give a number, or leave it out for no limit")

    def objective(self, choice: Sequence[int] | IntArray) -> float:
        """Price of a choice per node, without looking at ties and limits."""
        return float(self.prices(choice).sum())

    def prices(self, choice: Sequence[int] | IntArray) -> FloatArray:
        """What a choice per node pays at each node and then at each edge, shape [N + E]."""
        listed, picks = self._listed, np.asarray(choice, dtype=np.intp)
        assert picks.shape == listed.starts.shape, "one strategy per node"
        rows = listed.labels[listed.rows + picks[listed.sources]]
        cols = listed.labels[listed.cols + picks[listed.targets]]
        paid = (
            listed.costs[listed.starts + picks],
            listed.prices[listed.matrices + rows * listed.widths + cols],
        )
        return np.concatenate(paid)

    @cached_property
    def _listed(self) -> "_Listed":
        costs, starts = _laid_out([node.cost for node in self.nodes])
        labels, places = _laid_out([x for edge in self.edges for x in (edge.rows, edge.cols)])
        prices, matrices = _laid_out([edge.cost for edge in self.edges])
        return _Listed(
            costs,
            starts,
            labels.astype(np.intp),
            places[0::2],
            places[1::2],
            prices,
            matrices,
            np.array([edge.cost.shape[1] for edge in self.edges], dtype=np.intp),
            np.array([edge.source for edge in self.edges], dtype=np.intp),
            np.array([edge.target for edge in self.edges], dtype=np.intp),
        )

    @cached_property
    def peak_times(self) -> IntArray:
        """Times at which the usage can peak, ascending, shape [T].

        Usage only grows when a node becomes alive, so the starts of intervals suffice; a
        start counts only if some node ends before or at the next one.
        """
        spans = [n.interval for n in self.nodes if n.interval[0] < n.interval[1]]
        starts = np.unique(np.array([first for first, _ in spans], dtype=np.intp))
        ends = np.array([last for _, last in spans], dtype=np.intp)
        ends_per_start = np.bincount(
            np.searchsorted(starts, ends, side="left") - 1, minlength=len(starts)
        )
        return starts[ends_per_start > 0]

    @cached_property
    def peak_spans(self) -> IntArray:
        """Span [first, last) of each node in `peak_times`, shape [N, 2]."""
        intervals = np.array([n.interval for n in self.nodes], dtype=np.intp).reshape(-1, 2)
        return np.searchsorted(self.peak_times, intervals)

    @cached_property
    def live_sets(self) -> tuple[tuple[int, ...], ...]:
        """Nodes alive at each of `peak_times`."""
        first, last = self.peak_spans.T
        times = range(len(self.peak_times))
        return tuple(tuple(np.flatnonzero((first <= t) & (t < last)).tolist()) for t in times)

    def peak_usage(self, choice: Sequence[int] | IntArray) -> float:
        """Largest usage over time, of a choice per node; 0 where nothing is alive."""
        use = np.array([n.usage[s] for n, s in zip(self.nodes, choice, strict=True)])
        first, last = self.peak_spans.T
        alive = first < last
        if not alive.any():
            return 0.0
        if np.isinf(use[alive]).any():
            return float("inf")
        size = len(self.peak_times) + 1
        grows = np.bincount(first[alive], weights=use[alive], minlength=size)
        falls = np.bincount(last[alive], weights=use[alive], minlength=size)
        return float(np.cumsum(grows - falls)[:-1].max())

    def is_feasible(
        self, choice: Sequence[int] | IntArray, *, rtol: float = USAGE_TOLERANCE
    ) -> bool:
        """Whether a choice keeps the ties and the limit and has a finite price."""
        tied = all(len({int(choice[i]) for i in group}) == 1 for group in self.ties)
        if not tied or not np.isfinite(self.objective(choice)):
            return False
        room = self.usage_limit + abs(self.usage_limit) * rtol
        return self.peak_usage(choice) <= room


@dataclass(frozen=True, slots=True, eq=False)
class _Listed:
    """A problem as flat arrays, to price a choice with few calls of numpy.

    Attributes:
        costs: costs of all nodes.
        starts: where the costs of each node start, shape [N].
        labels: rows and columns of all edges.
        rows: where the rows of each edge start in `labels`, shape [E].
        cols: the same for its columns, shape [E].
        prices: entries of all matrices, row by row.
        matrices: where the matrix of each edge starts, shape [E].
        widths: number of its columns, shape [E].
        sources: first node of each edge, shape [E].
        targets: second node of each edge, shape [E].
    """

    costs: FloatArray
    starts: IntArray
    labels: IntArray
    rows: IntArray
    cols: IntArray
    prices: FloatArray
    matrices: IntArray
    widths: IntArray
    sources: IntArray
    targets: IntArray


def _laid_out(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], IntArray]:
    """Arrays behind one another, shared ones once, and where each of them starts."""
    place: dict[int, int] = {}
    parts: list[NDArray[Any]] = [np.zeros(0)]
    starts = np.empty(len(arrays), dtype=np.intp)
    length = 0
    for i, values in enumerate(arrays):
        if id(values) not in place:
            place[id(values)] = length
            parts.append(values.ravel())
            length += values.size
        starts[i] = place[id(values)]
    return np.concatenate(parts), starts


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """A choice whose price is proven least, within the requested gap."""
    FEASIBLE = "feasible"
    """A choice, with a bound that leaves a gap."""
    INFEASIBLE = "infeasible"
    """Proven: no choice satisfies the limits."""
    TIMED_OUT = "timed_out"
    """The time ended before any choice was found."""
    CANCELLED = "cancelled"
    """Somebody stopped the solve; the best choice so far is kept if there is one."""


@dataclass(frozen=True)
class Solution:
    """What a solve found.

    Attributes:
        status: how it ended.
        choice: strategy index per node, or None when none was found.
        objective: price of the choice, or inf.
        bound: proven lower bound of every choice's price.
        wall_time: seconds spent.
        statistics: what each step did, by name, for the report.
    """

    status: Status
    choice: IntArray | None
    objective: float
    bound: float
    wall_time: float
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the bound; inf without a choice."""
        if self.choice is None:
            return float("inf")
        if self.objective <= self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-30)


def _validate_nodes(nodes: Sequence[Node]) -> None:
    for i, node in enumerate(nodes):
        where = f"node {i} {node.name!r}"
        if node.cost.ndim != 1 or len(node.cost) == 0:
            raise ProblemError(f"{where} has no strategies; every node needs at least one")
        if node.usage.shape != node.cost.shape:
            raise ProblemError(
                f"{where} has {len(node.cost)} costs but usage of shape {node.usage.shape}"
            )
        if np.isnan(node.cost).any() or np.isnan(node.usage).any():
            raise ProblemError(f"{where} has a NaN cost or usage")
        if np.isneginf(node.cost).any():
            raise ProblemError(f"{where} has a cost of -inf; costs are numbers or +inf")
        if (node.usage < 0).any():
            raise ProblemError(f"{where} has a negative usage; a node can only take room")


def _validate_edges(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    for i, edge in enumerate(edges):
        where = f"edge {i} ({edge.source} -> {edge.target})"
        if not (0 <= edge.source < len(nodes) and 0 <= edge.target < len(nodes)):
            raise ProblemError(f"{where} names a node that does not exist")
        if edge.source == edge.target:
            raise ProblemError(f"{where} joins a node with itself; add the price to the node")
        ends = ((edge.rows, edge.source, 0), (edge.cols, edge.target, 1))
        for index, end, dim in ends:
            if len(index) != nodes[end].num_strategies:
                raise ProblemError(f"{where} does not index every strategy of node {end}")
            if len(index) and not (index.min() >= 0 and index.max() < edge.cost.shape[dim]):
                raise ProblemError(f"{where} indexes outside its cost matrix")
        if np.isnan(edge.cost).any() or np.isneginf(edge.cost).any():
            raise ProblemError(f"{where} has a NaN or -inf cost; costs are numbers or +inf")


def _validate_ties(nodes: Sequence[Node], ties: Sequence[Sequence[int]]) -> None:
    seen: set[int] = set()
    for group in ties:
        if seen & set(group) or len(set(group)) != len(group):
            raise ProblemError(f"tie {tuple(group)} repeats a node; ties must be disjoint")
        seen |= set(group)
        if len({nodes[i].num_strategies for i in group}) > 1:
            raise ProblemError(f"tie {tuple(group)} joins nodes with different strategy counts")
