"""Usage limits turned into prices: a bound, and choices near the optimum.

With a price on usage at each checkpoint the limits disappear from the problem and what
is left is solved exactly by elimination. Every price gives a lower bound; the best ones
are found by cutting planes (Kelley), taken half way from the best point so far so that
they do not swing (in-out separation, Ben-Ameur and Neto 2007).
"""

from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from autoshard.arrays import BoolArray, FloatArray
from autoshard.solve.cuts import best_prices
from autoshard.solve.descent import Descent
from autoshard.solve.elimination import Elimination, Evaluation
from autoshard.solve.network import Network
from autoshard.solve.reductions.limits import term_prices
from autoshard.solve.relink import best_between
from autoshard.solve.stage import Stage

_MOST_ROUNDS = 80
_MOST_GROWTHS = 40
_FRESH_CHECKPOINTS = 8
_MOST_MIXED = 6


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
        stage: the reduced problem; takes the choices found on the way.
        plan: its compiled elimination.
    """

    def __init__(self, stage: Stage, plan: Elimination) -> None:
        self._stage = stage
        self._network: Network = stage.network
        self._plan = plan
        self._search = stage.search
        self._descent = Descent(self._network, check=self._search.check)
        self._cuts = _Cuts()
        self._seen: list[dict[int, int]] = []
        self._active: BoolArray = np.zeros(len(self._network.capacity), dtype=np.bool_)
        self._box = 0.0

    def run(self) -> Multipliers:
        """Improve the prices until the bound stalls or the gap is closed."""
        best = self._ask(np.zeros(len(self._network.capacity)))
        growths = stalled = 0
        for _ in range(_MOST_ROUNDS):
            if self._search.closed or not self._active.any() or stalled > 8:  # noqa: PLR2004 - rounds without gain
                break
            target, promised = self._master()
            at_edge = (target[self._active] >= 0.999 * self._box).any()
            if at_edge and growths < _MOST_GROWTHS:
                self._box *= 4.0
                growths += 1
            elif promised - best.bound <= 0.1 * self._tolerance(best.bound):
                break
            lonely = self._active.sum() == 1
            asked = self._ask(target if lonely else 0.5 * (target + best.prices))
            gain = asked.bound - best.bound
            stalled = 0 if gain > self._tolerance(best.bound) or at_edge else stalled + 1
            best = asked if gain > 0 else best
        self._mix(best)
        return best

    def _mix(self, best: Multipliers) -> None:
        """Offer choices between those that were cheapest near the best prices."""
        # The choices that the bound thinks nearest to optimal are tight at the best prices.
        paid = [
            price + float(slope @ best.prices)
            for price, slope in zip(self._cuts.price, self._cuts.slope, strict=True)
        ]
        order = sorted(range(len(paid)), key=paid.__getitem__)
        near = list({tuple(self._seen[i].items()): self._seen[i] for i in order}.values())
        for start, goal in permutations(near[:_MOST_MIXED], 2):
            if self._search.closed:
                return
            mixed = best_between(self._network, start, goal, check=self._search.check)
            if mixed is not None:
                self._stage.offer(self._descent.improve(mixed, within=True))

    def _tolerance(self, bound: float) -> float:
        return max(self._search.gap * max(abs(bound), self._search.magnitude), 1e-300)

    def _ask(self, prices: FloatArray) -> Multipliers:
        """Evaluate one point: a bound, a cut and a choice."""
        costs = {
            v: x.cost + term_prices(x, prices) if x.terms else x.cost
            for v, x in self._network.variables.items()
        }
        result = self._plan.evaluate(costs, check=self._search.check)
        bound = result.value - float(prices @ self._network.capacity)
        self._search.count("lagrangian.evaluations")
        self._stage.raise_bound(bound)
        excess = self._network.usage(result.picks) - self._network.capacity
        self._cuts.price.append(self._network.price(result.picks))
        self._cuts.slope.append(excess)
        self._watch(excess)
        repaired = self._descent.repair(result.picks, prices)
        if repaired is not None:
            self._stage.offer(repaired)
        self._seen.append(result.picks)
        return Multipliers(prices, bound, result, self._seen)

    def _watch(self, excess: FloatArray) -> None:
        """Give prices to the checkpoints where the excess is largest."""
        worst = np.argsort(-excess)[:_FRESH_CHECKPOINTS]
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
