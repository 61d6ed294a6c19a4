"""Lagrangian relaxation of the usage limit of a problem with runs.

A price belongs to a weighted mean of usage over time, whose weights are equal for the groups of a
run. With prices the limit disappears, and all prices give a lower bound (Fisher, Management
Science 27:1, 1981). The bound is the least of many linear functions of the prices, one per choice;
each choice evaluated so far gives one of them (cutting planes; Kelley, J. SIAM 8:703, 1960). New
prices are the midpoint of the optimum of these cutting planes and the best prices so far, so that
they do not oscillate (in-out separation, Ben-Ameur and Neto 2007).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.network import spread
from autoshard.solve.problem import Problem
from autoshard.solve.runs.cutting_planes import best_mixture, best_prices
from autoshard.solve.runs.find import Run
from autoshard.solve.state import SolveState

Bound = TypeVar("Bound", float, FloatArray)

Minimise = Callable[[Sequence[FloatArray], float], tuple[float, IntArray | None] | None]
"""Returns a lower bound and the best choice found; its arguments are costs per strategy of each
node, and the relative difference that may be left between bound and choice."""

_MAX_GROWTHS = 20
_GAP_SHARE = 0.1
"""Share of the requested gap that an evaluation may leave."""
_MAX_STALLED = 4
"""Evaluations without gain after which the search for the best prices ends."""
_MAX_EVALUATIONS = 40


class UsageWeights:
    """Usage over time, and weights of nodes whose weighted usage is at most the peak.

    Equal prices at some times that add up to one give each node a weight: the share of these times
    at which it is alive. The groups of a run must have equal costs, so each position gets its least
    weight in any group but the last; the weighted usage of a choice is then at most its peak. Nodes
    of the last group keep their weights, because they are often alive for a shorter time.

    Args:
        problem: the problem; its limit is finite.
        runs: runs in it.

    Attributes:
        usage: of each strategy of each node, clamped well above the limit.
        weights: the weights that were added, shape [N] each.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run]) -> None:
        # Infinite usage is replaced by a finite one above the limit.
        arrays = {id(node.usage): node.usage for node in problem.nodes}.values()
        finite = (float(usage[np.isfinite(usage)].max(initial=0.0)) for usage in arrays)
        most = 2.0 * max(np.floor(problem.usage_limit), *finite, 1.0)
        known: dict[int, FloatArray] = {}
        for node in problem.nodes:
            if id(node.usage) not in known:
                known[id(node.usage)] = np.minimum(node.usage, most)
        self.usage = [known[id(node.usage)] for node in problem.nodes]
        self._problem, self._most = problem, most
        self.weights: list[FloatArray] = []
        self._num_times = len(problem.peak_times)
        self._first, self._last = problem.peak_spans.T
        self._places = [run.node_array for run in runs]

    def uses(self, choice: IntArray) -> FloatArray:
        """Usage of each node, shape [N]; 0 where it is never alive."""
        uses = np.minimum(self._problem.uses(choice), self._most)
        return np.where(self._first < self._last, uses, 0.0)

    def over_time(self, uses: FloatArray) -> FloatArray:
        """Usage at each peak time, shape [T], from that of each node, shape [N]."""
        return spread(self._first, self._last, uses, self._num_times)

    @property
    def matrix(self) -> FloatArray:
        """The weights that were added, shape [D, N]."""
        return np.array(self.weights).reshape(len(self.weights), len(self.usage))

    @cached_property
    def everywhere(self) -> FloatArray:
        """Weight of each node's usage, shape [N], for equal prices at all times."""
        return self._weights(np.arange(self._num_times))

    def add(self, uses: FloatArray) -> None:
        """Add the weights of the peak time of a choice, if they are new.

        Args:
            uses: usage of each node, shape [N].
        """
        peak = self._weights(np.array([self.over_time(uses).argmax()]))
        if not any(np.array_equal(peak, known) for known in self.weights):
            self.weights.append(peak)

    def _weights(self, times: IntArray) -> FloatArray:
        """Weight of each node's usage, shape [N], for equal prices that add up to one."""
        shares = np.bincount(times, minlength=self._num_times) / len(times)
        paid = np.concatenate([[0.0], np.cumsum(shares)])
        weights: FloatArray = paid[self._last] - paid[self._first]
        for node_array in self._places:
            # Usage is at least 0, so with a smaller weight the weighted usage is still at most the
            # peak.
            weights[node_array[:-1]] = weights[node_array[:-1]].min(axis=0)
        return np.maximum(weights, 0.0)


