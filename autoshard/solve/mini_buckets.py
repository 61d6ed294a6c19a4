"""Mini-bucket relaxation of networks that are too wide for elimination.

TRW-S messages move most of the price out of the links. The remaining prices are not negative, so
a network without some of its links gives a lower bound, and after good messages most links have
small prices. Without the links of least prices, the treewidth is small enough for elimination,
which bounds every strategy. These bounds rule out most strategies, so the next relaxation drops
fewer links, until it drops none and is exact. (Mini-buckets with cost shifting: Ihler et al.,
UAI 2012.)

Elimination orders are weighted min-fill (Kjaerulff, Aalborg R-90-09, 1990): the next variable is
the one whose fill-in links have the least weight. Similar orders can differ a thousandfold in work,
so several are computed with random factors on the weights and the cheapest is taken. Variables with
equal neighbourhoods have equal factors, so that repeated parts of a network are eliminated in the
same way and their tables are computed once.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log, prod
from random import Random

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.solve.elimination import Elimination
from autoshard.solve.local_search import CoordinateDescent
from autoshard.solve.network import Link, Network
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.settings import DEFAULT_EFFORT, Effort
from autoshard.solve.trws import TRWS

_NOISE = 0.4
_COLOR_ROUNDS = 3
"""Rounds of colour refinement: the distance up to which neighbourhoods are compared."""
_MANY_NEIGHBOURS = 48
"""Number of neighbours above which the fill-in of a variable is estimated."""

Neighbours = Mapping[int, set[int]]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of elimination.

    Attributes:
        variables: all variables in order.
        work: additions that it takes, if strategies are not merged into classes.
        entries: of all tables together.
    """

    variables: tuple[int, ...]
    work: float
    entries: float


def best_order(
    sizes: Mapping[int, int], neighbours: Neighbours, tries: int, *, effort: Effort = DEFAULT_EFFORT
) -> Order:
    """The cheapest of some elimination orders; deterministic.

    Args:
        sizes: number of strategies of each variable.
        neighbours: of each variable.
        tries: number of orders to compare.
        effort: limits of work, and when to stop.
    """
    colors = _refined_colors(sizes, neighbours)
    orders = []
    for number in range(tries):
        rng = Random(number)  # noqa: S311  nothing secret
        factors = {c: 1.0 + (_NOISE * rng.random() if number else 0.0) for c in colors.values()}
        effort.check()
        orders.append(_order(sizes, neighbours, {v: factors[c] for v, c in colors.items()}))
    return min(orders, key=lambda order: order.work)


def _refined_colors(sizes: Mapping[int, int], neighbours: Neighbours) -> dict[int, int]:
    """Colour refinement (Weisfeiler-Leman): equal numbers for equal neighbourhoods."""
    colors: dict[int, int] = dict(sizes)
    for _ in range(_COLOR_ROUNDS):
        known: dict[tuple[int, ...], int] = {}
        signatures = {v: (colors[v], *sorted(colors[w] for w in neighbours[v])) for v in colors}
        colors = {v: known.setdefault(s, len(known)) for v, s in signatures.items()}
    return colors


def _order(sizes: Mapping[int, int], neighbours: Neighbours, factors: Mapping[int, float]) -> Order:
    around = {v: set(near) for v, near in neighbours.items()}
    weights = {v: log(size) for v, size in sizes.items()}

    def fill_in(v: int) -> float:
        near = around[v]
        if len(near) > _MANY_NEIGHBOURS:
            return factors[v] * len(near) ** 3
        pairs = combinations(near, 2)
        return factors[v] * sum(weights[a] * weights[b] for a, b in pairs if b not in around[a])

    keys = {v: fill_in(v) for v in around}
    heap = [(key, v) for v, key in keys.items()]
    heapq.heapify(heap)
    variables, work, entries = [], 0.0, 0.0
    while heap:
        key, v = heapq.heappop(heap)
        if keys.get(v) != key:
            continue
        near = around.pop(v)
        del keys[v]
        variables.append(v)
        entries += (size := prod((float(sizes[w]) for w in near), start=1.0))
        work += size * sizes[v]
        changed = set(near)
        for w in near:
            around[w].discard(v)
            if not near - around[w] <= {w}:
                around[w] |= near - {w}
                changed |= around[w]
        for w in changed:
            keys[w] = fill_in(w)
            heapq.heappush(heap, (keys[w], w))
    return Order(tuple(variables), work, entries)


_NUM_BATCHES = 12
"""Number of batches in which links are tried that rank below the first one that did not fit."""


