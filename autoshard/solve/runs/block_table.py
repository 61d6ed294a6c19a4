"""The table of one group of a run, over its boundary and shared nodes.

Its key is a digest of its content, without names or depth. If forbidden pairs split the strategies
of a group into components (such as a block with and without activation checkpointing), the table
is the elementwise minimum of one table per component; these are far cheaper to compute.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.block_cache import (
    CachedTable,
    KeyValueStore,
    SolvedBlock,
    content_key,
)
from autoshard.solve.bounds.elimination import Elimination, Evaluation
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.network import Matrix, Network, NetworkVariable, component_labels, components
from autoshard.solve.presolve import (
    DropDominated,
    EliminateNeighbours,
    Inverse,
    Losses,
    NormalizeLinks,
    Presolve,
)
from autoshard.solve.problem import Edge, Problem
from autoshard.solve.runs.find import Run, group_edges
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_MAX_ENTRIES = 1 << 22
"""Entries of the table of one group."""

Component = Mapping[int, BoolArray]
"""Mask of the strategies of some nodes in a component; those of other nodes are not restricted."""

_MAX_COMPONENTS = 8
_LEAST_SHARE = 0.25
"""Least share of the nodes that components must restrict to be worth separate tables."""


def find_components(
    problem: Problem, nodes: Sequence[int], edges: Iterable[Edge]
) -> tuple[Component, ...]:
    """The components of some nodes: every choice of finite price is in one of them.

    Args:
        problem: the problem.
        nodes: the nodes.
        edges: edges of the problem; edges to other nodes are ignored.

    Returns:
        the components; a single empty one if separate tables are not worth it.
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
    if not 1 < prod(map(len, ways)) <= _MAX_COMPONENTS:
        return ({},)
    # No splitting edge joins two of these sets of nodes, so each may be in any of its own
    # components: what a group can be in is every combination.
    return tuple({v: s for way in ways for v, s in way.items()} for ways in product(*ways))


def _parts(cost: FloatArray) -> tuple[int, IntArray]:
    """Count connected components of the finite entries of a matrix; number each row and column.

    Rows and columns without a finite price are components of their own that are not counted.
    """
    finite = np.isfinite(cost)
    num_rows, num_cols = cost.shape
    if finite.all(axis=1).any() and finite.any(axis=1).all():
        return 1, np.zeros(num_rows + num_cols, dtype=np.intp)
    rows, cols = np.nonzero(finite)
    parts = component_labels(num_rows + num_cols, rows, num_rows + cols)
    return len(np.intersect1d(parts[:num_rows], parts[num_rows:])), parts


def _ways(
    splitting: Sequence[tuple[Edge, IntArray]], place: Mapping[int, int], sizes: Sequence[int]
) -> list[list[Component]]:
    """The components of each set of nodes that splitting edges join."""
    size, first, second = sum(sizes), [], []
    for edge, parts in splitting:
        num_rows = edge.prices.shape[0]
        for v, seen in ((edge.source, edge.rows), (edge.target, num_rows + edge.cols)):
            first.append(place[v] + np.arange(len(seen)))
            second.append(size + parts[seen])
        size += int(parts.max()) + 1
    if not splitting:
        return []
    # One graph of strategies and parts of matrices, in which a strategy is linked to the part that
    # it has in each matrix. Strategies of two nodes that are never in one component exclude each
    # other.
    joined = component_labels(size, np.concatenate(first), np.concatenate(second))
    spans = {v: joined[place[v] : place[v] + n] for v, n in zip(place, sizes, strict=True)}
    return [
        [
            {v: spans[v] == part for v in piece}
            # A component in which some node has no strategy has no choice of finite price.
            for part in sorted(set.intersection(*(set(spans[v].tolist()) for v in piece)))
        ]
        for piece in _pieces([edge for edge, _ in splitting])
        if len(piece) >= _LEAST_SHARE * len(place)
    ]