SAME = 1e-9
"""Relative difference below which two values count as equal."""
EVALUATIONS = "runs.evaluations"
"""Name of the statistic that counts evaluations."""
_ROUNDING = 1e-13
_STEEP = 1e6
"""Price of usage at the limit, relative to the largest price of a choice."""
_ACCURACY = 1e-5
"""Relative accuracy of a least usage."""
_TIE = 1e-8
"""Price of usage at the limit, relative to the least price of a choice, that is always added."""
_GROWTH = 4.0
"""Factor by which the range of prices grows while their optimum is at its edge."""
_AT_EDGE = 0.999
_REACH = 4.0
"""Largest new price, relative to the largest one so far, if the optimum is unbounded."""


@dataclass(frozen=True, eq=False)
class Point:
    """A choice, its price without usage, and the usage of each node, shape [N]."""

    choice: IntArray
    cost: float
    uses: FloatArray


class UsageLagrangian:
    """Lagrangian relaxation: choices that were best at some prices, and the best proven bound.

    Usage has a tiny price at all times, so that of choices that cost the same one with little usage
    is found.

    Args:
        state: of the problem, whose limit is finite; it is offered all choices.
        usage_weights: weights by which usage is priced; extended as choices are found.
        minimise: solves the problem, or a restriction of it, for other costs without its limit.

    Attributes:
        usage_weights: the weights.
        points: the choices found.
        bound: lower bound of all choices that satisfy the limit, within the restriction.
    """

    def __init__(self, state: SolveState, usage_weights: UsageWeights, minimise: Minimise) -> None:
        self.usage_weights = usage_weights
        self.points: list[Point] = []
        self.bound = -float("inf")
        self._state = state
        self._problem = state.problem
        self._minimise = minimise
        least = abs(state.problem.min_price)
        limit = max(state.problem.usage_limit, SAME)
        self._tie = _TIE * least / limit if np.isfinite(least) else 0.0

    def add_choice(self, choice: IntArray) -> None:
        """Add a choice and offer it; if it exceeds the limit, add weights for its peak."""
        self._state.offer(choice)
        uses = self.usage_weights.uses(choice)
        self.points.append(Point(choice, self._problem.objective(choice), uses))
        if self._problem.peak_usage(choice) > self._problem.usage_limit:
            self.usage_weights.add(uses)

    @property
    def excesses(self) -> FloatArray:
        """Weighted usage minus the limit, by choice and weights, shape [C, D]."""
        return self._excesses(self.points)

    def _excesses(self, points: Sequence[Point]) -> FloatArray:
        uses = np.array([point.uses for point in points])
        return uses @ self.usage_weights.matrix.T - self._problem.usage_limit

    def priced(self, prices: FloatArray, *, nudge: float = 0.0) -> list[FloatArray]:
        """Costs by node with a price for each of the weights; `nudge` is a price at all times."""
        weights = prices @ self.usage_weights.matrix[: len(prices)]
        weights = weights + (nudge + self._tie) * self.usage_weights.everywhere
        given = zip(self._problem.nodes, weights.tolist(), self.usage_weights.usage, strict=True)
        return [
            node.cost + weight * usage if weight > 0 else node.cost for node, weight, usage in given
        ]

    def evaluate(self, prices: FloatArray, *, slack: float, nudge: float = 0.0) -> float | None:
        """Lower bound proven by a price for each of the weights; adds the best choice.

        Args:
            prices: shape [D].
            slack: relative difference that may be left between choice and bound.
            nudge: a price at all times, so that usage at unpriced times is not free.

        Returns:
            a lower bound; None if the problem cannot be solved at these prices.
        """
        self._state.check()
        self._state.count(EVALUATIONS)
        answer = self._minimise(self.priced(prices, nudge=nudge), slack)
        if answer is None or answer[1] is None:
            return None
        bound = self.proven(answer[0], prices, nudge=nudge)
        self.bound = max(self.bound, bound)
        self.add_choice(answer[1])
        return bound

    def proven(self, total: Bound, prices: FloatArray, *, nudge: float = 0.0) -> Bound:
        """Lower bound under the limit, from a lower bound `total` of price plus priced usage."""
        paid = self.paid(prices, nudge=nudge)
        bound: Bound = total - paid - _ROUNDING * (np.abs(total) + paid)
        return bound

    def paid(self, prices: FloatArray, *, nudge: float = 0.0) -> float:
        """Price of usage at the limit."""
        return (float(prices.sum()) + nudge + self._tie) * self._problem.usage_limit

    def best_prices(
        self, *, most: float = 0.0, points: Sequence[Point] | None = None
    ) -> tuple[FloatArray, float]:
        """Maximise the least of the cutting planes; return the prices and the maximum.

        If the maximum is unbounded, prices end at `most`, unless that is zero.

        Args:
            most: largest price, or zero.
            points: choices whose cutting planes count; those found if None.
        """
        points = self.points if points is None else points
        cost, excess = np.array([point.cost for point in points]), self._excesses(points)
        finite = np.isfinite(cost)
        cost, excess = cost[finite], excess[finite]
        scale = float(np.abs(excess).max(initial=0.0))
        if scale <= SAME * self._problem.usage_limit:
            return np.zeros(excess.shape[1]), float(cost.min(initial=np.inf))
        # With few cutting planes, the maximum may be unbounded: no choice known fits. So prices
        # stay in a box, which grows while the optimum is at its edge.
        box = max(float(np.ptp(cost)), SAME) / scale
        for _ in range(_MAX_GROWTHS):
            prices, promised = best_prices(cost, excess, box)
            if prices.max() < _AT_EDGE * box or (0 < most <= box):
                break
            box *= _GROWTH
            if 0 < most < box and not (excess < 0).all(axis=1).any():
                box = most
        return prices, promised

    def maximise_bound(self) -> FloatArray:
        """Prices with a good bound."""
        accuracy = _GAP_SHARE * self._state.gap
        best, reached, num_stalled = np.zeros(0), -float("inf"), 0
        prices = np.zeros(0)
        for _ in range(_MAX_EVALUATIONS):
            most = _REACH * float(prices.max(initial=0.0))
            target, promised = self.best_prices(most=most)
            small = accuracy * max(abs(promised), SAME)
            if num_stalled > _MAX_STALLED or promised - reached <= small:
                break
            best, before = self.padded(best), prices
            # The optimum of few cutting planes jumps from one extreme to another; half of the way
            # to it gives cutting planes near the best prices.
            prices = 0.5 * (target + best) if len(best) > 1 and best.any() else target
            # Evaluating the same prices again gives nothing new.
            same = len(before) == len(prices) and np.allclose(before, prices, rtol=SAME, atol=0)
            bound = None if same or self._state.closed else self.evaluate(prices, slack=accuracy)
            if bound is None or np.isinf(bound):
                break
            num_stalled = 0 if bound - reached > accuracy * abs(bound) else num_stalled + 1
            if bound > reached:
                best, reached = prices, bound
        return self.padded(best)

    def padded(self, prices: FloatArray) -> FloatArray:
        """Prices with zeros for the weights that were added after them."""
        return np.append(prices, np.zeros(len(self.usage_weights.weights) - len(prices)))

    def can_fit(self, *, slack: float, mixtures: int = 1, nudges: Sequence[float] = (0.0,)) -> bool:
        """Search for a choice within the limit; False if it is proven that there is none.

        With a price of usage above all other costs, the cheapest choice has the least usage. If no
        choice fits and the least usage is known, the statistic `minimum_usage` is set to it.

        Args:
            slack: relative difference that may be left between choice and bound.
            mixtures: largest number of mixtures of weights to price, the first weights first.
            nudges: prices at all times to try with each of them, relative to the steep price.
        """
        state, problem, limit = self._state, self._problem, self._problem.usage_limit
        state.enter("find the least usage")
        most = problem.max_price
        steep = _STEEP * max(most, SAME) / max(limit, SAME)
        shares, tight, least = np.ones(1), False, np.inf
        for _ in range(mixtures):
            for nudge in nudges:
                if self.evaluate(steep * shares, slack=slack, nudge=nudge * steep) is None:
                    return True
                if state.choice is not None:
                    return True
            # Where shared nodes are relaxed, a point can have a choice of infinite cost.
            finite = (point.choice for point in self.points if np.isfinite(point.cost))
            least = min(map(problem.peak_usage, finite), default=np.inf)
            allowed = self.bound + _ACCURACY * steep * least
            tight = bool(np.isfinite(least)) and steep * (least - limit) <= allowed
            mixed = best_mixture(self.excesses)
            known = np.append(shares, np.zeros(len(mixed) - len(shares)))
            if tight or np.allclose(mixed, known):
                break
            shares = mixed
        # A choice that fits costs at most `most`, and its Lagrangian value is not above its price.
        # So a bound above `most` proves that there is none.
        if self.bound <= most:
            return True
        if tight:
            state.statistics["minimum_usage"] = least
        return False
