"""Lagrangian relaxation of the usage limit of a problem with runs.

Usage is priced instead of limited, which gives a lower bound for every price (Fisher, Management
Science 27:1, 1981). Prices treat the groups of a run alike. The best ones are found by cutting
planes, taken half way from the best point so far so that they do not oscillate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.lagrangian import best_prices
from autoshard.solve.network import spread
from autoshard.solve.problem import USAGE_TOLERANCE, Problem
from autoshard.solve.runs.find import Run
from autoshard.solve.runs.run_solver import Minimise
from autoshard.solve.state import SolveState


class UsageWeights:
    """Usage over time, and weights that bring it down to one number.

    Weights are prices of usage per node. A price at some times adds up to a weight of each
    node, the part of the times at which it is alive. The groups of a run must stay alike, so
    each place gets the least weight that it has in any group: the weighted usage of a choice
    is then at most its peak, whatever the choice. The last group keeps its own, as
    much of it is gone sooner than what corresponds to it.

    Args:
        problem: the problem; its limit is finite.
        runs: runs in it.

    Attributes:
        usage: of each strategy of each node, cut off well above the limit.
        weights: those that have been added, shape [N] each.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run]) -> None:
        # A strategy that takes infinitely much may as well take more than any other one.
        arrays = {id(node.usage): node.usage for node in problem.nodes}.values()
        finite = (float(usage[np.isfinite(usage)].max(initial=0.0)) for usage in arrays)
        most = 2.0 * max(problem.usage_limit, *finite, 1.0)
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

    @cached_property
    def _alike(self) -> dict[int, IntArray]:
        """Times at which corresponding nodes of a run become alive, by each of these times."""
        found: dict[int, IntArray] = {}
        for node_array in self._places:
            for nodes in node_array.T:
                alive = nodes[self._first[nodes] < self._last[nodes]]
                times = np.unique(self._first[alive])
                for time in times.tolist():
                    found.setdefault(time, times)
        return found

    def uses(self, choice: IntArray) -> FloatArray:
        """Usage of each node, shape [N]; 0 where it is never alive."""
        uses = np.minimum(self._problem.uses(choice), self._most)
        return np.where(self._first < self._last, uses, 0.0)

    def over_time(self, uses: FloatArray) -> FloatArray:
        """Usage at each peak time, shape [T], from that of each node, shape [N]."""
        return spread(self._first, self._last, uses, self._num_times)

    def change(self, nodes: IntArray, old: IntArray, new: IntArray) -> FloatArray:
        """Growth of usage over time, shape [T], when some nodes take other strategies.

        Args:
            nodes: shape [P].
            old: a strategy of each of them, shape [P].
            new: another one, shape [P].
        """
        picks = zip(nodes.tolist(), old.tolist(), new.tolist(), strict=True)
        grows = np.array([self.usage[v][t] - self.usage[v][s] for v, s, t in picks])
        return spread(self._first[nodes], self._last[nodes], grows, self._num_times)

    @property
    def matrix(self) -> FloatArray:
        """The weights that have been added, shape [D, N]."""
        return np.array(self.weights).reshape(len(self.weights), len(self.usage))

    @cached_property
    def everywhere(self) -> FloatArray:
        """Weight of each node's usage, shape [N], for equal prices at all times."""
        return self._weights(np.arange(self._num_times))

    def add(self, uses: FloatArray) -> None:
        """Add the weights that see most of a choice's peak, if they are new.

        They are those of the worst time, or of all times that correspond to it.

        Args:
            uses: usage of each node, shape [N].
        """
        time = int(self.over_time(uses).argmax())
        alone = np.array([time], dtype=np.intp)
        options = [self._weights(times) for times in (alone, self._alike.get(time, alone))]
        heaviest = max(options, key=lambda weights: float(weights @ uses))
        if not any(np.array_equal(heaviest, known) for known in self.weights):
            self.weights.append(heaviest)

    def _weights(self, times: IntArray) -> FloatArray:
        """Weight of each node's usage, shape [N], for equal prices that add up to one."""
        shares = np.bincount(times, minlength=self._num_times) / len(times)
        paid = np.concatenate([[0.0], np.cumsum(shares)])
        weights: FloatArray = paid[self._last] - paid[self._first]
        for node_array in self._places:
            weights[node_array[:-1]] = weights[node_array[:-1]].min(axis=0)
        return np.maximum(weights, 0.0)


ASKED = "runs.evaluations"
"""Name of the statistic that counts evaluations."""
SAME = 1e-9
"""Relative difference that is taken for rounding."""
_ROUNDING = 1e-13
_GROWTH = 4.0
_AT_EDGE = 0.999
_REACH = 4.0


@dataclass(frozen=True, eq=False)
class Point:
    """A choice, its price without usage, and the usage of each node, shape [N]."""

    choice: IntArray
    cost: float
    uses: FloatArray