def _pieces(edges: Sequence[Edge]) -> list[list[int]]:
    """Connected components of the nodes of some edges, ascending."""
    nodes = sorted({v for edge in edges for v in (edge.source, edge.target)})
    ends = np.searchsorted(nodes, [(edge.source, edge.target) for edge in edges])
    return [[nodes[i] for i in piece] for piece in components(len(nodes), ends.tolist())]


@dataclass(frozen=True, slots=True)
class PresolveMemo:
    """Results of reductions, by content."""

    products: dict[bytes, Matrix] = field(default_factory=dict)
    losses: dict[bytes, Losses] = field(default_factory=dict)


class RunBlock:
    """The second group of a run, its edges, and its entries in a store of tables.

    Args:
        problem: the problem.
        run: a run of it.
        store: of tables; None computes every table.
        known: memo of reductions.
        effort: limits of work, and when to stop.

    Attributes:
        run: the run.
        known: memo of reductions.
        effort: limits of work, and when to stop.
        edges: edges inside the group, to the previous group and to shared nodes.
        num_reused: number of tables found in the store.
        num_solved: number of tables computed.
    """

    def __init__(
        self,
        problem: Problem,
        run: Run,
        store: KeyValueStore | None = None,
        known: PresolveMemo | None = None,
        effort: Effort = DEFAULT_EFFORT,
    ) -> None:
        self.run, self.effort = run, effort
        self.known = PresolveMemo() if known is None else known
        self._problem = problem
        self._store = store
        group, before, shared_nodes = run.instances[1], run.before_of(1), run.shared_nodes
        self._members = (*before, *shared_nodes, *group)
        self.edges = group_edges(problem, run)
        self.num_reused = self.num_solved = 0

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Components of the nodes of a group that are not boundary nodes."""
        group, boundary = self.run.instances[1], set(self.run.boundary)
        own = [v for p, v in enumerate(group) if p not in boundary]
        return find_components(self._problem, own, self.edges)

    def num_strategies(self, v: int) -> int:
        """Number of strategies of a node."""
        return self._problem.nodes[v].num_strategies

    def kept_table(self, costs: Mapping[int, FloatArray], view: bytes) -> CachedTable | None:
        """The store's entry for a table of the block; None without a store.

        Args:
            costs: shape [S] for each node of the group.
            view: key of the table among those of the same block and costs.
        """
        if self._store is None:
            return None
        return CachedTable(self._store, content_key(self._key(costs).encode(), view))

    def count(self, *, reused: bool) -> None:
        """Count a table."""
        self.num_reused += reused
        self.num_solved += not reused

    def report(self) -> SolvedBlock:
        """The block's statistics."""
        group = self.run.instances[1]
        return SolvedBlock(
            nodes=self.run.instances[0],
            num_groups=len(self.run.instances),
            key=self._key({v: self._problem.nodes[v].cost for v in group}),
            num_reused=self.num_reused,
            num_solved=self.num_solved,
        )

    def _key(self, costs: Mapping[int, FloatArray]) -> str:
        """Digest of the group at given costs."""
        prices = (_content(costs[v]) for v in self.run.instances[1])
        return content_key(self._links, *prices)

    @cached_property
    def _links(self) -> bytes:
        """Digest of the group's edges."""
        place = {v: i for i, v in enumerate(self._members)}
        sizes = [self._problem.nodes[v].num_strategies for v in self._members]
        parts = [repr((self.run.boundary, len(self.run.shared_nodes), sizes)).encode()]
        known: dict[int, bytes] = {}
        for edge in self.edges:
            prices = edge.prices
            if id(prices) not in known:
                arrays = prices.steps if isinstance(prices, ShortestPathCost) else (prices,)
                known[id(prices)] = content_key(*map(_content, arrays)).encode()
            ends = repr((place[edge.source], place[edge.target], prices.shape)).encode()
            parts += [ends, known[id(prices)], _content(edge.rows), _content(edge.cols)]
        return content_key(*parts).encode()


def _content(array: NDArray[np.generic]) -> bytes:
    """Bytes of an array, the same on every machine; without its shape."""
    wide = np.dtype("<f8") if array.dtype.kind == "f" else np.dtype("<i8")
    return np.ascontiguousarray(array, wide).tobytes()


