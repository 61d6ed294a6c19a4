"""Local search: a choice improved one variable at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.network import Network, Variable
from autoshard.solve.reductions.base import Worklist
from autoshard.solve.reductions.limits import term_prices

_MOST_SWEEPS = 50
_MOST_RAISES = 24


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Usage of a variable by spans that do not overlap.

    Attributes:
        starts: first checkpoint of each span, shape [P].
        last: end of the last span.
        usage: shape [P, S].
    """

    starts: IntArray
    last: int
    usage: FloatArray


class Descent:
    """Coordinate descent on a network without ties.

    Args:
        network: what to improve on; must not change while the descent lives.
        check: called now and then; raises to stop.
    """

    def __init__(self, network: Network, *, check: Callable[[], None]) -> None:
        self._network = network
        self._check = check
        self._pieces: dict[int, _Pieces] = {}

    def improve(
        self, picks: dict[int, int], *, prices: FloatArray | None = None, within: bool = False
    ) -> dict[int, int]:
        """Move to a choice that no change of one variable improves.

        Args:
            picks: where to start.
            prices: price of usage at each checkpoint, shape [T]; none by default.
            within: allow only moves that keep the usage within the capacity, from a start
                that does.
        """
        picks = dict(picks)
        usage = self._network.usage(picks)
        queue = Worklist(self._network.variables)
        for _ in range(_MOST_SWEEPS * len(self._network.variables)):
            if not queue:
                break
            v = queue.pop()
            self._check()
            best = self._best(v, picks, prices, usage if within else None)
            if best != picks[v]:
                _move(self._network.variables[v], usage, picks[v], best)
                picks[v] = best
                queue.update(self._network.links[v])
        return picks

    def repair(self, picks: dict[int, int], prices: FloatArray) -> dict[int, int] | None:
        """Raise the price of what is short until a choice fits, then improve within the room.

        Args:
            picks: where to start.
            prices: first guess of the price of usage at each checkpoint, shape [T].

        Returns:
            a choice within the capacity, or None where none was found.
        """
        capacity = self._network.capacity
        spread = sum(float(np.ptp(x.cost)) for x in self._network.variables.values())
        prices = prices.copy()
        step = 1e-3 * spread / max(float(capacity.max(initial=0.0)), 1e-300)
        for _ in range(_MOST_RAISES):
            over = self._network.usage(picks) > capacity
            if not over.any():
                return self.improve(picks, within=True)
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
        return best if total[best] < total[picks[v]] else picks[v]

    def _fits(self, variable: Variable, pick: int, usage: FloatArray) -> BoolArray:
        """Whether each strategy fits in the room that the others leave, shape [S]."""
        pieces = self._pieces.get(id(variable))
        if pieces is None:
            pieces = self._pieces[id(variable)] = _in_pieces(variable)
        first, last = pieces.starts[0], pieces.last
        room = self._network.capacity[first:last] - usage[first:last]
        left = np.maximum(np.minimum.reduceat(room, pieces.starts - first), 0.0)
        fits = pieces.usage <= (left + pieces.usage[:, pick])[:, None]
        return np.asarray(fits.all(axis=0))


def _in_pieces(variable: Variable) -> _Pieces:
    bounds = np.unique([end for term in variable.terms for end in (term.first, term.last)])
    usage = np.zeros((len(bounds) - 1, len(variable.cost)))
    for term in variable.terms:
        start, end = np.searchsorted(bounds, (term.first, term.last))
        usage[start:end] += term.usage
    return _Pieces(bounds[:-1].astype(np.intp), int(bounds[-1]), usage)


def _move(variable: Variable, usage: FloatArray, old: int | None, new: int | None) -> None:
    """Take the use of one strategy off, in place, and add that of another."""
    for term in variable.terms:
        if old is not None:
            usage[term.first : term.last] -= term.usage[old]
        if new is not None:
            usage[term.first : term.last] += term.usage[new]