class UsageLagrangian:
    """Choices that were best at some prices, and the best bound that prices have proven.

    Args:
        state: of the problem; its limit is finite. It is offered all choices.
        usage_weights: weights to price usage by; grows with the choices that are seen.
        minimise: solves the problem, or a case of it, for other costs, its limit aside.

    Attributes:
        usage_weights: as given.
        points: the choices seen.
        bound: of all choices that `minimise` is about and that keep the limit.
    """

    def __init__(
        self,
        state: SolveState,
        usage_weights: UsageWeights,
        minimise: Minimise,
    ) -> None:
        self.usage_weights = usage_weights
        self.points: list[Point] = []
        self.bound = -float("inf")
        self._state, self._settings = state, state.settings
        self._problem = state.problem
        self._minimise = minimise

    def point(self, choice: IntArray) -> Point:
        """A choice with what it costs and uses, offered to the solve state."""
        self._state.offer(choice)
        return Point(choice, self._problem.objective(choice), self.usage_weights.uses(choice))

    def add_choice(self, choice: IntArray) -> Point:
        """Add a choice; price the times at which it breaks the limit."""
        point = self.point(choice)
        self.points.append(point)
        slack = self._problem.usage_limit * (1 + USAGE_TOLERANCE)
        if self._problem.peak_usage(choice) > slack:
            self.usage_weights.add(point.uses)
        return point

    def excesses(self, limit: float) -> FloatArray:
        """Weighted usage beyond a limit, by point and price, shape [C, D]."""
        uses = np.array([point.uses for point in self.points])
        return uses @ self.usage_weights.matrix.T - limit

    def nearest(self, prices: FloatArray) -> list[Point]:
        """The choices seen, those that are best at some prices first."""
        excess = self.excesses(self._problem.usage_limit)[:, : len(prices)]
        paid = excess @ prices + [point.cost for point in self.points]
        return [self.points[i] for i in np.argsort(paid, kind="stable")]

    def priced(self, prices: FloatArray, *, nudge: float = 0.0) -> list[FloatArray]:
        """Costs with a price for each of the weights, by node; `nudge` is one at all times."""
        weights = prices @ self.usage_weights.matrix[: len(prices)]
        if nudge:
            weights = weights + nudge * self.usage_weights.everywhere
        given = zip(self._problem.nodes, weights.tolist(), self.usage_weights.usage, strict=True)
        return [
            node.cost + weight * usage if weight > 0 else node.cost for node, weight, usage in given
        ]

    def evaluate(self, prices: FloatArray, *, slack: float, nudge: float = 0.0) -> float | None:
        """Lower bound proven by a price for each of the weights; its best choice becomes a point.

        Args:
            prices: shape [D].
            slack: relative difference that may be left between choice and bound.
            nudge: a price at all times, so that the choice is sensible there as well.

        Returns:
            a lower bound; None where the problem cannot be solved at these prices.
        """
        self._state.check()
        self._state.count(ASKED)
        answer = self._minimise(self.priced(prices, nudge=nudge), slack)
        if answer is None or answer[1] is None:
            return None
        bound = self.proven(answer[0], prices, nudge=nudge)
        self.bound = max(self.bound, bound)
        self.add_choice(answer[1])
        return bound

    def proven(self, total: float, prices: FloatArray, *, nudge: float = 0.0) -> float:
        """Lower bound under the limit, from one of the total at some prices."""
        paid = (float(prices.sum()) + nudge) * self._problem.usage_limit
        return total - paid - _ROUNDING * (abs(total) + paid)

    def best_prices(self, limit: float) -> FloatArray:
        """The prices at which the choices seen promise the best bound."""
        return self._target(limit, 0.0)[0]

    def maximise_bound(self, limit: float) -> FloatArray:
        """Prices with a good bound for weighted usage below a limit, by weights known then.

        A limit below the problem's own leaves slack for what the weights do not see.
        """
        best, reached, stalled = np.zeros(0), -float("inf"), 0
        prices, evaluated = np.zeros(0), np.full(0, np.nan)
        for _ in range(self._settings.dual_rounds):
            if self.points:
                best = self._padded(best)
                target, promised = self._target(limit, _REACH * float(prices.max(initial=0.0)))
                small = self._settings.dual_gap_share * self._state.gap * max(abs(promised), SAME)
                if stalled > self._settings.dual_max_stalled or promised - reached <= small:
                    break
                lonely = len(best) == 1 or not best.any()
                prices = target if lonely else 0.5 * (target + best)
            # Evaluating the same prices again gives nothing new.
            again = len(evaluated) == len(prices) and np.allclose(
                evaluated, prices, rtol=SAME, atol=0
            )
            if again or self._state.closed:
                break
            evaluated = prices
            bound = self.evaluate(prices, slack=self._settings.dual_gap_share * self._state.gap)
            if bound is None or np.isinf(bound):
                break
            value = bound + float(prices.sum()) * (self._problem.usage_limit - limit)
            gain = value - reached
            stalled = (
                0
                if gain > self._settings.dual_gap_share * self._state.gap * abs(value)
                else stalled + 1
            )
            if gain > 0:
                best, reached = prices, value
        return self._padded(best)

    def _padded(self, prices: FloatArray) -> FloatArray:
        return np.append(prices, np.zeros(len(self.usage_weights.weights) - len(prices)))

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
        for _ in range(self._settings.dual_box_growths):
            prices, promised = best_prices(cost, excess, box)
            if prices.max() < _AT_EDGE * box or (0 < most <= box):
                break
            box *= _GROWTH
            if 0 < most < box and not (excess < 0).all(axis=1).any():
                box = most
        return prices, promised
