"""Prices of pairs as shortest ways over steps, without a matrix of all pairs."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

_FloatArray = NDArray[np.float64]
_IntArray = NDArray[np.intp]


class ShortestPathCost:
    """A matrix of prices, shape [N, N]: the cheapest ways over steps from state to state.

    Where states are few thousands with a dozen steps each, a product with a vector is a
    hundred times cheaper than with the matrix. Staying is free.

    Args:
        num_states: N.
        sources: state before each step, shape [A].
        targets: state after it, shape [A].
        prices: its price, not negative; inf forbids a step; shape [A].
    """

    def __init__(
        self, num_states: int, sources: _IntArray, targets: _IntArray, prices: _FloatArray
    ) -> None:
        self.num_states = num_states
        self.arcs = sources, targets, prices
        self._rows: dict[int, _FloatArray] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.num_states, self.num_states

    @cached_property
    def dense(self) -> _FloatArray:
        """The matrix, inf where there is no way."""
        return self.between(np.arange(self.num_states), np.arange(self.num_states))

    @cached_property
    def most(self) -> float:
        """A price that no finite entry exceeds."""
        end = np.full(self.num_states, np.inf)
        end[0] = 0.0
        # Going through one state is at least as dear as the cheapest way.
        through = float(self.backwards(end).max() + self.forwards(end).max())
        if np.isfinite(through):
            return through
        return float(self.dense[np.isfinite(self.dense)].max())

    def between(self, rows: _IntArray, cols: _IntArray) -> _FloatArray:
        """The entries of some rows and columns, shape [R, C]."""
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

    def forwards(self, start: _FloatArray) -> _FloatArray:
        """Least price of being in each state, given that of starting in each, shape [N]."""
        return _relaxed(start, *self._into)

    def backwards(self, end: _FloatArray) -> _FloatArray:
        """Least price from each state on, given that of ending in each, shape [N]."""
        return _relaxed(end, *self._out_of)

    @cached_property
    def _graph(self) -> csr_array:
        sources, targets, prices = self.arcs
        return csr_array((prices, (sources, targets)), shape=self.shape)

    @cached_property
    def _into(self) -> tuple[_IntArray, _IntArray, _IntArray, _FloatArray]:
        sources, targets, prices = self.arcs
        return _grouped(targets, sources, prices)

    @cached_property
    def _out_of(self) -> tuple[_IntArray, _IntArray, _IntArray, _FloatArray]:
        return _grouped(*self.arcs)


def _grouped(
    here: _IntArray, there: _IntArray, prices: _FloatArray
) -> tuple[_IntArray, _IntArray, _IntArray, _FloatArray]:
    """Steps by the state at one end: the states, where the steps of each start, the steps."""
    order = np.argsort(here, kind="stable")
    states, starts = np.unique(here[order], return_index=True)
    return states, starts, there[order], prices[order]


def _relaxed(
    price: _FloatArray, states: _IntArray, starts: _IntArray, there: _IntArray, steps: _FloatArray
) -> _FloatArray:
    """Bellman-Ford, all states at once; ways are short, so a few rounds suffice."""
    price = price.copy()
    while len(states):
        before = price[states]
        after = np.minimum(before, np.minimum.reduceat(price[there] + steps, starts))
        if (after == before).all():
            break
        price[states] = after
    return price
