"""The optimization problem: pure numpy, no tensors, no torch.

A problem is a graph. Every node picks one of its strategies, which has a cost and, while the node
is alive, a usage of a limited resource, a whole number such as bytes. The cost of an edge is the
entry of its matrix at the strategies of its two nodes, and so is its usage. Tied nodes pick the
same strategy index. The public contest format IOPDDL is a special case of this.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.errors import ProblemError
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.settings import SolverSettings

MAX_USAGE = float(1 << 53)
"""Usage at one time must be below this: sums of whole numbers are then exact in any order."""

_LARGE_ENTRIES = 1 << 16
"""Entries of a matrix from which on it is not copied to price choices."""


@dataclass(frozen=True, slots=True)
class ProblemNode:
    """A variable of the problem: one of its strategies is chosen.

    Attributes:
        cost: price of each strategy, shape [S]; `inf` forbids a strategy.
        usage: usage of the limited resource by each strategy while alive, shape [S]: whole
            numbers, or `inf` for a strategy that fits no limit.
        interval: half-open span of time [first, last) in which the node is alive.
        name: for messages only.
    """

    cost: FloatArray
    usage: FloatArray
    interval: tuple[int, int] = (0, 0)
    name: str = ""

    @property
    def num_strategies(self) -> int:
        """Number of strategies."""
        return len(self.cost)


@dataclass(frozen=True, slots=True)
class Edge:
    """A price on a pair of choices: `prices[rows[s], cols[t]]` for strategies s and t.

    Many strategies share a row because they produce the same layout. The matrix has only the
    distinct rows and columns, and edges may share it. A matrix that is too large to store is a
    `ShortestPathCost`.

    Attributes:
        source: index of the first node.
        target: index of the second node; differs from `source`.
        prices: distinct prices, shape [R, C]; `inf` forbids a pair.
        rows: row of each strategy of the source, shape [S_source].
        cols: column of each strategy of the target, shape [S_target].
        usage: usage of the limited resource by each entry of `prices` while alive, shape [R, C];
            None if the edge uses nothing.
        interval: half-open span of time [first, last) in which the edge is alive.
    """

    source: int
    target: int
    prices: FloatArray | ShortestPathCost
    rows: IntArray
    cols: IntArray
    usage: FloatArray | None = None
    interval: tuple[int, int] = (0, 0)

    @property
    def cost(self) -> FloatArray:
        """The prices as a matrix; slow and large for a path cost."""
        return self.prices.dense if isinstance(self.prices, ShortestPathCost) else self.prices

    def dense(self) -> FloatArray:
        """The full matrix, shape [S_source, S_target]."""
        return self.cost[np.ix_(self.rows, self.cols)]

    @classmethod
    def equal(cls, source: int, target: int, rows: IntArray, cols: IntArray) -> "Edge":
        """An edge that forces two nodes to strategies with equal labels.

        Args:
            source: index of the first node.
            target: index of the second node.
            rows: label of each strategy of the first, shape [S_source].
            cols: label of each strategy of the second, shape [S_target].
        """
        prices = _equality(int(rows.max()) + 1, int(cols.max()) + 1)
        return cls(source, target, prices, rows, cols)


@cache
def _equality(num_rows: int, num_cols: int) -> FloatArray:
    """Prices that forbid different labels."""
    prices = np.full((num_rows, num_cols), np.inf)
    np.fill_diagonal(prices, 0.0)
    return prices


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal groups of nodes in a row, such as the layers of a model.

    A hint that makes solving faster. It does not change the solution; a wrong hint is ignored.

    Attributes:
        instances: nodes of each group; nodes at the same position correspond to each other.
    """

    instances: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class UsageLimit:
    """A limit on the usage of one resource, summed over the nodes and edges alive at any time.

    Attributes:
        limit: upper bound of the usage.
        nodes: usage by each strategy, shape [S], of nodes by index; other nodes use nothing.
        edges: usage by each entry of the matrix, shape [R, C], of edges by index; other edges use
            nothing.
    """

    limit: float
    nodes: Mapping[int, FloatArray]
    edges: Mapping[int, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """Minimise node costs plus edge costs under ties and usage limits.

    Attributes:
        nodes: the choices.
        edges: prices on pairs; parallel edges are allowed and add up.
        ties: disjoint groups of nodes that must pick the same strategy index.
        usage_limit: upper bound of the usage summed over the nodes and edges alive at any time. It
            is kept exactly: usage is counted in whole numbers, and no tolerance applies.
        repeats: disjoint hints of repeated structure.
        further_limits: limits on the usage of other resources.
        cutoff: upper bound of the objective; a problem all of whose choices cost more is
            infeasible.
    """

    nodes: tuple[ProblemNode, ...]
    edges: tuple[Edge, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    usage_limit: float = np.inf
    repeats: tuple[Repeat, ...] = ()
    further_limits: tuple[UsageLimit, ...] = ()
    cutoff: float = np.inf

    def __post_init__(self) -> None:
        _validate_nodes(self.nodes)
        _validate_edges(self.nodes, self.edges)
        _validate_ties(self.nodes, self.ties)
        if np.isnan(self.cutoff):
            raise ProblemError("cutoff is NaN; give a number, or leave it out for no cut-off")
        for number, limit in enumerate(self.further_limits):
            _validate_limit(self, limit, f"further limit {number}")
        self._validate_usage()

    def _validate_usage(self) -> None:
        """Refuse a limit that is no number, and usage whose sums would be rounded."""
        if np.isnan(self.usage_limit):
            raise ProblemError("usage_limit is NaN; give a number, or leave it out for no limit")
        limited = (x for x in self.resources if np.isfinite(x.limit))
        most = max((self._most_used(x, _largest) for x in limited), default=0.0)
        if most >= MAX_USAGE:
            raise ProblemError(
                f"usage at one time can reach {most:.3g}, and sums are exact only below "
                f"{MAX_USAGE:.3g}; count usage in larger units"
            )

    def with_limit(self, usage_limit: float) -> "Problem":
        """The problem under another usage limit; what does not depend on it is not made again."""
        found = copy(self)
        for name in ("resources", "can_bind"):
            vars(found).pop(name, None)
        object.__setattr__(found, "usage_limit", usage_limit)
        Problem._validate_usage(found)
        return found

    def objective(self, choice: Sequence[int] | IntArray) -> float:
        """Price of a choice per node; ties and the usage limit are not checked."""
        return float(self.prices(choice).sum())

    def prices(self, choice: Sequence[int] | IntArray) -> FloatArray:
        """Prices of a choice at each node and then at each edge, shape [N + E]."""
        listed, picks = self._flat_arrays, np.asarray(choice, dtype=np.intp)
        assert picks.shape == listed.starts.shape, "one strategy per node"
        rows = listed.labels[listed.rows + picks[listed.sources]]
        cols = listed.labels[listed.cols + picks[listed.targets]]
        paid = listed.prices[listed.matrices + rows * listed.widths + cols]
        for i, prices in listed.apart.items():
            pair = int(rows[i]), int(cols[i])
            paid[i] = prices.price(*pair) if isinstance(prices, ShortestPathCost) else prices[pair]
        return np.concatenate((listed.costs[listed.starts + picks], paid))

    @cached_property
    def has_path_costs(self) -> bool:
        """True if some edges have path costs instead of a matrix."""
        return any(isinstance(edge.prices, ShortestPathCost) for edge in self.edges)

    def needs_paths(self, settings: SolverSettings) -> bool:
        """True if the matrix of a path cost is too large; methods that need one cannot be used."""
        paths = (e.prices for e in self.edges if isinstance(e.prices, ShortestPathCost))
        most = max((path.num_states for path in paths), default=0)
        return most > settings.max_matrix_states

    @cached_property
    def num_prices(self) -> int:
        """Entries of the matrices of all edges."""
        return sum(edge.prices.shape[0] * edge.prices.shape[1] for edge in self.edges)

    @cached_property
    def min_price(self) -> float:
        """Lower bound of the price of every choice: the least price of each node and edge."""
        return sum(self._least_prices)

    @cached_property
    def min_negative_price(self) -> float:
        """Lower bound of the sum of the negative prices of every choice; at most 0."""
        return sum(min(price, 0.0) for price in self._least_prices)

    @cached_property
    def _least_prices(self) -> tuple[float, ...]:
        """The least price of each node and then of each edge."""
        # Paths have no negative price.
        known = {
            number: 0.0 if isinstance(a, ShortestPathCost) else float(a.min(initial=np.inf))
            for number, a in self._distinct_prices.items()
        }
        return tuple(known[id(array)] for array in self._all_prices)

    @cached_property
    def max_price(self) -> float:
        """Upper bound of the price of every allowed choice."""
        known = {
            number: a.max_price if isinstance(a, ShortestPathCost) else _largest(a)
            for number, a in self._distinct_prices.items()
        }
        return sum(known[id(array)] for array in self._all_prices)

    @property
    def _all_prices(self) -> Iterator[FloatArray | ShortestPathCost]:
        """The prices of each node and then of each edge."""
        return chain((node.cost for node in self.nodes), (edge.prices for edge in self.edges))

    @cached_property
    def _distinct_prices(self) -> dict[int, FloatArray | ShortestPathCost]:
        """The prices of nodes and edges by id, those that are shared once."""
        return {id(array): array for array in self._all_prices}

    @cached_property
    def _flat_arrays(self) -> "_FlatArrays":
        costs, starts = _concatenated([node.cost for node in self.nodes])
        labels, places = _concatenated([x for edge in self.edges for x in (edge.rows, edge.cols)])
        apart = {i: e.prices for i, e in enumerate(self.edges) if _is_large(e.prices)}
        empty = np.zeros((0, 0))
        given = [empty if i in apart else e.cost for i, e in enumerate(self.edges)]
        prices, matrices = _concatenated(given)
        most = max((edge.prices.shape[1] for edge in self.edges), default=0)
        return _FlatArrays(
            costs,
            starts,
            labels.astype(np.intp),
            places[0::2],
            places[1::2],
            # Edges without a matrix here read any of these entries.
            np.append(prices, np.zeros(most + 1)),
            matrices,
            np.array([matrix.shape[1] for matrix in given], dtype=np.intp),
            np.array([edge.source for edge in self.edges], dtype=np.intp),
            np.array([edge.target for edge in self.edges], dtype=np.intp),
            apart,
        )

    @cached_property
    def peak_times(self) -> IntArray:
        """Times at which the usage can peak, ascending, shape [T].

        Usage only grows at the start of an interval, so the starts suffice; of several starts with
        no end between them only the last is needed.
        """
        intervals = [node.interval for node in self.nodes]
        intervals += [self.edges[i].interval for i in self.using_edges]
        spans = [(first, last) for first, last in intervals if first < last]
        starts = np.unique(np.array([first for first, _ in spans], dtype=np.intp))
        ends = np.array([last for _, last in spans], dtype=np.intp)
        ends_per_start = np.bincount(
            np.searchsorted(starts, ends, side="left") - 1, minlength=len(starts)
        )
        return starts[ends_per_start > 0]

    @cached_property
    def peak_spans(self) -> IntArray:
        """Span [first, last) of each node in `peak_times`, shape [N, 2]."""
        return self._spans(node.interval for node in self.nodes)

    def _spans(self, intervals: Iterable[tuple[int, int]]) -> IntArray:
        """Spans in `peak_times` of some intervals, shape [n, 2]."""
        listed = np.array([*intervals], dtype=np.intp).reshape(-1, 2)
        return np.searchsorted(self.peak_times, listed)

    @cached_property
    def resources(self) -> tuple[UsageLimit, ...]:
        """Every limited resource: that of `usage_limit`, then those of `further_limits`."""
        nodes = {i: node.usage for i, node in enumerate(self.nodes)}
        edges = {i: edge.usage for i, edge in enumerate(self.edges) if edge.usage is not None}
        return (UsageLimit(self.usage_limit, nodes, edges), *self.further_limits)

    @property
    def has_negative_limit(self) -> bool:
        """True if no choice can satisfy a limit, because usage is at least 0."""
        return min(limit.limit for limit in self.resources) < 0

    @cached_property
    def tie_heads(self) -> IntArray:
        """The first node of each node's tie, shape [N]; a node without a tie is its own."""
        heads = np.arange(len(self.nodes))
        for group in self.ties:
            heads[list(group)] = min(group)
        return heads

    @cached_property
    def using_edges(self) -> tuple[int, ...]:
        """The edges that use a resource, ascending."""
        used = {i for limit in self.further_limits for i in limit.edges}
        used |= {i for i, edge in enumerate(self.edges) if edge.usage is not None}
        return tuple(sorted(used))

    def peak_usage(self, choice: Sequence[int] | IntArray) -> float:
        """Largest usage over time, of a choice per node; 0 where nothing is alive."""
        if self.using_edges:
            return self._peak_of(self.resources[0], *self._entries_of(choice))
        return _peak(self.uses(choice), self.peak_spans, len(self.peak_times))

    def peaks(self, choice: Sequence[int] | IntArray) -> FloatArray:
        """Largest usage over time of each of `resources`, of a choice per node."""
        entries = self._entries_of(choice)
        further = [self._peak_of(limit, *entries) for limit in self.further_limits]
        return np.array([self.peak_usage(choice), *further])

    def _entries_of(
        self, choice: Sequence[int] | IntArray
    ) -> tuple[Callable[[int, FloatArray], float], Callable[[int, FloatArray], float]]:
        """Functions that look up the entry of a choice in the usage of a node, and of an edge."""

        def of_edge(i: int, usage: FloatArray) -> float:
            edge = self.edges[i]
            return float(usage[edge.rows[choice[edge.source]], edge.cols[choice[edge.target]]])

        return lambda i, usage: float(usage[choice[i]]), of_edge

    def _peak_of(
        self,
        limit: UsageLimit,
        of_node: Callable[[int, FloatArray], float],
        of_edge: Callable[[int, FloatArray], float],
    ) -> float:
        """Largest usage of a resource over time, given what each node and edge uses."""
        spans = (
            self.peak_spans[[*limit.nodes]].reshape(-1, 2),
            self._spans(self.edges[i].interval for i in limit.edges),
        )
        uses = [of_node(i, usage) for i, usage in limit.nodes.items()]
        uses += [of_edge(i, usage) for i, usage in limit.edges.items()]
        return _peak(np.array(uses), np.concatenate(spans), len(self.peak_times))

    def uses(self, choice: Sequence[int] | IntArray) -> FloatArray:
        """Usage of each node while it is alive, of a choice per node, shape [N]."""
        usage, starts = self._usage
        return usage[starts + np.asarray(choice, dtype=np.intp)]

    @cached_property
    def _usage(self) -> tuple[FloatArray, IntArray]:
        return _concatenated([node.usage for node in self.nodes])

    @cached_property
    def can_bind(self) -> bool:
        """True if some choice exceeds a usage limit."""
        limited = (x for x in self.resources if x.limit < np.inf)
        return any(self._most_used(x, np.max) > x.limit for x in limited)

    def _most_used(self, limit: UsageLimit, largest: Callable[[FloatArray], float]) -> float:
        """Peak of a resource if each node and edge has the largest of its usages."""
        # Arrays that are shared are read once.
        arrays = (*limit.nodes.values(), *limit.edges.values())
        known = {key: float(largest(x)) for key, x in {id(x): x for x in arrays}.items()}

        def known_largest(_: int, usage: FloatArray) -> float:
            return known[id(usage)]

        return self._peak_of(limit, known_largest, known_largest)

    def is_feasible(self, choice: Sequence[int] | IntArray) -> bool:
        """True if a choice satisfies the ties and all limits, and has a finite price."""
        return self.fits(choice) and self.objective(choice) <= self.cutoff

    def fits(self, choice: Sequence[int] | IntArray) -> bool:
        """True if a choice satisfies the ties and the usage limits, and has a finite price."""
        tied = all(len({int(choice[i]) for i in group}) == 1 for group in self.ties)
        if not tied or not np.isfinite(self.objective(choice)):
            return False
        limits = np.array([x.limit for x in self.resources])
        return bool((self.peaks(choice) <= limits).all())


def _peak(uses: FloatArray, spans: IntArray, num_times: int) -> float:
    """Largest sum over time of amounts, shape [n], that are each alive in a span, shape [n, 2]."""
    first, last = spans.T
    alive = first < last
    if not alive.any():
        return 0.0
    if np.isinf(uses[alive]).any():
        return float("inf")
    grows = np.bincount(first[alive], weights=uses[alive], minlength=num_times + 1)
    falls = np.bincount(last[alive], weights=uses[alive], minlength=num_times + 1)
    return float(np.cumsum(grows - falls)[:-1].max())


def _is_large(prices: FloatArray | ShortestPathCost) -> bool:
    return isinstance(prices, ShortestPathCost) or prices.size > _LARGE_ENTRIES


def _largest(values: FloatArray) -> float:
    """The largest finite value, at least 0."""
    return float(values[np.isfinite(values)].max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class _FlatArrays:
    """A problem as flat arrays, to price a choice with few calls of numpy.

    Attributes:
        costs: costs of all nodes.
        starts: offset of the costs of each node in `costs`, shape [N].
        labels: rows and columns of all edges.
        rows: offset of the rows of each edge in `labels`, shape [E].
        cols: offset of the columns of each edge in `labels`, shape [E].
        prices: entries of all matrices that are not large, row by row.
        matrices: offset of the matrix of each edge in `prices`, shape [E].
        widths: number of its columns, shape [E]; 0 where there is none.
        sources: first node of each edge, shape [E].
        targets: second node of each edge, shape [E].
        apart: path costs and large matrices, which are not copied, by the number of the edge.
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
    apart: dict[int, FloatArray | ShortestPathCost]


def _concatenated(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], IntArray]:
    """Concatenate arrays, shared ones once; return the offset of each as well."""
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


def _validate_nodes(nodes: Sequence[ProblemNode]) -> None:
    sound: set[tuple[int, int]] = set()
    for i, node in enumerate(nodes):
        # Arrays that nodes share are checked once.
        shared = (id(node.cost), id(node.usage))
        if shared not in sound:
            _validate_node(node, f"node {i} {node.name!r}")
            sound.add(shared)


def _validate_node(node: ProblemNode, where: str) -> None:
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
        raise ProblemError(f"{where} has a negative usage; usage is at least 0")
    _validate_whole(node.usage, where)


def _validate_whole(usage: FloatArray, where: str) -> None:
    if (np.rint(usage) != usage).any():
        raise ProblemError(
            f"{where} has a usage that is no whole number; count usage in units such as bytes, so "
            "that sums are exact"
        )


def _validate_edges(nodes: Sequence[ProblemNode], edges: Sequence[Edge]) -> None:
    sound: set[tuple[int, int, int]] = set()
    for i, edge in enumerate(edges):
        if not (0 <= edge.source < len(nodes) and 0 <= edge.target < len(nodes)):
            raise ProblemError(f"{_where(i, edge)} names a node that does not exist")
        if edge.source == edge.target:
            where = _where(i, edge)
            raise ProblemError(f"{where} joins a node with itself; add the price to the node")
        for index, end in ((edge.rows, edge.source), (edge.cols, edge.target)):
            if len(index) != nodes[end].num_strategies:
                where = _where(i, edge)
                raise ProblemError(f"{where} does not index every strategy of node {end}")
        # Arrays that edges share are checked once.
        shared = (id(edge.prices), id(edge.rows), id(edge.cols))
        if shared not in sound:
            _validate_prices(edge, _where(i, edge))
            sound.add(shared)
        if edge.usage is not None:
            _validate_edge_usage(edge, edge.usage, _where(i, edge))


def _validate_prices(edge: Edge, where: str) -> None:
    for index, size in zip((edge.rows, edge.cols), edge.prices.shape, strict=True):
        if len(index) and not (index.min() >= 0 and index.max() < size):
            raise ProblemError(f"{where} indexes outside its cost matrix")
    given = edge.prices.steps[2] if isinstance(edge.prices, ShortestPathCost) else edge.prices
    # The least entry is NaN if any entry is; these matrices can be large.
    if not given.min(initial=np.inf) > -np.inf:
        raise ProblemError(f"{where} has a NaN or -inf cost; costs are numbers or +inf")


def _validate_edge_usage(edge: Edge, usage: FloatArray, where: str) -> None:
    if isinstance(edge.prices, ShortestPathCost):
        raise ProblemError(
            f"{where} has a usage but no matrix of prices; give its prices as a matrix, "
            "`ShortestPathCost.dense`"
        )
    if usage.shape != edge.prices.shape:
        raise ProblemError(
            f"{where} has prices of shape {edge.prices.shape} but usage of shape {usage.shape}"
        )
    if not (usage >= 0).all():
        raise ProblemError(f"{where} has a negative or NaN usage; usage is at least 0")
    _validate_whole(usage, where)


def _validate_limit(problem: Problem, limit: UsageLimit, where: str) -> None:
    if np.isnan(limit.limit):
        raise ProblemError(f"{where} is NaN; give a number, or leave it out for no limit")
    for items, what in ((limit.nodes, "node"), (limit.edges, "edge")):
        size = len(problem.nodes) if what == "node" else len(problem.edges)
        missing = [i for i in items if not 0 <= i < size]
        if missing:
            raise ProblemError(f"{where} names {what} {missing[0]}, which does not exist")
    for i, usage in limit.nodes.items():
        if usage.shape != problem.nodes[i].cost.shape or not (usage >= 0).all():
            raise ProblemError(
                f"{where} needs a usage of at least 0 for each of the "
                f"{problem.nodes[i].num_strategies} strategies of node {i}"
            )
        _validate_whole(usage, f"{where} of node {i}")
    for i, usage in limit.edges.items():
        _validate_edge_usage(problem.edges[i], usage, f"{where} of {_where(i, problem.edges[i])}")


def _where(i: int, edge: Edge) -> str:
    return f"edge {i} ({edge.source} -> {edge.target})"


def _validate_ties(nodes: Sequence[ProblemNode], ties: Sequence[Sequence[int]]) -> None:
    seen: set[int] = set()
    for group in ties:
        if seen & set(group) or len(set(group)) != len(group):
            raise ProblemError(f"tie {tuple(group)} repeats a node; ties must be disjoint")
        seen |= set(group)
        if len({nodes[i].num_strategies for i in group}) > 1:
            raise ProblemError(f"tie {tuple(group)} joins nodes with different strategy counts")
