"""Bounds and choices for problems that are too large for tables and for a linear program.

Links hand part of the prices of their pairs to the variables, and variables hand theirs to
the links, in a way that no choice gets cheaper or dearer; the sum of all least prices is
then a lower bound. Sequential tree-reweighted message passing (TRW-S, Kolmogorov, IEEE
TPAMI 28:1568, 2006) never lets it fall. Usage limits carry prices as well, and these
follow the usage of the choices that each sweep yields (the volume algorithm, Barahona and
Anbil, Math. Program. 87:385, 2000, with the step of Polyak).
"""

from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.descent import Descent
from autoshard.solve.flat import Arms, Flat, Level
from autoshard.solve.network import Link, Matrix, Network, Variable
from autoshard.solve.stage import Stage

_EPSILON = 2.0**-50
_FIRST_STEP = 0.5
_LAST_STEP = 1e-4
_REACH = 0.15
_PATIENCE = 10
_MEMORY = 0.7
_MOST_STALLED = 60
_STALLED_GAIN = 1e-5
_NEWS = 1e-3
_ROUNDED_EVERY = 5
_REPAIR_SHARE = 0.3
_PROMISING = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """Prices on usage with messages, and the bound that they prove."""

    bound: float
    prices: FloatArray
    messages: FloatArray


