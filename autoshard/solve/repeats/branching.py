"""Branch and bound over how many groups are what: groups cannot be switched in part.

The bound that prices prove is that of a mixture of choices, in which a group may be half of
one and half of another. Where groups are few, that is the largest part of the gap. What a
whole choice has and the mixture has not is a whole number of groups with some strategy at some
place. So either at most that many have it, or at least one more; and since such a limit of a
count treats all groups alike, it has a price like usage has one.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count as numbers

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.solve.cuts import cheapest_mixture
from autoshard.solve.problem import Problem
from autoshard.solve.repeats.pricing import ASKED, Counted, Point, Pricing
from autoshard.solve.repeats.runs import Run
from autoshard.solve.repeats.solver import Minimise
from autoshard.solve.repeats.watch import Watch
from autoshard.solve.search import Search

_MOST_BRANCHES = 30
_MOST_PRICES = 100
"""Prices that are asked for in all branches together, after which no other one is begun."""
_PRICES_OF_ONE = 10
_WHOLE = 1e-3
"""Share of a group that counts as rounding."""
_WORTH = 0.02
"""Share of the gap that some branches in a row must close to be followed by others."""
_PATIENCE = 12

_Counts = tuple[Counted, ...]


class Branching:
    """Raise the bound of a problem with runs whose limit binds, and find choices on the way.

    Args:
        search: of the problem; it has a choice.
        runs: runs in it.
        watch: weights to price usage by.
        minimise: solves the problem for other costs, its limit aside.
        meet: told of the choices seen in each branch, best ones first.
    """

    def __init__(
        self,
        search: Search,
        runs: Sequence[Run],
        watch: Watch,
        minimise: Minimise,
        meet: Callable[[Sequence[Point]], object],
    ) -> None:
        self._search = search
        self._problem: Problem = search.problem
        self._runs = runs
        self._watch = watch
        self._minimise = minimise
        self._meet = meet

    def run(self, bound: float, points: list[Point], prices: FloatArray) -> None:
        """Branch until the gap is closed, or branches close little of it.

        Args:
            bound: what prices prove of all choices.
            points: choices seen; new ones are added.
            prices: of usage, at which the bound is proven.
        """
        search, order = self._search, numbers()
        asked = search.statistics.get(ASKED, 0.0)
        heap: list[tuple[float, int, _Counts, FloatArray]] = [(bound, next(order), (), prices)]
        last, fruitless = search.objective - bound, 0
        for _ in range(_MOST_BRANCHES):
            least = heap[0][0] if heap else search.cutoff
            search.raise_bound(min(least, search.cutoff))
            if search.closed or not heap or least >= search.cutoff:
                return
            gap = search.objective - least
            fruitless = 0 if gap < (1.0 - _WORTH) * last else fruitless + 1
            last = min(last, gap)
            if fruitless > _PATIENCE or search.statistics.get(ASKED, 0.0) - asked > _MOST_PRICES:
                return
            bound, _, counts, prices = heapq.heappop(heap)
            branches = self._branches(counts, points)
            for new in branches:
                search.count("repeats.branches")
                proven, better = self._bound((*counts, new), points, prices)
                if max(bound, proven) < search.cutoff:
                    entry = (max(bound, proven), next(order), (*counts, new), better)
                    heapq.heappush(heap, entry)
            if not branches:
                heapq.heappush(heap, (bound, next(order), counts, prices))
                return

    def _bound(
        self, counts: _Counts, points: list[Point], prices: FloatArray
    ) -> tuple[float, FloatArray]:
        """A lower bound of the choices of a branch, and prices that prove it."""
        search, limit = self._search, self._problem.usage_limit
        pricing = Pricing(search, self._watch, self._minimise, counts=counts)
        pricing.points = points
        # Prices of counts come first.
        start = np.insert(prices, len(counts) - 1, 0.0)
        best = pricing.climb(limit, start, enough=search.cutoff, most=_PRICES_OF_ONE)
        self._meet(pricing.nearest(best))
        return pricing.bound, best

    def _branches(self, counts: _Counts, points: Sequence[Point]) -> Sequence[Counted]:
        """Two limits of a count, one of which every choice keeps, and the mixture neither.

        Of all counts that are not whole in the mixture, the one that is furthest from it; of
        equal ones, that of the place with the fewest strategies.
        """
        pricing = Pricing(self._search, self._watch, self._minimise, counts=counts)
        pricing.points = list(points)
        costs = np.array([point.cost for point in points])
        shares = cheapest_mixture(costs, pricing.excesses(self._problem.usage_limit))
        mixed = [(float(shares[i]), points[i].choice) for i in np.flatnonzero(shares).tolist()]
        best, found = (_WHOLE, 0), None
        for run in self._runs:
            for nodes in run.places.T:
                size = self._problem.nodes[int(nodes[0])].num_strategies
                have = np.zeros(size)
                for share, choice in mixed:
                    have += share * np.bincount(choice[nodes], minlength=size)
                apart = np.abs(have - np.rint(have))
                strategy = int(apart.argmax())
                key = round(float(apart[strategy]), 6), -size
                if key > best:
                    best, found = key, (nodes, strategy, int(have[strategy]))
        if found is None:
            return ()
        nodes, strategy, number = found
        return (
            Counted(nodes, strategy, number, at_least=False),
            Counted(nodes, strategy, number + 1, at_least=True),
        )
