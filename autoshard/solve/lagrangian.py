"""Lagrangian relaxation of the usage limits of a network.

With a price on usage at each checkpoint the limits disappear, and what is left is solved
exactly by elimination. Every price vector gives a lower bound. The bound is the least of many
linear functions of the prices, one per choice; each choice evaluated so far gives one of them
(cutting planes; Kelley, J. SIAM 8:703, 1960). New prices are taken half way between the optimum
of these cuts and the best point so far, so that they do not oscillate (in-out separation,
Ben-Ameur and Neto 2007).
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

from autoshard.arrays import BoolArray, FloatArray
from autoshard.solve.elimination import Elimination, Evaluation
from autoshard.solve.local_search import CoordinateDescent
from autoshard.solve.network import Network
from autoshard.solve.presolve.drop_strategies import term_prices
from autoshard.solve.reduced_problem import ReducedProblem


def best_prices(price: FloatArray, slope: FloatArray, box: float) -> tuple[FloatArray, float]:
    """The prices at which cuts promise the largest bound, and that promise.

    Args:
        price: constant of each cut, shape [C].
        slope: its slope in each price, shape [C, T].
        box: largest price to look at.

    Returns:
        prices, shape [T], and the least of `price + slope @ prices` there; zeros and -inf
        where the linear program fails.
    """
    slope = slope * box
    shift, unit = float(price.min()), max(float(np.ptp(price)), float(np.abs(slope).max()), 1e-300)
    answer = linprog(
        np.append(np.zeros(slope.shape[1]), -1.0),
        A_ub=np.hstack([-slope / unit, np.ones((len(price), 1))]),
        b_ub=(price - shift) / unit,
        bounds=[(0.0, 1.0)] * slope.shape[1] + [(None, None)],
        method="highs",
    )
    if answer.x is None:
        return np.zeros(slope.shape[1]), -float("inf")
    return answer.x[:-1] * box, float(answer.x[-1]) * unit + shift


def best_mixture(values: FloatArray) -> FloatArray:
    """Shares, shape [T], that add up to one and whose least mean over all cuts is largest.

    Args:
        values: of each cut at each place, shape [C, T].
    """
    unit = max(float(np.abs(values).max()), 1e-300)
    num_cuts, num_places = values.shape
    answer = linprog(
        np.append(np.zeros(num_places), -1.0),
        A_ub=np.hstack([-values / unit, np.ones((num_cuts, 1))]),
        b_ub=np.zeros(num_cuts),
        A_eq=np.append(np.ones(num_places), 0.0)[None],
        b_eq=np.ones(1),
        bounds=[(0.0, 1.0)] * num_places + [(None, None)],
        method="highs",
    )
    if answer.x is None:
        return np.full(num_places, 1.0 / num_places)
    shares = np.maximum(answer.x[:-1], 0.0)
    return np.asarray(shares / shares.sum())


@dataclass
class Multipliers:
    """Best prices found.

    Attributes:
        prices: price of usage at each checkpoint, shape [T].
        bound: lower bound that they prove.
        result: the evaluation at these prices.
        seen: every choice that was cheapest at some prices.
    """

    prices: FloatArray
    bound: float
    result: Evaluation
    seen: list[dict[int, int]]


@dataclass
class _Cuts:
    """Upper estimates `price[k] + slope[k] @ prices` of the bound, from the choices seen."""

    price: list[float] = field(default_factory=list)
    slope: list[FloatArray] = field(default_factory=list)


class Lagrangian:
    """Search for the prices with the best bound.

    Args:
        reduced: the reduced problem; takes the choices found on the way.
        plan: its compiled elimination.
    """

    def __init__(self, reduced: ReducedProblem, plan: Elimination) -> None:
        self._reduced = reduced
        self._network: Network = reduced.network
        self._plan = plan
        self._state = reduced.state
        self._settings = reduced.state.settings
        self._descent = CoordinateDescent(self._network, effort=self._state.effort)
        self._cuts = _Cuts()
        self._seen: list[dict[int, int]] = []
        self._active: BoolArray = np.zeros(len(self._network.capacity), dtype=np.bool_)
        self._box = 0.0

    def run(self) -> Multipliers:
        """Improve the prices until the bound stalls or the gap is closed."""
        best = self._evaluate(np.zeros(len(self._network.capacity)))
        growths = stalled = 0
        for _ in range(self._settings.lagrangian_rounds):
            finished = self._state.closed or not self._active.any()
            if finished or stalled > self._settings.lagrangian_max_stalled:
                break
            target, promised = self._master()
            at_edge = (target[self._active] >= 0.999 * self._box).any()
            if at_edge and growths < self._settings.lagrangian_box_growths:
                self._box *= 4.0
                growths += 1
            elif promised - best.bound <= 0.1 * self._tolerance(best.bound):
                break
            single = self._active.sum() == 1
            evaluated = self._evaluate(target if single else 0.5 * (target + best.prices))
            gain = evaluated.bound - best.bound
            stalled = 0 if gain > self._tolerance(best.bound) or at_edge else stalled + 1
            best = evaluated if gain > 0 else best
        return best

    def _tolerance(self, bound: float) -> float:
        return max(self._state.gap * max(abs(bound), self._state.magnitude), 1e-300)

    def _evaluate(self, prices: FloatArray) -> Multipliers:
        """Evaluate one point: a bound, a cut and a choice."""
        costs = {
            v: x.cost + term_prices(x, prices) if x.terms else x.cost
            for v, x in self._network.variables.items()
        }
        result = self._plan.evaluate(costs)
        bound = result.value - float(prices @ self._network.capacity)
        self._state.count("lagrangian.evaluations")
        self._reduced.raise_bound(bound)
        excess = self._network.usage(result.picks) - self._network.capacity
        self._cuts.price.append(self._network.price(result.picks))
        self._cuts.slope.append(excess)
        self._usage_weights(excess)
        repaired = self._descent.repair(result.picks, prices)
        if repaired is not None:
            self._reduced.offer(repaired)
        self._seen.append(result.picks)
        return Multipliers(prices, bound, result, self._seen)

    def _usage_weights(self, excess: FloatArray) -> None:
        """Give prices to the checkpoints where the excess is largest."""
        worst = np.argsort(-excess)[: self._settings.lagrangian_new_checkpoints]
        self._active[worst[excess[worst] > 0]] = True
        if self._box == 0.0 and self._active.any():
            spread = sum(float(np.ptp(x.cost)) for x in self._network.variables.values())
            self._box = max(spread, 1e-300) / float(excess.max())

    def _master(self) -> tuple[FloatArray, float]:
        """The prices at which the cuts promise most, and the promise."""
        active = np.flatnonzero(self._active)
        prices = np.zeros(len(self._active))
        slope = np.array(self._cuts.slope)[:, active]
        prices[active], promised = best_prices(np.array(self._cuts.price), slope, self._box)
        return prices, promised
