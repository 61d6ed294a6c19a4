"""Prices of edges as cheapest paths, for matrices that are too large to store."""

from functools import cached_property

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autoshard.base.arrays import FloatArray, IntArray


class ShortestPathCost:
    """A matrix of prices, shape [N, N]: the cheapest paths over steps from state to state.

    A min-plus product with a vector is cheaper over the steps than with the dense matrix from about
    a hundred states of a dozen steps each, and with a few thousand a hundred times cheaper. Entries
    on the diagonal are 0.

    Args:
        num_states: N.
        sources: state before each step, shape [A].
        targets: state after it, shape [A].
        prices: its price, not negative; inf forbids a step; shape [A].
    """

    def __init__(
        self, num_states: int, sources: IntArray, targets: IntArray, prices: FloatArray
    ) -> None:
        self.num_states = num_states
        self.steps = sources, targets, prices
        self._rows: dict[int, FloatArray] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.num_states, self.num_states

    @cached_property
    def dense(self) -> FloatArray:
        """The matrix, inf where there is no path."""
        matrix: FloatArray = dijkstra(self._graph)
        return matrix

    @cached_property
    def max_price(self) -> float:
        """Upper bound of the finite entries."""
        end = np.full(self.num_states, np.inf)
        end[0] = 0.0
        # A path through one given state is at least as expensive as the cheapest path.
        through = float(self.backwards(end).max() + self.forwards(end).max())
        if np.isfinite(through):
            return through
        return float(self.dense[np.isfinite(self.dense)].max())

    def between(self, rows: IntArray, cols: IntArray) -> FloatArray:
        """The entries of some rows and columns, shape [R, C]."""
        if "dense" in vars(self):
            return self.dense[np.ix_(rows, cols)]
        missing = np.array([r for r in rows.tolist() if r not in self._rows], dtype=np.intp)
        if len(missing):
            found = dijkstra(self._graph, indices=missing)
            self._rows.update(zip(missing.tolist(), found, strict=True))
        return np.stack([self._rows[r][cols] for r in rows.tolist()])

    def price(self, row: int, col: int) -> float:
        """One entry."""
        if row not in self._rows:
            self._rows[row] = dijkstra(self._graph, indices=np.array([row]))[0]
        return float(self._rows[row][col])

    def forwards(self, start: FloatArray) -> FloatArray:
        """Least price of reaching each state, given the price of starting in each, shape [N]."""
        return _relaxed(start, *self._into)

    def backwards(self, end: FloatArray) -> FloatArray:
        """Least price from each state to the end, given that of ending in each, shape [N]."""
        return _relaxed(end, *self._out_of)

    @cached_property
    def _graph(self) -> csr_array:
        sources, targets, prices = self.steps
        return csr_array((prices, (sources, targets)), shape=self.shape)

    @cached_property
    def _into(self) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        sources, targets, prices = self.steps
        return _grouped(targets, sources, prices)

    @cached_property
    def _out_of(self) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        return _grouped(*self.steps)


def _grouped(
    here: IntArray, there: IntArray, prices: FloatArray
) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Group steps by one end: its distinct states, offset of the steps of each, other ends, prices.

    Offsets are those of the other ends and prices.
    """
    order = np.argsort(here, kind="stable")
    states, starts = np.unique(here[order], return_index=True)
    return states, starts, there[order], prices[order]


def _relaxed(
    price: FloatArray, states: IntArray, starts: IntArray, there: IntArray, steps: FloatArray
) -> FloatArray:
    """Bellman-Ford over all states at once; paths are short, so a few rounds suffice."""
    price = price.copy()
    while len(states):
        # Relaxing all steps at once takes as many rounds as a cheapest path has steps, and a
        # resharding is a few collectives. Dijkstra of scipy cannot start from a price in each
        # state.
        before = price[states]
        after = np.minimum(before, np.minimum.reduceat(price[there] + steps, starts))
        if (after == before).all():
            break
        price[states] = after
    return price
