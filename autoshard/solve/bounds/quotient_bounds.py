"""TRW-S on classes of equal nodes, without limits, and bounds of strategies by a spanning forest.

`trws` has TRW-S on the single variables of a reduced network, with prices on usage.

Messages move prices between edge classes and node classes without changing the price of any
choice; the sum of all least prices is then a lower bound. Forward and backward passes alternate
(sequential tree-reweighted message passing, TRW-S; Kolmogorov, IEEE TPAMI 28:1568, 2006), and
the bound never decreases. All groups of a run share their messages.

Prices travel slowly along long chains: each sweep changes the messages nearly as the last one did.
So a sweep starts with the last change once more, enlarged; if the bound falls, this is undone.

A bound by strategy from the prices of a single node class is weak, because the difference between
two strategies is spread over neighbouring classes. Min-marginals over a spanning forest of edge
classes are stronger.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.bounds.min_plus_table import MinPlusTable
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.bounds.quotient_graph import QuotientGraph
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_EPSILON = 2.0**-50
_MORE_MOMENTUM = 1.5
_LESS_MOMENTUM = 0.3
"""Factors of the momentum after a sweep that profited from it, and after one that did not."""


@dataclass(frozen=True, slots=True, eq=False)
class StrategyClasses:
    """Classes of the strategies of a node class with equal prices on an edge class.

    Attributes:
        labels: the distinct rows or columns, ascending, shape [C].
        classes: index in `labels` of each strategy, shape [S].
        order: the strategies sorted by class, shape [S].
        starts: offset of each class in `order`, shape [C].
    """

    labels: IntArray
    classes: IntArray
    order: IntArray
    starts: IntArray

    @classmethod
    def of(cls, shown: IntArray) -> "StrategyClasses":
        """The classes of strategies with the given row or column each."""
        labels, classes = np.unique(shown, return_inverse=True)
        order = np.argsort(classes, kind="stable")
        starts = np.searchsorted(classes[order], np.arange(len(labels)))
        return cls(labels, classes, order, starts)

    def least(self, prices: FloatArray) -> FloatArray:
        """Least price of the strategies of each class, shape [C]."""
        least: FloatArray = np.minimum.reduceat(prices[self.order], self.starts)
        return least


class QuotientMessages:
    """Messages of a quotient graph, and the bound that they prove.

    A message is a price by class that is moved from an edge class to a node class.

    Args:
        graph: the problem.
        effort: limits of work, and when to stop.

    Attributes:
        graph: the problem.
        costs: price of each strategy of a node of each node class, shape [S].
        values: the message of each port, shape [C].
        port_classes: classes of strategies at each port.
        bound: proven lower bound of all choices.
    """

    def __init__(
        self, graph: QuotientGraph, costs: Sequence[FloatArray], *, effort: Effort = DEFAULT_EFFORT
    ) -> None:
        self.graph = graph
        self.costs = costs
        self.port_classes = _port_classes(graph)
        self.values = [np.zeros(len(one.labels)) for one in self.port_classes]
        self.bound = -float("inf")
        self._before: list[FloatArray] | None = None
        self._momentum = 1.0
        self._tables = _tables(graph, self.port_classes)
        self._order = sorted(
            range(len(graph.node_classes)), key=lambda p: graph.node_classes[p].nodes[0]
        )
        self._least = np.zeros(len(graph.node_classes))
        self._effort = effort

    def replace_costs(self, costs: Sequence[FloatArray]) -> None:
        """Set other costs; the messages stay, and the bound is unknown until the next sweep."""
        self.costs = costs
        self.bound = -float("inf")
        self._before = None

    def sweep(self) -> None:
        """Pass messages forward and backward, and raise the bound."""
        start, before, bound = self.values, self._before, self.bound
        self._before = start
        if before is not None:
            # Any messages prove a bound, so extrapolated ones need no justification: if their bound
            # is worse, the sweep is repeated from the last messages.
            pairs = zip(start, before, strict=True)
            self._sweep([now + self._momentum * (now - old) for now, old in pairs])
            if self.bound > bound:
                self._momentum *= _MORE_MOMENTUM
                return
            self._momentum = max(self._momentum * _LESS_MOMENTUM, 1.0)
        self._sweep(start)

    def _sweep(self, start: Sequence[FloatArray]) -> None:
        """Pass messages forward and backward from some messages; set the bound that they prove."""
        self.values = list(start)
        for node_class in self._order:
            self._effort.check()
            self._pass(node_class, backward=True)
        for node_class in reversed(self._order):
            self._effort.check()
            self._pass(node_class, backward=False)
        self.bound = self.proven(self._least)

    def proven(self, least: FloatArray) -> float:
        """Lower bound: the least price of each node, summed, minus a bound of rounding errors."""
        # Edge classes add nothing: each port receives once a sweep, after which no entry of its
        # edge classes is below zero, and sending only raises them.
        sizes = np.array([float(len(node_class.nodes)) for node_class in self.graph.node_classes])
        volume = float(sizes @ np.abs(least))
        for port, value in zip(self.graph.ports, self.values, strict=True):
            volume += port.num_edges * float(np.abs(value).max(initial=0.0))
        total = float(sizes @ least)
        return total - _EPSILON * volume if np.isfinite(total) else total

    def prices(self, node_class: int) -> FloatArray:
        """Price of each strategy of a node of a node class, with its messages, shape [S]."""
        total = self.costs[node_class].copy()
        for port in self.graph.node_classes[node_class].ports:
            total += self.graph.weight(port) * self.values[port][self.port_classes[port].classes]
        return total

    def offered(self, port: int) -> FloatArray:
        """Largest message from the edge classes of a port to its node class, shape [C]."""
        offers = []
        for edge_class, is_source in self.graph.ports[port].edge_classes:
            far = self.graph.far_end(edge_class, is_source=is_source)
            offers.append(self.through(edge_class, -self.values[far], is_source=is_source))
        # All edge classes of the port have the same message, so each must be able to pay for it.
        least: FloatArray = np.minimum.reduce(offers)
        return least

    def through(self, edge_class: int, beyond: FloatArray, *, is_source: bool) -> FloatArray:
        """Min-plus product of an edge class and prices at its other end, shape [C].

        Args:
            edge_class: number of the edge class.
            beyond: price by class of the other end.
            is_source: true for prices by class of the source, false for those of the target.
        """
        table = self._tables[edge_class]
        if isinstance(table, MinPlusTable):
            return table.rows(beyond) if is_source else table.columns(beyond)
        far, here = (
            self.graph.far_end(edge_class, is_source=x) for x in (is_source, not is_source)
        )
        states = np.full(table.num_states, np.inf)
        states[self.port_classes[far].labels] = beyond
        states = table.backwards(states) if is_source else table.forwards(states)
        return states[self.port_classes[here].labels]

    def _pass(self, node_class: int, *, backward: bool) -> None:
        """Receive messages from the ports on one side; send equal shares to the other side."""
        graph, weights = self.graph, {True: 0.0, False: 0.0}
        ports = graph.node_classes[node_class].ports
        for port in ports:
            side = graph.ports[port].backward
            weights[side] += graph.weight(port)
            if side == backward:
                offered = self.offered(port)
                self.values[port] = np.where(np.isfinite(offered), offered, 0.0)
        prices = self.prices(node_class)
        self._least[node_class] = prices.min()
        if not np.isfinite(self._least[node_class]):
            return
        # The weights of TRW-S: all that is sent together is at most what exceeds the least price,
        # so the least price, which counts in the bound, stays.
        share = 1.0 / max(*weights.values(), 1.0)
        prices -= self._least[node_class]
        for port in ports:
            if graph.ports[port].backward != backward:
                spare = self.port_classes[port].least(prices)
                sent = share * np.where(np.isfinite(spare), spare, 0.0)
                # Not in place: the messages before this sweep are kept.
                self.values[port] = self.values[port] - sent


def _port_classes(graph: QuotientGraph) -> list[StrategyClasses]:
    known: dict[int, StrategyClasses] = {}
    port_classes = []
    for port in graph.ports:
        edge_class, is_source = port.edge_classes[0]
        edge = graph.edge_classes[edge_class].edge
        shown = edge.rows if is_source else edge.cols
        if id(shown) not in known:
            known[id(shown)] = StrategyClasses.of(shown)
        port_classes.append(known[id(shown)])
    return port_classes


def _tables(
    graph: QuotientGraph, port_classes: Sequence[StrategyClasses]
) -> list[MinPlusTable | ShortestPathCost]:
    """Prices of each edge class by strategy classes of both ends, shape [C, D], or by state."""
    known: dict[tuple[int, int, int], MinPlusTable | ShortestPathCost] = {}
    tables = []
    for edge_class in graph.edge_classes:
        prices, rows, cols = (
            edge_class.edge.prices,
            port_classes[edge_class.source],
            port_classes[edge_class.target],
        )
        key, shape = (id(prices), id(rows), id(cols)), (len(rows.labels), len(cols.labels))
        if key not in known:
            if isinstance(prices, ShortestPathCost):
                known[key] = prices
            else:
                same = prices.shape == shape
                known[key] = MinPlusTable(
                    prices if same else prices[np.ix_(rows.labels, cols.labels)]
                )
        tables.append(known[key])
    return tables


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node class of a tree and the edge class to its parent; a root has none."""

    node_class: int
    parent: int = -1
    edge_class: int = -1
    is_source: bool = False
    """True if the parent is the edge class's source."""


