"""Prices on usage, and the choices that are best at them.

Lagrangian relaxation (Fisher, Management Science 27:1, 1981): usage is priced instead of
limited, which gives a lower bound for every price. The best prices are found by cutting
planes, taken half way from the best point so far so that they do not swing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.cuts import best_prices
from autoshard.solve.problem import USAGE_TOLERANCE
from autoshard.solve.repeats.solver import Minimise
from autoshard.solve.repeats.watch import Watch
from autoshard.solve.search import Search

ASKED = "repeats.prices"
"""Statistic of how often prices were asked for."""
SAME = 1e-9
"""Relative difference that is taken for rounding."""
_ROUNDING = 1e-13
_MOST_PRICES = 40
_MOST_STALLED = 4
_MOST_GROWTHS = 20
_GROWTH = 4.0
_AT_EDGE = 0.999
_REACH = 4.0
_SHARE_OF_GAP = 0.1


@dataclass(frozen=True, eq=False)
class Point:
    """A choice, its price without usage, and the usage of each node, shape [N]."""

    choice: IntArray
    cost: float
    uses: FloatArray


@dataclass(frozen=True, eq=False)
class Counted:
    """A limit of how many nodes pick a strategy; nodes of one place of a run.

    Attributes:
        nodes: the nodes, shape [G].
        strategy: which strategy.
        number: how many of them pick it at most.
        at_least: whether they are so many at least instead.
    """

    nodes: IntArray
    strategy: int
    number: int
    at_least: bool

    @property
    def sign(self) -> float:
        """1 for a limit from above, -1 for one from below."""
        return -1.0 if self.at_least else 1.0

    def excess(self, choice: IntArray) -> float:
        """How far a choice is beyond the limit, negative within it."""
        return self.sign * (int((choice[self.nodes] == self.strategy).sum()) - self.number)


class Pricing:
    """Choices that were best at some prices, and the best bound that prices have proven.

    Args:
        search: of the problem; its limit is finite. It is offered all choices.
        watch: weights to price usage by; grows with the choices that are seen.
        minimise: solves the problem, or a case of it, for other costs, its limit aside.
        counts: limits of counts beside that of usage. Each has a price, before those of weights,
            of as much usage as a group takes if all of it is shared out evenly.

    Attributes:
        watch: as given.
        points: the choices seen.
        bound: of all choices that `minimise` is about and that keep the limit.
    """

    def __init__(
        self,
        search: Search,
        watch: Watch,
        minimise: Minimise,
        *,
        counts: Sequence[Counted] = (),
    ) -> None:
        self.watch = watch
        self.points: list[Point] = []
        self.bound = -float("inf")
        self._search = search
        self._problem = search.problem
        self._minimise = minimise
        self._counts = counts
        limit = max(self._problem.usage_limit, SAME)
        self._units = np.array([limit / len(counted.nodes) for counted in counts])

    def point(self, choice: IntArray) -> Point:
        """A choice with what it costs and uses, offered to the search."""
        self._search.offer(choice)
        return Point(choice, self._problem.objective(choice), self.watch.uses(choice))

    def see(self, choice: IntArray) -> Point:
        """Keep a choice; watch the times at which it breaks the limit."""
        point = self.point(choice)
        self.points.append(point)
        room = self._problem.usage_limit * (1 + USAGE_TOLERANCE)
        if self._problem.peak_usage(choice) > room:
            self.watch.add(point.uses)
        return point

    def excesses(self, limit: float) -> FloatArray:
        """Counts and weighted usage beyond limits, by point and price, shape [C, D]."""
        uses = np.array([point.uses for point in self.points])
        over = [[counted.excess(point.choice) for counted in self._counts] for point in self.points]
        beyond = np.array(over).reshape(len(self.points), len(self._counts)) * self._units
        return np.hstack((beyond, uses @ self.watch.matrix.T - limit))

    def nearest(self, prices: FloatArray) -> list[Point]:
        """The choices seen, those that are best at some prices first."""
        excess = self.excesses(self._problem.usage_limit)[:, : len(prices)]
        paid = excess @ prices + [point.cost for point in self.points]
        return [self.points[i] for i in np.argsort(paid, kind="stable")]

    def priced(self, prices: FloatArray, *, nudge: float = 0.0) -> list[FloatArray]:
        """Costs with a price for each of the weights, by node; `nudge` is one at all times."""
        num_counts = len(self._counts)
        on_usage = prices[num_counts:]
        weights = on_usage @ self.watch.matrix[: len(on_usage)]
        if nudge:
            weights = weights + nudge * self.watch.everywhere
        given = zip(self._problem.nodes, weights.tolist(), self.watch.usage, strict=True)
        costs = [
            node.cost + weight * usage if weight > 0 else node.cost for node, weight, usage in given
        ]
        for counted, price in zip(self._counts, prices[:num_counts] * self._units, strict=True):
            paid = np.zeros(len(costs[int(counted.nodes[0])]))
            paid[counted.strategy] = price * counted.sign
            for v in counted.nodes.tolist():
                costs[v] = costs[v] + paid
        return costs

    def ask(self, prices: FloatArray, *, slack: float, nudge: float = 0.0) -> float | None:
        """What a price for each of the weights proves; its best choice becomes a point.

        Args:
            prices: shape [D].
            slack: relative difference that may be left between choice and bound.
            nudge: a price at all times, so that the choice is sensible there as well.

        Returns:
            a lower bound; None where the problem cannot be solved at these prices.
        """
        self._search.check()
        self._search.count(ASKED)
        answer = self._minimise(self.priced(prices, nudge=nudge), slack)
        if answer is None or answer[1] is None:
            return None
        bound = self.proven(answer[0], prices, nudge=nudge)
        self.bound = max(self.bound, bound)
        self.see(answer[1])
        return bound

    def proven(self, total: float, prices: FloatArray, *, nudge: float = 0.0) -> float:
        """What is proven by a lower bound of the total at some prices."""
        num_counts = len(self._counts)
        paid = (float(prices[num_counts:].sum()) + nudge) * self._problem.usage_limit
        allowed = np.array([counted.sign * counted.number for counted in self._counts])
        counted = prices[:num_counts] * self._units * allowed
        rounding = _ROUNDING * (abs(total) + paid + float(np.abs(counted).sum()))
        return total - paid - float(counted.sum()) - rounding

    def best_prices(self, limit: float) -> FloatArray:
        """The prices at which the choices seen promise the best bound."""
        return self._target(limit, 0.0)[0]

    def climb(
        self, limit: float, start: FloatArray, *, enough: float, most: int = _MOST_PRICES
    ) -> FloatArray:
        """Prices with a good bound for weighted usage below a limit, by weights known then.

        A limit below the problem's own leaves room for what the weights do not see.

        Args:
            limit: the limit.
            start: prices to begin with where no choice has been seen.
            enough: bound at which to stop.
            most: prices to ask for at most.
        """
        best, reached, stalled = np.zeros(0), -float("inf"), 0
        prices, asked = start, np.full(0, np.nan)
        for _ in range(most):
            if self.points:
                best = self._padded(best)
                target, promised = self._target(limit, _REACH * float(prices.max(initial=0.0)))
                small = _SHARE_OF_GAP * self._search.gap * max(abs(promised), SAME)
                if stalled > _MOST_STALLED or promised - reached <= small:
                    break
                lonely = len(best) == 1 or not best.any()
                prices = target if lonely else 0.5 * (target + best)
            # What is asked again is answered as before.
            again = len(asked) == len(prices) and np.allclose(asked, prices, rtol=SAME, atol=0)
            if again or self._search.closed or self.bound >= enough:
                break
            asked = prices
            bound = self.ask(prices, slack=_SHARE_OF_GAP * self._search.gap)
            if bound is None or np.isinf(bound):
                break
            on_usage = float(prices[len(self._counts) :].sum())
            value = bound + on_usage * (self._problem.usage_limit - limit)
            gain = value - reached
            stalled = 0 if gain > _SHARE_OF_GAP * self._search.gap * abs(value) else stalled + 1
            if gain > 0:
                best, reached = prices, value
        return self._padded(best)

    def _padded(self, prices: FloatArray) -> FloatArray:
        known = len(self._counts) + len(self.watch.weights)
        return np.append(prices, np.zeros(known - len(prices)))

    def _target(self, limit: float, most: float) -> tuple[FloatArray, float]:
        """The prices at which the choices seen promise the best bound, and that bound.

        Where they promise ever more, prices end at `most`, unless that is zero.
        """
        cost = np.array([point.cost for point in self.points])
        finite = np.isfinite(cost)
        cost, excess = cost[finite], self.excesses(limit)[finite]
        scale = float(np.abs(excess).max(initial=0.0))
        if scale <= SAME * self._problem.usage_limit:
            return np.zeros(excess.shape[1]), float(cost.min(initial=np.inf))
        box = max(float(np.ptp(cost)), SAME) / scale
        for _ in range(_MOST_GROWTHS):
            prices, promised = best_prices(cost, excess, box)
            if prices.max() < _AT_EDGE * box or (0 < most <= box):
                break
            box *= _GROWTH
            if 0 < most < box and not (excess < 0).all(axis=1).any():
                box = most
        return prices, promised
