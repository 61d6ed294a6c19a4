"""A binding usage limit over runs: prices on usage, then groups switched one by one.

Usage may peak at many times; a price on all of them would make every group a case of its
own, so a few mixtures of times are priced that treat groups alike, those at which the
choices met so far take most.

At the best prices several choices meet, some that keep the limit and cheaper ones that do
not. Since groups are alike, going from one to the other group by group ends close to it.
What groups share changes on the way, and that has a price that no mixture of prices sees:
it is proven case by case.
"""

from collections import deque
from collections.abc import Sequence
from itertools import product

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.solve.cuts import best_mixture
from autoshard.solve.problem import USAGE_TOLERANCE, Problem
from autoshard.solve.repeats.branching import Branching
from autoshard.solve.repeats.filling import Filling
from autoshard.solve.repeats.pricing import SAME, Point, Pricing
from autoshard.solve.repeats.runs import Run
from autoshard.solve.repeats.solver import SLACK, GroupSolver, Ports
from autoshard.solve.repeats.switching import between
from autoshard.solve.repeats.watch import Watch
from autoshard.solve.search import Search

_MOST_MIXTURES = 8
_MOST_RESERVES = 3
_STEEP = 1e6
"""Price of all usage that is allowed, in terms of the most that a choice can cost."""
_NUDGE = 1e-3
_ACCURACY = 1e-5
"""Of a least usage, relative."""
_MOST_MIXED = 6
_MOST_SWEPT = 7
_MOST_MET = 3
_STEEPER = 8.0
_CHEAPER = 0.8
FEW_STRATEGIES = 10_000
"""Strategies of all nodes of a problem that HiGHS closes sooner than branches over counts do."""