def strategy_bounds(messages: QuotientMessages) -> tuple[float, list[FloatArray]]:
    """Lower bounds by min-marginals along a spanning forest of edge classes.

    Returns:
        a lower bound of all choices, and for each node class a lower bound of all choices with
        each strategy at one of its nodes, shape [S].
    """
    trees = list(_trees(messages))
    used = {branch.edge_class for tree in trees for branch in tree}
    least = np.zeros(len(messages.graph.node_classes))
    above: dict[int, FloatArray] = {}
    for tree in trees:
        root = tree[0].node_class
        prices = _tree_marginals(messages, tree)
        least[root] = prices[root].min()
        for node_class, price in prices.items():
            above[node_class] = price - least[root] if np.isfinite(least[root]) else price
    bound = messages.proven(least)
    for number, port in enumerate(messages.graph.ports):
        # Edges outside of the forest still cost what is left of them at this strategy. Those inside
        # are counted by the min-marginals already.
        if used.isdisjoint(edge_class for edge_class, _ in port.edge_classes):
            left = messages.offered(number) - messages.values[number]
            left = messages.graph.weight(number) * left
            above[port.node_class] += left[messages.port_classes[number].classes]
    return bound, [bound + above[p] for p in range(len(least))]


def _trees(messages: QuotientMessages) -> Iterator[list[_Branch]]:
    """A maximum spanning forest by the spread of messages; each tree from its root."""
    graph = messages.graph
    weights = [
        np.ptp(messages.values[edge_class.source]) + np.ptp(messages.values[edge_class.target])
        for edge_class in graph.edge_classes
    ]
    around: dict[int, list[_Branch]] = {p: [] for p in range(len(graph.node_classes))}
    joined = list(range(len(graph.node_classes)))

    def root_of(p: int) -> int:
        while joined[p] != p:
            joined[p] = p = joined[joined[p]]
        return p

    for edge_class in sorted(range(len(graph.edge_classes)), key=lambda b: -weights[b]):
        joining = graph.edge_classes[edge_class]
        ends = [graph.ports[port] for port in (joining.source, joining.target)]
        source, target = (end.node_class for end in ends)
        # One edge per node at both ends, so that the forest is one in the problem, too.
        sizes = {len(graph.node_classes[source].nodes), len(graph.node_classes[target].nodes)}
        sizes |= {end.num_edges for end in ends}
        if len(sizes) == 1 and root_of(source) != root_of(target):
            joined[root_of(source)] = root_of(target)
            around[source].append(_Branch(target, source, edge_class, is_source=True))
            around[target].append(_Branch(source, target, edge_class, is_source=False))
    seen: set[int] = set()
    for root in around:
        if root not in seen:
            seen.add(root)
            tree = [_Branch(root)]
            for branch in tree:
                fresh = [b for b in around[branch.node_class] if b.node_class not in seen]
                seen.update(b.node_class for b in fresh)
                tree.extend(fresh)
            yield tree