Shared = Mapping[int, int | None]
"""The strategy of shared nodes that are no axes of tables: fixed, or None for any one in every
group, which gives a lower bound."""


class BlockTable:
    """The least price of the second group of a run by strategy of its boundary and shared nodes.

    Args:
        block: the group, and its entries in the store.
        costs: shape [S] for each node of the group.
        shared: shared nodes that are no axes of the table.
        most_work: largest number of additions, for the table and with shared nodes for its powers.

    Attributes:
        run: the run.
        shared_nodes: shared nodes that are axes of the table.
        shape: of the table.
        values: prices, with one axis per boundary node of the previous group, then per boundary
            node of the group, then per shared node; None if the table would be too large.
    """

    def __init__(
        self, block: RunBlock, costs: Mapping[int, FloatArray], shared: Shared, most_work: float
    ) -> None:
        self._block, self._costs, self._shared, self._work = block, costs, shared, most_work
        self.run = run = block.run
        group = run.instances[1]
        own = [group[p] for p in run.boundary]
        self.shared_nodes = tuple(h for h in run.shared_nodes if h not in shared)
        seen = [*run.before_of(1), *own, *self.shared_nodes]
        self._place = {v: i for i, v in enumerate([*seen, *(v for v in group if v not in own)])}
        self.shape = tuple(block.num_strategies(v) for v in seen)
        fixed = [shared.get(h, -1) for h in run.shared_nodes]
        # The limit of work is part of the key: an entry may say that the table is too large, which
        # another limit would not.
        self._kept = block.kept_table(costs, repr((fixed, most_work)).encode())
        self._parts: list[_ComponentTable] | None = None
        self.values = None if self._is_too_large else self._computed()

    @property
    def _is_too_large(self) -> bool:
        """True if the table has too many entries, or axes for shared nodes and too many products.

        The table of a run is a power of this one for each state of the shared nodes.
        """
        entries, states = prod(self.shape), prod(self.shape[: len(self.run.boundary)])
        products = len(self.run.instances).bit_length() - 1
        too_much_work = bool(self.shared_nodes) and entries * states * products > self._work
        return entries > _MAX_ENTRIES or too_much_work

    def _computed(self) -> FloatArray | None:
        """The prices, from the store if it has them; None if the table would be too large."""
        found = None if self._kept is None else self._kept.find(self.shape)
        self._block.count(reused=found is not None)
        if found is not None:
            return found if found.size else None
        self._parts = self._solve()
        values = None
        if self._parts is not None:
            # Every choice of finite price is in one component, so the least of them is the least of
            # all.
            values = np.minimum.reduce([part.values for part in self._parts])
        if self._kept is not None:
            self._kept.keep(np.zeros(0) if values is None else values)
        return values

    @property
    def num_components(self) -> int:
        """Number of components of the group."""
        return len(self._block.components)

    def by_component(self) -> list[FloatArray]:
        """Prices of each component; those of the table are their minimum."""
        return [part.values for part in self._solved()]

    def interior(
        self, seen: tuple[int, ...], within: Collection[int] | None = None
    ) -> tuple[int, ...]:
        """Strategies of the nodes of a group that attain an entry of the table.

        A table from the store is computed again only if the store does not have the strategies.

        Args:
            seen: strategies of the nodes of the table's axes.
            within: components to choose from; None for all of them.
        """
        group = self.run.instances[1]
        if within is None and self._parts is None and self._kept is not None:
            sizes = [self._block.num_strategies(v) for v in group]
            found = self._kept.find_interior(seen, sizes)
            if found is not None:
                return found
        parts = self._solved()
        allowed = parts if within is None else [parts[i] for i in within]
        best = min(allowed, key=lambda part: float(part.values[seen]))
        choice = np.zeros(len(self._place), dtype=np.intp)
        for i, s in best.plan.complete(best.result, dict(enumerate(seen))).items():
            choice[i] = best.left[i][s]
        best.inverse(choice)
        strategies = tuple(int(choice[self._place[v]]) for v in group)
        if within is None and self._kept is not None:
            self._kept.keep_interior(seen, strategies)
        return strategies

    def as_batch(self, values: FloatArray | None = None) -> FloatArray:
        """One matrix per state of the shared nodes: states before the group by those after it.

        Args:
            values: prices as those of the table, which are used if None.
        """
        values = self.values if values is None else values
        assert values is not None
        number = len(self.run.boundary)
        rows, cols = prod(self.shape[:number]), prod(self.shape[number : 2 * number])
        return np.ascontiguousarray(np.moveaxis(values.reshape(rows, cols, -1), 2, 0))

    def _solved(self) -> "list[_ComponentTable]":
        """The table of each component, computed again if this table is from the store."""
        self._parts = self._parts or self._solve()
        assert self._parts is not None, "the same table was computed before"
        return self._parts

    def _solve(self) -> "list[_ComponentTable] | None":
        """The table of each component; None if one would be too large."""
        parts = []
        for component in self._block.components:
            part = self._solve_component(component)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _solve_component(self, component: Component) -> "_ComponentTable | None":
        network, effort = Network(), self._block.effort
        for v, number in self._place.items():
            labels = np.arange(self._block.num_strategies(v))
            cost = self._costs.get(v, np.zeros(len(labels)))
            network.add(number, NetworkVariable(labels, cost))
        self._connect(network)
        for v, mask in component.items():
            network.keep(self._place[v], mask)
        seen = range(len(self.shape))
        inverse = reduce_around(network, seen, self._block.known, effort=effort)
        plan = Elimination.compile(network, most_work=self._work, keep=seen, effort=effort)
        if plan is None:
            return None
        result = plan.evaluate({v: x.cost for v, x in network.variables.items()})
        left = {v: x.labels for v, x in network.variables.items()}
        return _ComponentTable(plan, result, left, inverse, plan.joint_table(result, seen))

    def _connect(self, network: Network) -> None:
        """Add the edges; one to a shared node without an axis becomes a cost of its other end."""
        place, inner = self._place, []
        for edge in self._block.edges:
            if edge.source not in place:
                network.add_cost(place[edge.target], self._paid(edge.dense(), edge.source))
            elif edge.target not in place:
                network.add_cost(place[edge.source], self._paid(edge.dense().T, edge.target))
            else:
                inner.append(replace(edge, source=place[edge.source], target=place[edge.target]))
        network.connect_all(inner)

    def _paid(self, prices: FloatArray, shared_node: int) -> FloatArray:
        """Prices of a link to a shared node without an axis, by the strategy at the other end."""
        strategy = self._shared[shared_node]
        # If each group may take another strategy of the shared node, choices are only added: the
        # least price of all is a lower bound.
        paid: FloatArray = prices.min(axis=0) if strategy is None else prices[strategy]
        return paid


@dataclass(frozen=True, eq=False)
class _ComponentTable:
    """The table of one component, with the data to invert it.

    Attributes:
        plan: the elimination that computed the table.
        result: its intermediate tables.
        left: remaining strategies of each variable of the elimination.
        inverse: converts choices of the reduced group to the whole group.
        values: the table.
    """

    plan: Elimination
    result: Evaluation
    left: Mapping[int, IntArray]
    inverse: Inverse
    values: FloatArray


def reduce_around(
    network: Network, keep: Collection[int], known: PresolveMemo, *, effort: Effort = DEFAULT_EFFORT
) -> Inverse:
    """Reduce a network exactly; some variables keep all their strategies."""
    links = NormalizeLinks()
    eliminate = EliminateNeighbours(links, keep=keep, products=known.products, effort=effort)
    dominated = DropDominated(keep=keep, losses=known.losses, effort=effort)
    # Only reductions that leave some variables alone: the others would drop strategies of those
    # that are kept, and a table has an entry for each of them.
    return Presolve((links, eliminate, dominated), effort).apply(network)
