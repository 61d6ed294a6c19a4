"""Local search by coordinate descent, one variable at a time."""

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray
from autoshard.solve.network import Network, NetworkVariable
from autoshard.solve.presolve.base import Worklist
from autoshard.solve.presolve.usage_limits import term_prices
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_MAX_VISITS = 50
"""Largest mean number of visits of a variable in one descent."""
_REPAIR_ROUNDS = 24


class CoordinateDescent:
    """Coordinate descent on a network without ties.

    Args:
        network: must not change while the object is in use. Terms of one variable that overlap (see
            `SeparateTerms`) can lead to choices that exceed the capacity.
        effort: limits of work, and when to stop.

    Attributes:
        visits: number of variables visited so far, a measure of work.
    """

    def __init__(self, network: Network, *, effort: Effort = DEFAULT_EFFORT) -> None:
        self._network = network
        self._effort = effort
        self.visits = 0

    def improve(
        self, picks: dict[int, int], *, prices: FloatArray | None = None, within: bool = False
    ) -> dict[int, int]:
        """Return a choice that no change of a single variable improves.

        Args:
            picks: the start.
            prices: price of usage at each checkpoint, shape [T]; none by default.
            within: allow only moves that keep the usage within the capacity; the start must be
                within it.
        """
        picks = dict(picks)
        usage = self._network.usage(picks)
        queue = Worklist(self._network.variables)
        for _ in range(_MAX_VISITS * len(self._network.variables)):
            if not queue:
                break
            v = queue.pop()
            self.visits += 1
            self._effort.check()
            best = self._best(v, picks, prices, usage if within else None)
            if best != picks[v]:
                _move(self._network.variables[v], usage, picks[v], best)
                picks[v] = best
                queue.update(self._network.links[v])
        return picks

    def repair(self, picks: dict[int, int], prices: FloatArray) -> dict[int, int] | None:
        """Raise prices at exceeded checkpoints until a choice fits; then improve within capacity.

        Args:
            picks: the start.
            prices: first guess of the price of usage at each checkpoint, shape [T].

        Returns:
            a choice within the capacity; None if none was found.
        """
        capacity = self._network.capacity
        spread = sum(float(np.ptp(x.cost)) for x in self._network.variables.values())
        prices = prices.copy()
        step = 1e-3 * spread / max(float(capacity.max(initial=0.0)), 1e-300)
        for _ in range(_REPAIR_ROUNDS):
            over = self._network.usage(picks) > capacity
            if not over.any():
                return self.improve(picks, within=True)
            # A factor alone would leave a price of zero at zero.
            prices[over] = np.maximum(prices[over] * 1.5, prices[over] + step)
            step *= 2.0
            picks = self.improve(picks, prices=prices)
        return None

    def _best(
        self, v: int, picks: dict[int, int], prices: FloatArray | None, usage: FloatArray | None
    ) -> int:
        variable = self._network.variables[v]
        total = variable.cost
        for w, link in self._network.links[v].items():
            total = total + link.matrix.values[link.rows, link.cols[picks[w]]]
        if variable.terms and prices is not None:
            total = total + term_prices(variable, prices)
        if variable.terms and usage is not None:
            total = np.where(self._fits(variable, picks[v], usage), total, np.inf)
        best = int(total.argmin())
        # Only for a gain: moves between equally good strategies could go in circles.
        return best if total[best] < total[picks[v]] else picks[v]

    def _fits(self, variable: NetworkVariable, pick: int, usage: FloatArray) -> BoolArray:
        """Mask of the strategies that fit, given the usage of the other variables, shape [S]."""
        fits: BoolArray = np.ones(len(variable.cost), dtype=np.bool_)
        for term in variable.terms:
            span = slice(term.first, term.last)
            # Above the capacity, strategies with no more usage than the present one still fit.
            left = max(float((self._network.capacity[span] - usage[span]).min()), 0.0)
            fits &= term.usage <= left + term.usage[pick]
        return fits


def _move(variable: NetworkVariable, usage: FloatArray, old: int | None, new: int | None) -> None:
    """Subtract the usage of one strategy, in place, and add that of another."""
    for term in variable.terms:
        if old is not None:
            usage[term.first : term.last] -= term.usage[old]
        if new is not None:
            usage[term.first : term.last] += term.usage[new]
