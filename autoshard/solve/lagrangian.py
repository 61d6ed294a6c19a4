"""Lagrangian relaxation of usage limits, maximised by cutting planes.

With a price on usage the limits disappear, and every price vector gives a lower bound (Fisher,
Management Science 27:1, 1981). The bound is the least of many linear functions of the prices, one
per choice; each choice evaluated so far gives one of them (cutting planes; Kelley, J. SIAM 8:703,
1960). New prices are the midpoint of the optimum of these cutting planes and the best point so
far, so that they do not oscillate (in-out separation, Ben-Ameur and Neto 2007).
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog

from autoshard.arrays import FloatArray
from autoshard.solve.state import SolveState

SAME = 1e-9
"""Relative difference below which two values count as equal."""
_GROWTH = 4.0
_AT_EDGE = 0.999
_REACH = 4.0


def best_prices(price: FloatArray, slope: FloatArray, box: float) -> tuple[FloatArray, float]:
    """Maximise the least of the cutting planes `price + slope @ prices` over prices in [0, box].

    Args:
        price: constant of each cutting plane, shape [C].
        slope: its slope in each price, shape [C, T].
        box: upper bound of the prices.

    Returns:
        the prices, shape [T], and the maximum; zeros and -inf if the linear program fails.
    """
    slope = slope * box
    shift, unit = float(price.min()), max(float(np.ptp(price)), float(np.abs(slope).max()), 1e-300)
    answer = _maximin((price - shift) / unit, slope / unit)
    if answer is None:
        return np.zeros(slope.shape[1]), -float("inf")
    return answer[:-1] * box, float(answer[-1]) * unit + shift


def best_mixture(values: FloatArray) -> FloatArray:
    """Maximise the least of `values @ shares` over shares, shape [T], that add up to one.

    Args:
        values: shape [C, T].
    """
    num_cuts, num_places = values.shape
    unit = max(float(np.abs(values).max()), 1e-300)
    answer = _maximin(np.zeros(num_cuts), values / unit, shares=True)
    if answer is None:
        return np.full(num_places, 1.0 / num_places)
    shares = np.maximum(answer[:-1], 0.0)
    return np.asarray(shares / shares.sum())


def _maximin(price: FloatArray, slope: FloatArray, *, shares: bool = False) -> FloatArray | None:
    """Maximise the least of `price + slope @ x` over x in [0, 1]; with `shares`, x sums to one.

    Returns:
        x followed by the maximum; None if the linear program fails.
    """
    answer = linprog(
        np.append(np.zeros(slope.shape[1]), -1.0),
        A_ub=np.hstack([-slope, np.ones((len(price), 1))]),
        b_ub=price,
        A_eq=np.append(np.ones(slope.shape[1]), 0.0)[None] if shares else None,
        b_eq=np.ones(1) if shares else None,
        bounds=[(0.0, 1.0)] * slope.shape[1] + [(None, None)],
        method="highs",
    )
    return None if answer.x is None else np.asarray(answer.x)


class CuttingPlanes:
    """Maximise a Lagrangian bound over nonnegative prices.

    Args:
        state: of the problem; decides when to stop.
        cuts: returns the choices evaluated so far: the cost of each, shape [C], and its usage
            above the limit at each price, shape [C, D]; both may grow.
        negligible: usage above the limit that counts as rounding.
    """

    def __init__(
        self,
        state: SolveState,
        cuts: Callable[[], tuple[FloatArray, FloatArray]],
        *,
        negligible: float = 0.0,
    ) -> None:
        self._state, self._settings = state, state.settings
        self._cuts = cuts
        self._negligible = negligible

    def maximise(
        self,
        evaluate: Callable[[FloatArray], float | None],
        *,
        rounds: int,
        max_stalled: int,
        reach: float = 0.0,
    ) -> FloatArray:
        """Prices with a good bound, shape [D].

        Args:
            evaluate: proves a bound at some prices and adds a cutting plane; returns None if it
                cannot.
            rounds: largest number of evaluations.
            max_stalled: evaluations without notable gain after which it ends.
            reach: upper bound of the first prices; none if zero.
        """
        accuracy = self._settings.dual_gap_share * self._state.gap
        best, reached, stalled = np.zeros(0), -float("inf"), 0
        prices, evaluated = np.zeros(0), np.full(0, np.nan)
        for _ in range(rounds):
            if len(self._cuts()[0]):
                best = self._padded(best)
                most = max(_REACH * float(prices.max(initial=0.0)), reach)
                target, promised = self.best_prices(most)
                small = accuracy * max(abs(promised), SAME)
                if stalled > max_stalled or promised - reached <= small:
                    break
                use_target = len(best) == 1 or not best.any()
                prices = target if use_target else 0.5 * (target + best)
            # Evaluating the same prices again gives nothing new.
            again = len(evaluated) == len(prices) and np.allclose(
                evaluated, prices, rtol=SAME, atol=0
            )
            if again or self._state.closed:
                break
            evaluated = prices
            value = evaluate(prices)
            if value is None or np.isinf(value):
                break
            gain = value - reached
            stalled = 0 if gain > accuracy * abs(value) else stalled + 1
            if gain > 0:
                best, reached = prices, value
        return self._padded(best)

    def best_prices(self, most: float = 0.0) -> tuple[FloatArray, float]:
        """Maximise the least of the cutting planes; return the prices and the maximum.

        If the maximum is unbounded, prices end at `most`, unless that is zero.
        """
        cost, excess = self._cuts()
        finite = np.isfinite(cost)
        cost, excess = cost[finite], excess[finite]
        scale = float(np.abs(excess).max(initial=0.0))
        if scale <= self._negligible:
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

    def _padded(self, prices: FloatArray) -> FloatArray:
        num_prices = self._cuts()[1].shape[1]
        return np.append(prices, np.zeros(num_prices - len(prices)))