def _tree_marginals(messages: QuotientMessages, tree: list[_Branch]) -> dict[int, FloatArray]:
    """Least price of a tree by strategy of each of its node classes, shape [S]."""
    prices = {branch.node_class: messages.prices(branch.node_class) for branch in tree}
    sent: dict[int, FloatArray] = {}
    for branch in reversed(tree[1:]):
        near, _ = _ports(messages, branch)
        up = _through_branch(messages, branch, prices[branch.node_class], up=True)
        sent[branch.node_class] = up[messages.port_classes[near].classes]
        prices[branch.parent] += sent[branch.node_class]
    for branch in tree[1:]:
        _, far = _ports(messages, branch)
        with np.errstate(invalid="ignore"):
            # inf - inf: no strategy of this branch suits that one of the parent, whatever the rest
            # costs.
            rest = prices[branch.parent] - sent[branch.node_class]
        rest = np.where(np.isnan(rest), np.inf, rest)
        down = _through_branch(messages, branch, rest, up=False)
        prices[branch.node_class] += down[messages.port_classes[far].classes]
    return prices


def _ports(messages: QuotientMessages, branch: _Branch) -> tuple[int, int]:
    """The ports of a branch's edge class at the parent and at the node class itself."""
    edge_class = messages.graph.edge_classes[branch.edge_class]
    ends = edge_class.source, edge_class.target
    return ends if branch.is_source else ends[::-1]


def _through_branch(
    messages: QuotientMessages, branch: _Branch, prices: FloatArray, *, up: bool
) -> FloatArray:
    """Least price of one end of a branch plus its reparametrised edge class, by class."""
    here, there = _ports(messages, branch)
    if not up:
        here, there = there, here
    beyond = messages.port_classes[there].least(prices) - messages.values[there]
    is_source = branch.is_source == up
    return messages.through(branch.edge_class, beyond, is_source=is_source) - messages.values[here]
