"""A network as a linear program: the local polytope with usage rows.

One variable per strategy and one per allowed pair of (row, column) of each link. The
strategies of a variable sum to one; the pairs of a link in one row sum to the strategies
that select that row, and likewise for columns. Usage rows cut off what does not fit.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.network import Network


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """Minimise `cost @ x` where `matrix @ x = right` and `usage @ x <= capacity`, x >= 0.

    Attributes:
        cost: objective, shape [n].
        matrix: equality rows, shape [m, n].
        right: their right-hand side, shape [m].
        usage: usage rows, one per checkpoint, shape [T, n].
        capacity: room at each checkpoint, shape [T].
        starts: first column of each variable, then of each link, shape [V + L + 1]; the
            columns from one start to the next sum to one.
        variables: network variable of each of the first V groups.
        constant: price that no column carries.
    """

    cost: FloatArray
    matrix: sparse.csr_array
    right: FloatArray
    usage: sparse.csr_array
    capacity: FloatArray
    starts: IntArray
    variables: tuple[int, ...]
    constant: float

    @property
    def num_strategies(self) -> int:
        """How many of the columns, at the front, are strategies."""
        return int(self.starts[len(self.variables)])

    def rounded(self, x: FloatArray) -> tuple[dict[int, int], float]:
        """The strategy of each variable with the largest share, and the least such share."""
        picks, least = {}, 1.0
        for i, v in enumerate(self.variables):
            shares = x[self.starts[i] : self.starts[i + 1]]
            picks[v] = int(shares.argmax())
            least = min(least, float(shares[picks[v]]))
        return picks, least

    def dual_bound(self, duals: FloatArray, prices: FloatArray) -> tuple[float, FloatArray]:
        """Lower bound from any row duals, and what each column costs above it.

        The duals move prices between variables and links and do not change the price of
        any choice; every group then costs at least its cheapest column. This holds for
        whatever duals are given, so no tolerance of a solver enters.

        Args:
            duals: multipliers of the equality rows, shape [m].
            prices: multipliers of the usage rows, shape [T]; negative ones are cut to 0.

        Returns:
            the bound, with the constant, and a lower bound of the objective's growth when
            a column is forced to one, shape [n].
        """
        prices = np.maximum(prices, 0.0)
        reduced = self.cost - self.matrix.T @ duals + self.usage.T @ prices
        least = np.minimum.reduceat(reduced, self.starts[:-1])
        bound = float(duals @ self.right - prices @ self.capacity + least.sum())
        excess = reduced - np.repeat(least, np.diff(self.starts))
        return bound + self.constant, excess

    def columns(self, network: Network, picks: dict[int, int]) -> FloatArray:
        """The point of a choice, shape [n]."""
        x = np.zeros(len(self.cost))
        for i, v in enumerate(self.variables):
            x[self.starts[i] + picks[v]] = 1.0
        for i, (u, v, link) in enumerate(network.pairs(), start=len(self.variables)):
            allowed = np.flatnonzero(np.isfinite(link.matrix.values))
            width = link.matrix.values.shape[1]
            pair = link.rows[picks[u]] * width + link.cols[picks[v]]
            x[self.starts[i] + np.searchsorted(allowed, pair)] = 1.0
        return x


def linear_model(network: Network) -> LinearModel:
    """Build the model of a network without ties and without forbidden strategies."""
    variables = tuple(network.variables)
    place = {v: i for i, v in enumerate(variables)}
    sizes = [len(network.variables[v].cost) for v in variables]
    costs = [network.variables[v].cost for v in variables]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
    blocks = [_Block.one_hot(starts)]
    right = [np.ones(len(variables))]
    column, row = int(starts[-1]), len(variables)
    group_starts = list(starts)
    for u, v, link in network.pairs():
        values = link.matrix.values
        rows, cols = np.nonzero(np.isfinite(values))
        flows = column + np.arange(len(rows))
        low, high = row, row + values.shape[0]
        blocks += [
            _Block(low + rows, flows, 1.0),
            _Block(high + cols, flows, 1.0),
            _Block(low + link.rows, starts[place[u]] + np.arange(sizes[place[u]]), -1.0),
            _Block(high + link.cols, starts[place[v]] + np.arange(sizes[place[v]]), -1.0),
        ]
        costs.append(values[rows, cols])
        right.append(np.zeros(sum(values.shape)))
        column, row = column + len(rows), row + sum(values.shape)
        group_starts.append(column)
    return LinearModel(
        np.concatenate(costs),
        _assembled(blocks, (row, column)),
        np.concatenate(right),
        _usage_rows(network, starts, column),
        network.capacity,
        np.array(group_starts, dtype=np.intp),
        variables,
        network.constant,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Entries of one value in a sparse matrix."""

    rows: IntArray
    cols: IntArray
    value: float

    @classmethod
    def one_hot(cls, starts: IntArray) -> "_Block":
        groups = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return cls(groups, np.arange(int(starts[-1])), 1.0)


def _assembled(blocks: list[_Block], shape: tuple[int, int]) -> sparse.csr_array:
    rows = np.concatenate([block.rows for block in blocks])
    cols = np.concatenate([block.cols for block in blocks])
    values = np.concatenate([np.full(len(block.rows), block.value) for block in blocks])
    return sparse.csr_array((values, (rows, cols)), shape=shape)


def _usage_rows(network: Network, starts: IntArray, width: int) -> sparse.csr_array:
    rows, cols, values = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)], [np.zeros(0)]
    for i, variable in enumerate(network.variables.values()):
        for term in variable.terms:
            times = np.arange(term.first, term.last)
            used = np.flatnonzero(term.usage)
            rows.append(np.repeat(times, len(used)))
            cols.append(np.tile(starts[i] + used, len(times)))
            values.append(np.tile(term.usage[used], len(times)))
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols)))
    return sparse.csr_array(entries, shape=(len(network.capacity), width))
