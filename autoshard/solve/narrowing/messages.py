"""Lower bounds of a folded problem, by messages that are the same in all groups of a run.

Bonds hand part of the prices of their pairs to the places at their ends, and places hand
theirs to bonds, in a way that no choice gets cheaper or dearer; the sum of all least prices
is then a lower bound. Messages go up and down in turn, as in sequential tree-reweighted
message passing (TRW-S, Kolmogorov, IEEE TPAMI 28:1568, 2006), and the bound never falls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.closure import ShortestPathCost
from autoshard.solve.narrowing.folded import Folded

_EPSILON = 2.0**-50


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What the strategies of a place show to a bond.

    Attributes:
        labels: the distinct rows or columns, ascending, shape [C].
        classes: number among `labels` of each strategy, shape [S].
        order: the strategies sorted by class, shape [S].
        starts: where each class starts in `order`, shape [C].
    """

    labels: IntArray
    classes: IntArray
    order: IntArray
    starts: IntArray

    @classmethod
    def of(cls, shown: IntArray) -> "View":
        """The view of strategies by the row or column of each."""
        labels, classes = np.unique(shown, return_inverse=True)
        order = np.argsort(classes, kind="stable")
        starts = np.searchsorted(classes[order], np.arange(len(labels)))
        return cls(labels, classes, order, starts)

    def least(self, prices: FloatArray) -> FloatArray:
        """Least price of the strategies of each class, shape [C]."""
        least: FloatArray = np.minimum.reduceat(prices[self.order], self.starts)
        return least