class PricedUsage:
    """Tell the search bounds and choices of a problem with runs whose limit binds.

    Args:
        search: of the problem; its limit is finite.
        runs: runs in it.
        solver: solves the problem for other costs, its limit aside.

    The search's warm_start begins with the best choice without a limit, which breaks it.
    """

    def __init__(self, search: Search, runs: Sequence[Run], solver: GroupSolver) -> None:
        self._search = search
        self._problem = search.problem
        self._runs = runs
        self._solver = solver
        self._num_strategies = sum(node.num_strategies for node in search.problem.nodes)
        self._watch = Watch(search.problem, runs)
        self._pricing = Pricing(search, self._watch, solver.minimise)
        for choice in search.warm_start.best_choices:
            self._pricing.see(choice)

    def run(self) -> bool:
        """Look for prices, then for choices between those that were best at them.

        Returns:
            False where no choice keeps the limit; the statistic `minimum_usage` is then the
            least limit that one keeps, if that is known.
        """
        try:
            if self._search.choice is None and not self._is_possible():
                return False
            self._search.enter("price the usage of repeated groups")
            prices = self._climb(self._problem.usage_limit)
            order = self._nearest(prices)
            self._reserve()
            self._search.enter("switch repeated groups")
            self._switch(order)
            if prices.any():
                self._look_closer(prices, order)
        finally:
            self._search.warm_start.best_choices[:] = [
                point.choice for point in self._pricing.points
            ]
        return True

    def _look_closer(self, prices: FloatArray, order: Sequence[Point]) -> None:
        ports = self._ports_apart(prices, order)
        if ports:
            self._change(prices, ports, order[0])
        self._fill(prices, order)
        if ports:
            self._split(prices, ports)
        self._branch(prices)

    def _is_possible(self) -> bool:
        """Look for a choice that keeps the limit; False if it is proven that none does.

        At a price of usage beyond all other costs, the least total shows the least usage.
        """
        search, limit, points = self._search, self._problem.usage_limit, self._pricing.points
        search.enter("find the least usage of repeated groups")
        most, rounding = _most_expensive(self._problem), limit * USAGE_TOLERANCE
        steep = _STEEP * max(most, SAME) / max(limit, SAME)
        shares = np.ones(1)
        for _ in range(_MOST_MIXTURES):
            for nudge in (0.0, _NUDGE * steep):
                if self._pricing.ask(steep * shares, slack=SLACK, nudge=nudge) is None:
                    return True
                if search.choice is not None:
                    return True
            least = min(self._problem.peak_usage(point.choice) for point in points)
            tight = steep * (least - limit) <= self._pricing.bound + _ACCURACY * steep * least
            mixed = best_mixture(self._pricing.excesses(limit))
            known = np.append(shares, np.zeros(len(mixed) - len(shares)))
            if tight or np.allclose(mixed, known):
                break
            shares = mixed
        if self._pricing.bound <= most + steep * rounding:
            return True
        if tight:
            search.statistics["minimum_usage"] = least
        return False

    def _climb(self, limit: float) -> FloatArray:
        prices = self._pricing.climb(limit, np.zeros(0), enough=float("inf"))
        self._search.raise_bound(self._pricing.bound)
        return prices

    def _reserve(self) -> None:
        """Look for choices below the limit by what those below it in all weights are above it."""
        limit = self._problem.usage_limit
        for _ in range(_MOST_RESERVES):
            within = (self._pricing.excesses(limit) <= 0).all(axis=1)
            points = [self._pricing.points[i] for i in np.flatnonzero(within)]
            peaks = [self._problem.peak_usage(point.choice) for point in points]
            over = max(peaks, default=0.0) - self._problem.usage_limit
            if self._search.closed or over <= USAGE_TOLERANCE * limit or over >= limit:
                return
            limit -= over
            self._climb(limit)

    def _nearest(self, prices: FloatArray) -> list[Point]:
        """Choices seen that are best or nearly best at some prices."""
        return self._pricing.nearest(prices)[:_MOST_MIXED]

    def _switch(self, points: Sequence[Point]) -> None:
        """Offer choices between the best one and others."""
        search = self._search
        for point in (*points, *points):
            if search.closed or search.choice is None:
                return
            for choice in between(self._problem, self._runs, point.choice, search.choice):
                search.offer(choice)

    def _fill(self, prices: FloatArray, points: Sequence[Point]) -> None:
        """Exchange groups for what groups are at other prices, near choices seen.

        Args:
            prices: where the points meet.
            points: the nearest ones first; the best on either side of the limit are taken.
        """
        search, limit = self._search, self._problem.usage_limit * float(prices.sum())
        fits = [self._paid(prices, point) <= limit for point in points]
        sides = [points[0]]
        if (not fits[0]) in fits:
            other = points[fits.index(not fits[0])]
            if not self._solver.share_alike(points[0].choice, other.choice):
                sides.append(other)
        filling = Filling(self._problem, self._runs, self._watch, check=search.check)
        search.enter("fill the room with repeated groups")
        found = search.warm_start.swap_options
        for i, (near, mode) in enumerate(product(sides, self._solver.modes)):
            if search.closed or search.choice is None:
                return
            if i == len(found):
                found.append(tuple(point.choice for point in self._sweep(prices, near, mode)))
            self._switch([self._pricing.point(choice) for choice in found[i]])
            search.offer(filling.improve(search.choice, found[i]))

    def _sweep(self, prices: FloatArray, near: Point, mode: int | None) -> list[Point]:
        """Choices that are best at multiples of some prices and share what another one does.

        Between two of them, the next one is at the price at which both cost the same, unless
        nothing is better there.
        """
        above, below = (self._near(x * prices, near, mode) for x in (1.0 / _STEEPER, _STEEPER))
        found, ends = [near, above, below], deque([(above, below)])
        while ends and len(found) < _MOST_SWEPT:
            above, below = ends.popleft()
            saved = self._paid(prices, above) - self._paid(prices, below)
            if saved <= 0 or below.cost <= above.cost:
                continue
            multiple = (below.cost - above.cost) / saved
            middle = self._near(multiple * prices, near, mode)
            line, reached = (
                point.cost + multiple * self._paid(prices, point) for point in (above, middle)
            )
            if reached < line - SAME * abs(line):
                found.append(middle)
                ends += [(above, middle), (middle, below)]
        return found

    def _paid(self, prices: FloatArray, point: Point) -> float:
        """The price of a choice's usage."""
        return float(prices @ (self._watch.matrix[: len(prices)] @ point.uses))

    def _near(self, prices: FloatArray, near: Point, mode: int | None) -> Point:
        """The best choice at some prices, of those that share what another one does."""
        self._search.check()
        choice = self._solver.near(self._pricing.priced(prices), near.choice, mode)
        return near if choice is None else self._pricing.point(choice)

    def _ports_apart(self, prices: FloatArray, points: Sequence[Point]) -> Ports:
        """What groups hand on in choices that are too large, but not in those that are not.

        On the way from one to the other, what groups hand on has to change somewhere. Where
        the former are best and the latter are not, strategies of ports show which of the two
        they go with.
        """
        limit = self._problem.usage_limit * float(prices.sum())
        small = [point for point in points if self._paid(prices, point) <= limit]
        if self._search.closed or not small:
            return {}
        self._search.enter("compare what repeated groups share")
        costs = self._pricing.priced(_CHEAPER * prices)
        return self._solver.ports_apart(costs, small[0].choice)

    def _change(self, prices: FloatArray, ports: Ports, near: Point) -> None:
        """Offer choices that change over between groups, in the best way, and keep the limit."""
        search, costs = self._search, self._pricing.priced(prices)
        search.enter("change over between repeated groups")
        num_groups = sum(len(run.instances) for run in self._runs)
        for inside_first in (True, False):
            low, high = 0, num_groups + 1
            while high - low > 1 and not search.closed:
                middle = (low + high) // 2
                choice = self._solver.changing(
                    costs, ports, near.choice, middle, inside_first=inside_first
                )
                fits = choice is not None and search.offer(choice)
                low, high = (middle, high) if fits else (low, middle)

    def _branch(self, prices: FloatArray) -> None:
        """Tell apart how many groups are what, where there is too much for HiGHS to do that."""
        search = self._search
        if search.closed or search.choice is None or self._num_strategies < FEW_STRATEGIES:
            return
        search.enter("count repeated groups")
        branching = Branching(
            search,
            self._solver.runs,
            self._watch,
            self._solver.minimise,
            lambda points: self._switch(points[:_MOST_MET]),
        )
        branching.run(self._pricing.bound, self._pricing.points, prices)

    def _split(self, prices: FloatArray, ports: Ports) -> None:
        """Raise the bound to the least of those of all cases."""
        search = self._search
        if search.closed or search.choice is None:
            return
        search.enter("tell cases of repeated groups apart")
        least = float("inf")
        for minimise in self._solver.cases(ports):
            pricing = Pricing(search, self._watch, minimise)
            pricing.climb(self._problem.usage_limit, prices, enough=min(least, search.cutoff))
            least = min(least, pricing.bound)
            if least <= search.bound:
                return
        search.raise_bound(least)


def _most_expensive(problem: Problem) -> float:
    """A price that no allowed choice exceeds."""
    arrays = [*(node.cost for node in problem.nodes), *(edge.cost for edge in problem.edges)]
    known: dict[int, float] = {}
    for array in arrays:
        if id(array) not in known:
            known[id(array)] = float(array[np.isfinite(array)].max(initial=0.0))
    return sum(known[id(array)] for array in arrays)