class Ascent:
    """Improve messages and prices on usage; offer the choices met on the way.

    Args:
        stage: the reduced problem.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._search = stage.search
        self._flat = Flat(stage.network)
        self._messages = np.zeros(self._flat.num_messages)
        self._scratch = np.zeros(self._flat.num_messages)
        self._picks: IntArray = np.zeros(len(self._flat.variables), dtype=np.intp)
        unpriced = np.zeros(len(self._flat.capacity))
        self._best = _Point(-float("inf"), unpriced, self._messages.copy())
        self._descent = Descent(stage.network, check=self._search.check)
        self._repairing = 0.0
        self._sweeps = 0
        self._known: set[bytes] = set()

    def run(self, seconds: float = float("inf")) -> dict[int, FloatArray]:
        """Improve until the bound stalls, the gap is closed or the time is over.

        Returns:
            for each variable, a lower bound of the price of all choices with each
            strategy, shape [S].
        """
        end = self._search.elapsed + seconds
        try:
            self._climb(end)
        finally:
            least = self._proven(self._best)
        return least

    def remaining(self) -> tuple[Network, float]:
        """What messages and prices leave of the problem, as a problem of its own.

        Returns:
            a network without usage in which no allowed choice costs more than it does in the
            problem, and how much rounding may add to that.
        """
        flat, best, network = self._flat, self._best, self._stage.network
        messages = best.messages
        paid = float(best.prices @ flat.capacity)
        given = messages[flat.messages]
        total = flat.priced(best.prices) + np.bincount(flat.seen, given, len(flat.cost))
        left = Network()
        left.constant = flat.constant - paid
        for v, cost in zip(flat.variables, np.split(total, flat.starts[1:-1]), strict=True):
            left.variables[v] = Variable(np.arange(len(cost)), cost)
            left.links[v], left.changes[v] = {}, 0
        for u, v, row, col in flat.joined:
            link = network.links[u][v]
            rows, cols = link.matrix.values.shape
            values = link.matrix.values - messages[row : row + rows, None]
            values = values - messages[col : col + cols]
            left.put(u, v, Link(Matrix(values), link.rows, link.cols))
        volume = abs(flat.constant) + paid + float(np.abs(given).sum() + np.abs(flat.cost).sum())
        return left, _EPSILON * volume

    def _climb(self, end: float) -> None:
        flat, search = self._flat, self._search
        prices, best = self._best.prices, self._best
        direction = np.zeros_like(prices)
        step, without_gain, stalled = _FIRST_STEP, 0, 0
        while not search.closed and search.elapsed < end and stalled < _MOST_STALLED:
            bound = self._sweep(prices)
            search.count("ascent.sweeps")
            gain = bound - best.bound
            stalled = 0 if gain > _STALLED_GAIN * self._scale(best.bound) else stalled + 1
            if gain > 0:
                self._best = best = _Point(bound, prices, self._messages.copy())
                without_gain = 0
                if bound > search.bound + _NEWS * self._scale(bound):
                    self._proven(best)
            else:
                without_gain += 1
            excess = flat.usage(self._picks) - flat.capacity
            self._sweeps += 1
            if self._sweeps % _ROUNDED_EVERY == 0:
                self._consider(self._rounded(prices), prices)
            if without_gain > _PATIENCE and step > _LAST_STEP:
                step, without_gain = max(0.5 * step, _LAST_STEP), 0
                prices, self._messages = best.prices, best.messages.copy()
                direction = np.zeros_like(prices)
                continue
            direction = _MEMORY * direction + (1.0 - _MEMORY) * excess
            prices = self._moved(prices, direction, step, bound, best.bound)

    def _scale(self, bound: float) -> float:
        return max(abs(bound), 1e-300) if np.isfinite(bound) else 1e-300

    def _moved(
        self, prices: FloatArray, direction: FloatArray, step: float, bound: float, best: float
    ) -> FloatArray:
        """Prices one step on: as far as a linear bound would have to go to reach the target."""
        towards = np.where((prices <= 0) & (direction < 0), 0.0, direction)
        norm = float(towards @ towards)
        if norm == 0.0:
            return prices
        reach = min(self._search.objective, best + _REACH * self._scale(best)) - bound
        moved: FloatArray = np.maximum(prices + step * max(reach, 0.0) / norm * towards, 0.0)
        return moved

    def _sweep(self, prices: FloatArray) -> float:
        """Pass messages up and down; return the bound that they prove, up to rounding."""
        priced = self._flat.priced(prices)
        for level in self._flat.levels:
            self._search.check()
            self._pass(level, priced, behind=level.lower, ahead=level.upper)
        total = 0.0
        for level in reversed(self._flat.levels):
            self._search.check()
            total += self._pass(level, priced, behind=level.upper, ahead=level.lower)
        # Every link has just been emptied by one of its ends: its least price is zero.
        return total + self._flat.constant - float(prices @ self._flat.capacity)

    def _pass(
        self,
        level: Level,
        priced: FloatArray,
        *,
        behind: tuple[Arms, ...],
        ahead: tuple[Arms, ...],
    ) -> float:
        """Take what the links behind can give, pick, and share the rest with those ahead.

        Returns:
            the sum of the least prices of the level's variables.
        """
        messages, scratch = self._messages, self._scratch
        for arms in behind:
            messages[arms.here] = _given(arms, messages)
            scratch[arms.here] = self._flat.facing(arms, self._picks)
        for arms in ahead:
            scratch[arms.here] = messages[arms.here]
        own, size = priced[level.strategies], len(level.strategies)
        total = own + np.bincount(level.seen, messages[level.messages], size)
        least = np.minimum.reduceat(total, level.starts)
        score = own + np.bincount(level.seen, scratch[level.messages], size)
        self._picks[level.variables] = _cheapest(level, score)
        if ahead:
            total -= np.repeat(least, level.sizes)
            scratch[level.messages] = np.inf
            np.minimum.at(scratch, level.messages, total[level.seen])
            for arms in ahead:
                spare = scratch[arms.here]
                messages[arms.here] -= arms.share * np.where(np.isfinite(spare), spare, 0.0)
        return float(least.sum())

    def _rounded(self, prices: FloatArray) -> IntArray:
        """Pick strategies along the order of the variables, up or down in turn.

        What lies behind is picked; what lies ahead is seen through its messages.
        """
        flat, scratch = self._flat, self._scratch
        priced = flat.priced(prices)
        picks: IntArray = np.zeros(len(flat.variables), dtype=np.intp)
        upwards = self._sweeps % (2 * _ROUNDED_EVERY) == 0
        for level in flat.ordered if upwards else reversed(flat.ordered):
            self._search.check()
            behind, ahead = level.lower, level.upper
            if not upwards:
                behind, ahead = ahead, behind
            for arms in behind:
                scratch[arms.here] = flat.facing(arms, picks)
            for arms in ahead:
                scratch[arms.here] = _given(arms, self._messages)
            picked = priced[level.strategies]
            picked = picked + np.bincount(level.seen, scratch[level.messages], len(picked))
            picks[level.variables] = _cheapest(level, picked)
        return picks

    def _consider(self, picks: IntArray, prices: FloatArray) -> None:
        """Offer a choice; repair it where that is worth the time."""
        flat, search = self._flat, self._search
        price = flat.price(picks)
        fits = bool((flat.usage(picks) <= flat.capacity).all())
        by_variable = dict(zip(flat.variables, picks.tolist(), strict=True))
        if fits and price < search.objective:
            self._stage.offer(by_variable)
        hope = price < search.objective * (1.0 if fits else _PROMISING)
        key = picks.tobytes()
        if key in self._known or not (hope or search.choice is None):
            return
        if self._repairing > _REPAIR_SHARE * search.elapsed:
            return
        self._known.add(key)
        start = search.elapsed
        repaired = self._descent.repair(by_variable, prices)
        if repaired is not None:
            self._stage.offer(repaired)
        self._repairing += search.elapsed - start

    def _proven(self, best: _Point) -> dict[int, FloatArray]:
        """Record the bound of a point with its rounding taken off; bound each strategy."""
        flat, messages = self._flat, best.messages
        total = flat.priced(best.prices) + np.bincount(
            flat.seen, messages[flat.messages], len(flat.cost)
        )
        least = np.minimum.reduceat(total, flat.starts[:-1])
        paid = float(best.prices @ flat.capacity)
        bound, volume = flat.constant - paid + float(least.sum()), abs(flat.constant) + paid
        for level in flat.levels:
            for arms in level.upper:
                left = arms.values - messages[arms.here][:, :, None]
                bound += float((left - messages[arms.there][:, None, :]).min(axis=(1, 2)).sum())
        volume += float(np.abs(least).sum() + np.abs(messages[flat.messages]).sum())
        bound -= _EPSILON * volume
        self._stage.raise_bound(bound)
        spare = bound + total - np.repeat(least, np.diff(flat.starts))
        return dict(zip(flat.variables, np.split(spare, flat.starts[1:-1]), strict=True))


def _given(arms: Arms, messages: FloatArray) -> FloatArray:
    """The least price that each row of a link can be had for, shape [G, R]."""
    given = (arms.values - messages[arms.there][:, None, :]).min(axis=2)
    return np.where(np.isfinite(given), given, 0.0)


def _cheapest(level: Level, score: FloatArray) -> IntArray:
    """The first strategy of least price of each variable of a level, shape [L]."""
    best = np.minimum.reduceat(score, level.starts)
    hits = np.flatnonzero(score <= np.repeat(best, level.sizes))
    owner = np.searchsorted(level.starts, hits, side="right") - 1
    picks: IntArray = np.empty(len(level.starts), dtype=np.intp)
    # The last assignment stays, so of equals the first one is picked.
    picks[owner[::-1]] = (hits - level.starts[owner])[::-1]
    return picks