def solve_by_mini_buckets(reduced: ReducedProblem) -> None:
    """Solve a network without usage, or bound it and drop strategies.

    Args:
        reduced: the reduced problem.
    """
    state, settings = reduced.state, reduced.state.settings
    work = settings.mini_bucket_work
    for _ in range(settings.mini_bucket_rounds):
        if (
            reduced.done
            or state.closed
            or work > settings.max_elimination_work
            or reduced.network.num_prices < settings.mini_bucket_min_entries
        ):
            return
        state.enter("pass messages")
        trws = TRWS(reduced)
        least = trws.run(settings.mini_bucket_trws_share)
        if state.closed:
            return
        state.enter("solve a mini-bucket relaxation")
        before, gap = reduced.network.num_strategies, state.objective - state.bound
        left, slack = trws.remaining()
        part = MiniBucketRelaxation(left, work, cutoff=max(gap, slack), effort=state.effort)
        bounds = part.solve(slack)
        if bounds is None:
            return
        state.count("mini_buckets.rounds")
        state.count("mini_buckets.links", float(part.num_left_out))
        reduced.raise_bound(part.bound)
        better = CoordinateDescent(reduced.network, effort=state.effort).improve(part.picks)
        reduced.offer(better)
        if state.closed:
            return
        reduced.prune({v: np.maximum(least[v], bounds[v]) for v in bounds})
        reduced.reduce()
        closed = (
            state.objective - state.bound <= (1.0 - settings.mini_bucket_min_gain) * gap < np.inf
        )
        closed = closed or state.objective < np.inf == gap
        if (
            not closed
            and reduced.network.num_strategies > (1.0 - settings.mini_bucket_min_gain) * before
        ):
            work *= settings.mini_bucket_growth


class MiniBucketRelaxation:
    """A network with as many of its links as elimination can solve within a limit of work.

    Args:
        network: no price of its links is negative, up to rounding.
        work: largest number of additions.
        cutoff: upper limit of prices that matter.
        effort: limits of work, and when to stop.

    Attributes:
        bound: lower bound of all choices of the network.
        picks: a position per variable that attains it in the relaxation.
        num_left_out: number of links that are not in the relaxation.
    """

    def __init__(
        self, network: Network, work: float, *, cutoff: float, effort: Effort = DEFAULT_EFFORT
    ) -> None:
        self.bound = -float("inf")
        self.picks: dict[int, int] = {}
        self._network = network
        self._work = work
        self._effort, self._settings = effort, effort.settings
        self._sizes = {v: len(x.cost) for v, x in network.variables.items()}
        weights = {(u, v): _weight(link, cutoff) for u, v, link in network.pairs()}
        self._links = sorted(weights, key=lambda pair: (-weights[pair], pair))
        self._kept = self._select_links()
        self.num_left_out = len(self._links) - len(self._kept)

    def solve(self, slack: float) -> dict[int, FloatArray] | None:
        """Solve the relaxation.

        Args:
            slack: upper bound of rounding errors, subtracted from bounds.

        Returns:
            a lower bound of all choices with each strategy of each variable, shape [S]; None if
            tables would be too large.
        """
        part, kept = self._network.copy(), set(self._kept)
        for u, v in self._links:
            if (u, v) not in kept:
                values = part.links[u][v].dense()
                part.constant += float(values.min())
                part.disconnect(u, v)
        order = self._order(self._kept, self._settings.many_orders)
        plan = Elimination.compile(part, order=order.variables, effort=self._effort)
        if plan is None:
            return None
        costs = {v: x.cost for v, x in part.variables.items()}
        result = plan.evaluate(costs)
        self.bound, self.picks = result.value - slack, result.picks
        marginals = plan.min_marginals(result)
        return {v: bounds - slack for v, bounds in marginals.items()}

    def _select_links(self) -> list[tuple[int, int]]:
        """The most important links that fit; then batches of less important ones that fit."""
        if self._fits(self._links, self._settings.many_orders):
            return self._links
        low, high = 0, len(self._links)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(self._links[:middle]) else (low, middle)
        kept, rest = self._links[:low], self._links[low:]
        size = max(1, -(-len(rest) // _NUM_BATCHES))
        for start in range(0, len(rest), size):
            more = [*kept, *rest[start : start + size]]
            kept = more if self._fits(more) else kept
        return kept

    def _fits(self, links: Iterable[tuple[int, int]], tries: int | None = None) -> bool:
        order = self._order(links, tries or self._settings.few_orders)
        return order.work <= self._work and order.entries <= self._settings.mini_bucket_entries

    def _order(self, links: Iterable[tuple[int, int]], tries: int) -> Order:
        neighbours: dict[int, set[int]] = {v: set() for v in self._sizes}
        for u, v in links:
            neighbours[u].add(v)
            neighbours[v].add(u)
        return best_order(self._sizes, neighbours, tries, effort=self._effort)


def _weight(link: Link, cutoff: float) -> float:
    """Importance of a link: the mean of its prices, clipped at the cutoff."""
    return float(np.minimum(link.dense(), cutoff).mean())
