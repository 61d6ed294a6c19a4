"""Prices between the two ends of a use of a value, by layout and by state."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.planner.memory_budget.residency import Price, State


@dataclass(frozen=True, eq=False)
class ArcPrices:
    """A use of a value, between the R layouts it is made in and the C it is taken in.

    Attributes:
        once: seconds of each resharding, shape [R, C].
        again: seconds of its forward part, shape [R, C].
        stays: whether its forward part does nothing, shape [R, C].
        rows: number of the layout that each strategy of the source makes.
        cols: number of the layout that each strategy of the target takes.
        made: bytes in each layout it is made in, shape [R].
        taken: bytes in each layout it is taken in, shape [C].
    """

    once: FloatArray
    again: FloatArray
    stays: BoolArray
    rows: IntArray
    cols: IntArray
    made: FloatArray
    taken: FloatArray


@dataclass(frozen=True, slots=True)
class End:
    """One end of a link: a node of the problem as its states along a use are.

    Attributes:
        node: its index.
        states: its states; for each of them it has all its layouts, one after the other.
        made: for each state whether its layouts are those in which the value is made, and
            not those in which it is taken.
        own: whether there is one strategy per layout; otherwise the strategies are those of
            what makes or takes the value.
    """

    node: int
    states: tuple[State, ...]
    made: tuple[bool, ...]
    own: bool = False

    def sizes(self, prices: ArcPrices) -> list[int]:
        """Number of layouts in each state."""
        return [len(prices.made if made else prices.taken) for made in self.made]

    def labels(self, prices: ArcPrices) -> IntArray:
        """Number of state and layout, both in one, of each strategy."""
        sizes = self.sizes(prices)
        if self.own:
            return np.arange(sum(sizes))
        layouts = [prices.rows if made else prices.cols for made in self.made]
        starts = np.cumsum([0, *sizes[:-1]])
        return np.concatenate([start + x for start, x in zip(starts, layouts, strict=True)])


def joined(
    prices: ArcPrices, start: End, end: End, price: Callable[[State, State], Price]
) -> FloatArray:
    """Seconds from all states and layouts of one end to all of the other."""
    heights, widths = start.sizes(prices), end.sizes(prices)
    seconds = np.full((sum(heights), sum(widths)), np.inf)
    rows, cols = (list(pairwise(np.cumsum([0, *x]).tolist())) for x in (heights, widths))
    for source, source_made, (top, bottom) in zip(start.states, start.made, rows, strict=True):
        for target, target_made, (left, right) in zip(end.states, end.made, cols, strict=True):
            paid = price(source, target)
            if paid is Price.SAME:
                assert source_made == target_made, "the same layouts at both ends"
                np.fill_diagonal(seconds[top:bottom, left:right], 0.0)
            elif paid is not Price.NEVER:
                assert source_made > target_made, "reshardings go from what is made"
                seconds[top:bottom, left:right] = _resharded(prices, paid)
    return seconds


def _resharded(prices: ArcPrices, price: Price) -> FloatArray:
    if price is Price.STILL:
        return np.where(prices.stays, prices.once, np.inf)
    return prices.once + prices.again if price is Price.TWICE else prices.once