class Messages:
    """Messages of a folded problem, and the bound that they prove.

    A message is a price by class that a place takes from a bond, negative where it gives.

    Args:
        folded: the problem.
        check: called now and then; raises to stop.

    Attributes:
        folded: the problem.
        costs: price of each strategy of a node of each place, shape [S]; may be set anew.
        values: the message of each slot, shape [C].
        views: what the place of each slot shows there.
        bound: proven lower bound of all choices.
    """

    def __init__(
        self, folded: Folded, costs: Sequence[FloatArray], *, check: Callable[[], None]
    ) -> None:
        self.folded = folded
        self.costs = costs
        self.views = _views(folded)
        self.values = [np.zeros(len(view.labels)) for view in self.views]
        self.bound = -float("inf")
        self._tables = _tables(folded, self.views)
        self._order = sorted(range(len(folded.places)), key=lambda p: folded.places[p].nodes[0])
        self._least = np.zeros(len(folded.places))
        self._check = check

    def sweep(self) -> None:
        """Pass messages up and down once, and raise the bound."""
        for place in self._order:
            self._check()
            self._pass(place, backward=True)
        for place in reversed(self._order):
            self._check()
            self._pass(place, backward=False)
        self.bound = self.proven(self._least)

    def proven(self, least: FloatArray) -> float:
        """The sum of the least price of a node of each place, without its rounding errors."""
        sizes = np.array([float(len(place.nodes)) for place in self.folded.places])
        volume = float(sizes @ np.abs(least))
        for slot, value in zip(self.folded.slots, self.values, strict=True):
            volume += slot.num_edges * float(np.abs(value).max(initial=0.0))
        total = float(sizes @ least)
        return total - _EPSILON * volume if np.isfinite(total) else total

    def prices(self, place: int) -> FloatArray:
        """Price of each strategy of a node of a place, with its messages, shape [S]."""
        total = self.costs[place].copy()
        for slot in self.folded.places[place].slots:
            total += self.folded.weight(slot) * self.values[slot][self.views[slot].classes]
        return total

    def offered(self, slot: int) -> FloatArray:
        """Most that the bonds of a slot can give to its place, by class, shape [C]."""
        offers = []
        for bond, is_source in self.folded.slots[slot].bonds:
            far = self.folded.far_end(bond, is_source=is_source)
            offers.append(self.through(bond, -self.values[far], is_source=is_source))
        least: FloatArray = np.minimum.reduce(offers)
        return least

    def through(self, bond: int, beyond: FloatArray, *, is_source: bool) -> FloatArray:
        """Least price of a bond and what is beyond it, by class of one end, shape [C].

        Args:
            bond: number of the bond.
            beyond: price by class of the other end.
            is_source: whether the prices are wanted by class of the source.
        """
        table = self._tables[bond]
        if not isinstance(table, ShortestPathCost):
            prices = table + beyond if is_source else table + beyond[:, None]
            least: FloatArray = prices.min(axis=1 if is_source else 0)
            return least
        here, far = self.folded.bonds[bond].target, self.folded.bonds[bond].source
        if is_source:
            here, far = far, here
        states = np.full(table.num_states, np.inf)
        states[self.views[far].labels] = beyond
        states = table.backwards(states) if is_source else table.forwards(states)
        return states[self.views[here].labels]

    def around(self, place: int, picks: Sequence[int]) -> FloatArray:
        """Price of each strategy of a place next to a choice, shape [3, S].

        Args:
            place: number of the place.
            picks: strategy of each place.

        Returns:
            the price where everything around stays what it is; where what comes later is as
            messages say; and where what comes earlier is.
        """
        prices = np.tile(self.costs[place], (3, 1))
        for slot in self.folded.places[place].slots:
            bond, is_source = self.folded.slots[slot].bonds[0]
            far = self.folded.far_end(bond, is_source=is_source)
            fixed = np.full(len(self.views[far].labels), np.inf)
            fixed[self.views[far].classes[picks[self.folded.slots[far].place]]] = 0.0
            paid = self.through(bond, fixed, is_source=is_source)
            told = self.offered(slot)
            shown = (paid, paid, told) if self.folded.slots[slot].backward else (paid, told, paid)
            prices += self.folded.weight(slot) * np.stack(shown)[:, self.views[slot].classes]
        return prices

    def _pass(self, place: int, *, backward: bool) -> None:
        """Take what the slots on one side can give, and share the rest with the other side."""
        folded, weights = self.folded, {True: 0.0, False: 0.0}
        slots = folded.places[place].slots
        for slot in slots:
            side = folded.slots[slot].backward
            weights[side] += folded.weight(slot)
            if side == backward:
                offered = self.offered(slot)
                self.values[slot] = np.where(np.isfinite(offered), offered, 0.0)
        prices = self.prices(place)
        self._least[place] = prices.min()
        if not np.isfinite(self._least[place]):
            return
        share = 1.0 / max(*weights.values(), 1.0)
        prices -= self._least[place]
        for slot in slots:
            if folded.slots[slot].backward != backward:
                spare = self.views[slot].least(prices)
                self.values[slot] -= share * np.where(np.isfinite(spare), spare, 0.0)


def _views(folded: Folded) -> list[View]:
    known: dict[int, View] = {}
    views = []
    for slot in folded.slots:
        bond, is_source = slot.bonds[0]
        edge = folded.bonds[bond].edge
        shown = edge.rows if is_source else edge.cols
        if id(shown) not in known:
            known[id(shown)] = View.of(shown)
        views.append(known[id(shown)])
    return views


def _tables(folded: Folded, views: Sequence[View]) -> list[FloatArray | ShortestPathCost]:
    """Prices of each bond by class of its ends, shape [C, D], or by state."""
    known: dict[tuple[int, int, int], FloatArray | ShortestPathCost] = {}
    tables = []
    for bond in folded.bonds:
        prices, rows, cols = bond.edge.prices, views[bond.source], views[bond.target]
        key = (id(prices), id(rows), id(cols))
        if key not in known:
            known[key] = prices
            if not isinstance(prices, ShortestPathCost) and prices.shape != (
                len(rows.labels),
                len(cols.labels),
            ):
                known[key] = prices[np.ix_(rows.labels, cols.labels)]
        tables.append(known[key])
    return tables
