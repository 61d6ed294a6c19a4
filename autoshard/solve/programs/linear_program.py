"""The integer program: its columns, rows and objective, for every solver of integer programs.

    minimise    sum_v sum_s c_v(s) x_v(s) + sum_e sum_ij p_e(i, j) y_e(i, j)
    subject to  sum_s x_v(s)    = 1                           each node v                      (1)
                sum_j y_e(i, j) = sum_{s of row i} x_u(s)     each edge e = (u, v) and row i   (2)
                sum_i y_e(i, j) = sum_{s of column j} x_v(s)  each edge e = (u, v), column j   (3)
                sum_{v alive at t} sum_s m_v(s) x_v(s) <= M   each time t of a limit           (4)
                x_v(s) in {0, 1},  y_e(i, j) >= 0

x_v(s) is 1 if node v has strategy s, of cost c_v(s) and usage m_v(s); y_e(i, j) is 1 if the
strategies at the ends of edge e have row i and column j of its matrix p_e. There are no columns for
strategies and entries of infinite cost. Where x is integral, (1) to (3) leave one y, so only x is
binary. Without (4) and with x >= 0 this is the local polytope (Wainwright and Jordan, Found. Trends
Mach. Learn. 1:1, 2008, section 4.1): exact on trees, and tight enough that branching is rare.

The edge of a `ShortestPathCost` has one y per step between states k instead of one per pair:

    sum_{s of row k} x_u(s) + sum_{into k} y = sum_{s of column k} x_v(s) + sum_{from k} y     (2')

Its cheapest flow of one is a shortest path, whose length is the entry of the matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.network import Network

_LARGEST_COST = 1e4
"""Largest coefficient of the objective that a solver gets."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """Minimise `cost @ z` where `matrix @ z = right` and `usage @ z <= capacity`, z = (x, y) >= 0.

    Attributes:
        cost: objective: c, then p, shape [n].
        matrix: equality rows (1), (2), (3), shape [m, n].
        right: their right-hand side, shape [m].
        usage: usage rows (4), one per checkpoint, shape [T, n].
        capacity: slack at each checkpoint, shape [T].
        starts: first column of each variable, then of each link, shape [V + L + 1]; the
            columns from one start to the next sum to one.
        variables: network variable of each of the first V groups of columns.
        constant: price of every choice, in addition to the columns.
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
        """Number of columns that are strategies; they come first."""
        return int(self.starts[len(self.variables)])

    @property
    def cost_scale(self) -> float:
        """Factor of the objective for a solver, so that its tolerances fit any unit of prices."""
        return _LARGEST_COST / max(float(np.abs(self.cost).max(initial=0.0)), 1e-300)

    @property
    def row_scale(self) -> FloatArray:
        """Divisor of each usage row for a solver: its largest coefficient, shape [T]."""
        if not self.usage.nnz:
            return np.ones(len(self.capacity))
        largest = abs(self.usage).max(axis=1).toarray().ravel()
        return np.where(largest > 0, largest, 1.0)

    def rounded(self, x: FloatArray) -> dict[int, int]:
        """The strategy of each variable with the largest share."""
        spans = zip(self.variables, self.starts, self.starts[1:], strict=False)
        return {v: int(x[first:last].argmax()) for v, first, last in spans}

    def dual_bound(self, duals: FloatArray, prices: FloatArray) -> tuple[float, FloatArray]:
        """Lower bound from row duals, and a lower bound of the excess of each column.

        The duals move prices between variables and links and do not change the price of any
        choice; every group of columns then costs at least its cheapest column. The bound is valid
        for any duals, so it does not depend on the tolerances of a solver.

        Args:
            duals: multipliers of the equality rows, shape [m].
            prices: multipliers of the usage rows, shape [T]; negative ones are clamped to 0.

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


Ends = tuple[IntArray, IntArray]
"""The columns of some strategies of a variable, and the row or column of prices of each."""
Entries = tuple[IntArray, IntArray, FloatArray]
"""Row, column and value of some entries of a sparse matrix."""


class ModelBuilder:
    """A linear model that grows.

    Args:
        costs: price of each strategy of each variable.
    """

    def __init__(self, costs: Sequence[FloatArray]) -> None:
        sizes = [len(cost) for cost in costs]
        self._costs = [np.zeros(0), *costs]
        self._starts: list[int] = [0, *np.cumsum(sizes).tolist()]
        self._num_variables = self._height = len(sizes)
        self._width = self._starts[-1]
        self._entries: list[Entries] = []
        self._usage: list[Entries] = []
        # (1) sum_s x_v(s) = 1
        self._add(np.repeat(np.arange(len(sizes)), sizes), np.arange(self._width), 1.0)

    def columns(self, i: int) -> IntArray:
        """The columns of the strategies of a variable."""
        return np.arange(self._starts[i], self._starts[i + 1])

    def add_flow(
        self, prices: FloatArray | ShortestPathCost, source: Ends, target: Ends, number: int = 1
    ) -> None:
        """Add a flow of one from the source's row of prices to the target's column.

        Args:
            prices: of each row and column.
            source: columns of the source with their rows.
            target: columns of the target with their columns of prices.
            number: of equal links that share the flow.
        """
        if isinstance(prices, ShortestPathCost):
            befores, afters, steps = prices.steps
            kept = np.isfinite(steps)
            flows = self._new_columns(number * steps[kept])
            # A row for each state: what enters it, from the source or by a step, leaves it by a
            # step or to the target. A cheapest flow of one is a cheapest path.
            row = self._new_rows(prices.num_states)
            # (2') what enters state k, from the source or by steps, leaves it
            self._add(row + source[1], source[0], 1.0)
            self._add(row + target[1], target[0], -1.0)
            self._add(row + afters[kept], flows, 1.0)
            self._add(row + befores[kept], flows, -1.0)
            return
        (used_rows, rows), (used_cols, cols) = (
            np.unique(labels, return_inverse=True) for _, labels in (source, target)
        )
        values = prices[np.ix_(used_rows, used_cols)]
        # Forbidden pairs get no column at all, rather than a large cost that would spoil the
        # scaling.
        first, second = np.nonzero(np.isfinite(values))
        flows = self._new_columns(number * values[first, second])
        for (own, _), labels, ends, size in (
            (source, rows, first, len(used_rows)),
            (target, cols, second, len(used_cols)),
        ):
            row = self._new_rows(size)
            # (2) sum_j y(i, j) - sum_{s of row i} x_u(s) = 0, then (3), the same for columns
            self._add(row + ends, flows, 1.0)
            self._add(row + labels, own, -1.0)

    def add_usage(self, first: int, last: int, columns: IntArray, usage: FloatArray) -> None:
        """Add the usage of some columns, shape [S], at the times from `first` to `last - 1`.

        They are the terms m_v(s) x_v(s) of a node in (4).
        """
        times, used = np.arange(first, last), np.flatnonzero(usage)
        columns, values = np.tile(columns[used], len(times)), np.tile(usage[used], len(times))
        self._usage.append((np.repeat(times, len(used)), columns, values))

    def model(
        self, capacity: FloatArray, variables: Sequence[int], constant: float = 0.0
    ) -> LinearModel:
        """The model; see there for the arguments."""
        zeros = np.zeros(self._height - self._num_variables)
        return LinearModel(
            np.concatenate(self._costs),
            assembled(self._entries, (self._height, self._width)),
            np.concatenate([np.ones(self._num_variables), zeros]),
            assembled(self._usage, (len(capacity), self._width)),
            capacity,
            np.array(self._starts, dtype=np.intp),
            tuple(variables),
            constant,
        )

    def _new_columns(self, costs: FloatArray) -> IntArray:
        self._costs.append(costs)
        first, self._width = self._width, self._width + len(costs)
        self._starts.append(self._width)
        return np.arange(first, self._width)

    def _new_rows(self, number: int) -> int:
        """Add some rows; return the first of them."""
        self._height += number
        return self._height - number

    def _add(self, rows: IntArray, columns: IntArray, value: float) -> None:
        self._entries.append((rows, columns, np.full(len(rows), value)))


def linear_model(network: Network) -> LinearModel:
    """Build the model of a network without ties and without forbidden strategies."""
    place = {v: i for i, v in enumerate(network.variables)}
    builder = ModelBuilder([variable.cost for variable in network.variables.values()])
    for u, v, link in network.pairs():
        source, target = builder.columns(place[u]), builder.columns(place[v])
        builder.add_flow(link.matrix.values, (source, link.rows), (target, link.cols))
    for i, variable in enumerate(network.variables.values()):
        for term in variable.terms:
            builder.add_usage(term.first, term.last, builder.columns(i), term.usage)
    return builder.model(network.capacity, tuple(place), network.constant)


def assembled(entries: Sequence[Entries], shape: tuple[int, int]) -> sparse.csr_array:
    """The sparse matrix of some entries; those at equal places are summed."""
    if not entries:
        return sparse.csr_array(shape)
    rows, cols, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return sparse.csr_array((values, (rows, cols)), shape=shape)
