"""Run contraction by the number of groups of a run that are in one of their components.

A group may be in one of several components, such as a block with and without activation
checkpointing. Prices of usage leave any mixture of both open, so a bound at the best prices may be
that of 6.1 of 12 blocks with checkpointing. Here a run has a table for each number of groups in one
component, so that there are a bound and a choice for each number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.bounds.elimination import JointTable, MinMarginals
from autoshard.solve.network import Network, NetworkVariable
from autoshard.solve.presolve import Inverse
from autoshard.solve.runs.block_table import BlockTable
from autoshard.solve.runs.run_tables import (
    Around,
    RunTables,
    batched_min_plus,
    joined_table,
    power,
    write_choices,
)
from autoshard.solve.settings import Effort

_COUNTED = 1
"""Number of the component whose groups are counted."""


@dataclass(frozen=True, eq=False)
class _GroupPrices:
    """Prices of one group from state to state, [M, N, N] for M states of the shared nodes.

    Attributes:
        table: the table of the group.
        prices: outside of the counted component, and inside of it.
    """

    table: BlockTable
    prices: tuple[FloatArray, FloatArray]

    @classmethod
    def of(cls, table: BlockTable) -> "_GroupPrices":
        parts = table.by_component()
        inside = parts.pop(_COUNTED)
        return cls(table, (table.as_batch(np.minimum.reduce(parts)), table.as_batch(inside)))

    def components(self, inside: int) -> tuple[int, ...]:
        """The components inside or outside of the counted one."""
        others = (i for i in range(self.table.num_components) if i != _COUNTED)
        return (_COUNTED,) if inside else tuple(others)


_Counts = Sequence[FloatArray]
"""Prices of some groups by the number of them in the counted component, [M, N, N] each."""


def _joined(first: _Counts, second: _Counts) -> _Counts:
    """Prices of groups and of those that follow them."""
    # A convolution over the numbers: of all ways to divide a number among both, the least price.
    found = [np.full_like(first[0], np.inf) for _ in range(len(first) + len(second) - 1)]
    for i, left in enumerate(first):
        for j, right in enumerate(second):
            np.minimum(found[i + j], batched_min_plus(left, right), out=found[i + j])
    return found


def _num_products(numbers: Sequence[int]) -> int:
    """Number of products of matrices that join runs of so many equal groups."""
    total = 0

    def joined(first: int, second: int) -> int:
        nonlocal total
        total += (first + 1) * (second + 1)
        return first + second

    reduce(joined, (power(1, number, joined) for number in numbers))
    return total


class CountedRun:
    """The groups of a run at given costs, by the number of them in the counted component.

    Args:
        tables: the tables of its groups.
        variable: number of the variable that stands for the number of counted groups.
        is_open: mask of the states of the shared nodes that matter, shape [M].

    Attributes:
        variable: the variable.
        num_groups: number of groups.
    """

    def __init__(self, tables: RunTables, variable: int, is_open: BoolArray) -> None:
        self.variable, self._is_open, self._first = variable, is_open, tables[0][0]
        self._parts = [(_GroupPrices.of(table), number) for table, number in tables]
        self._groups = [group for group, number in self._parts for _ in range(number)]
        self.num_groups = len(self._groups)

    @staticmethod
    def work(tables: RunTables, is_open: BoolArray) -> float:
        """Additions for the tables of all numbers of groups."""
        first, num_products = tables[0][0], _num_products([number for _, number in tables])
        states = prod(first.shape[: len(first.run.boundary)])
        return float(num_products) * states**3 * int(is_open.sum())

    def table(self) -> JointTable:
        """The least price of all groups; the last axis is the number of counted groups."""
        first, run = self._first, self._first.run
        parts: list[_Counts] = []
        for group, number in self._parts:
            parts.append(power([prices[self._is_open] for prices in group.prices], number, _joined))
        powers = reduce(_joined, parts)
        values = np.full((len(powers), len(self._is_open), *powers[0].shape[1:]), np.inf)
        values[:, self._is_open] = powers
        shape = (*first.shape, len(powers))
        scope = (*run.before, *run.last_boundary, *first.shared_nodes, self.variable)
        return JointTable(scope, np.moveaxis(values, (2, 3, 1, 0), (0, 1, 2, 3)).reshape(shape))

    def write(self, picks: Mapping[int, int], choice: IntArray) -> None:
        """Write the choices of every group, given those around the run and the number counted."""
        around, number = Around.of(self._first, picks), picks[self.variable]
        remaining, state = self._remaining(around, number), around.first
        for k, group in enumerate(self._groups):
            options = [
                prices[around.matrix, state] + remaining[k + 1][number - inside]
                for inside, prices in enumerate(group.prices[: number + 1])
            ]
            inside, after = np.unravel_index(int(np.argmin(options)), np.shape(options))
            seen = around.seen(group.table, (state, int(after)))
            within = group.components(int(inside))
            choice[self._first.run.node_array[k]] = group.table.interior(seen, within)
            state, number = int(after), number - int(inside)

    def _remaining(self, around: Around, most: int) -> list[list[FloatArray]]:
        """Least price from before each group on, by the number of counted groups, shape [N]."""
        states = np.arange(self._groups[0].prices[0].shape[1])
        impossible = np.full(len(states), np.inf)
        found = [[np.where(states == around.last, 0.0, np.inf), *[impossible] * most]]
        for group in reversed(self._groups):
            plain, counted = (prices[around.matrix] for prices in group.prices)
            without = [(plain + left).min(axis=1) for left in found[-1]]
            within = [impossible, *((counted + left).min(axis=1) for left in found[-1][:-1])]
            found.append([np.minimum(*pair) for pair in zip(without, within, strict=True)])
        return found[::-1]


@dataclass(frozen=True, eq=False)
class Outside:
    """The part of a problem outside of its runs.

    Attributes:
        network: the nodes outside of runs and at their ends.
        inverse: of the reductions of the network.
        size: number of nodes of the problem.
        effort: limits of work, and when to stop.
    """

    network: Network
    inverse: Inverse
    size: int
    effort: Effort


@dataclass(frozen=True)
class CountedMinimum:
    """The least prices of a problem by the numbers of counted groups of its runs.

    Attributes:
        values: least price, with one axis for each counted run.
        least_of_others: least price of the choices that are not in `values`; larger than what
            matters.
        work: additions for the tables of all numbers.
        choice: a choice that attains the least price for given numbers.
    """

    values: FloatArray
    least_of_others: float
    work: float
    choice: Callable[[Sequence[int]], IntArray]

    @classmethod
    def of(
        cls, outside: Outside, tables: Sequence[RunTables], most: float
    ) -> "CountedMinimum | None":
        """The least prices; None if no run has components, or the tables would be too large.

        Args:
            outside: the part of the problem outside of its runs.
            tables: those of each run.
            most: larger prices do not matter.
        """
        joined = [joined_table(table) for table in tables]
        by_count, counted = [*joined], dict[int, CountedRun]()
        least, work = np.inf, 0.0
        for i, table in enumerate(tables):
            first = table[0][0]
            if first.num_components == 1:
                continue
            shared = MinMarginals.of_network(
                outside.network, first.shared_nodes, extra=joined, effort=outside.effort
            )
            if shared is None:
                return None
            prices = shared.least.ravel()
            # States of shared nodes that cost too much even with the best number need no tables by
            # number. Their least price is kept, so that bounds still hold for all choices.
            is_open = prices <= most
            least = min(least, float(prices[~is_open].min(initial=np.inf)))
            work += CountedRun.work(table, is_open)
            if work > outside.effort.settings.max_counted_work:
                return None
            counted[i] = CountedRun(table, outside.size + i, is_open)
            by_count[i] = counted[i].table()
        if not counted:
            return None
        return _Counted(outside, tables, counted).minimum(by_count, least, work)


@dataclass(frozen=True, eq=False)
class _Counted:
    """The runs of a problem, some of them counted, and the rest of the problem."""

    outside: Outside
    tables: Sequence[RunTables]
    counted: Mapping[int, CountedRun]

    def minimum(
        self, joined: Sequence[JointTable], least_of_others: float, work: float
    ) -> CountedMinimum | None:
        """The least prices; None if the tables would be too large."""
        network = self.outside.network.copy()
        for run in self.counted.values():
            numbers = np.arange(run.num_groups + 1)
            network.add(run.variable, NetworkVariable(numbers, np.zeros(len(numbers))))
        keep = [run.variable for run in self.counted.values()]
        found = MinMarginals.of_network(network, keep, extra=joined, effort=self.outside.effort)
        if found is None:
            return None

        def choice(numbers: Sequence[int]) -> IntArray:
            return self._written(found.picks(numbers))

        return CountedMinimum(found.least, least_of_others, work, choice)

    def _written(self, picks: Mapping[int, int]) -> IntArray:
        """The choice with given strategies around the runs, and numbers of counted groups."""
        choice = np.zeros(self.outside.size, dtype=np.intp)
        for v, variable in self.outside.network.variables.items():
            choice[v] = variable.labels[picks[v]]
        self.outside.inverse(choice)
        for i, table in enumerate(self.tables):
            if i in self.counted:
                self.counted[i].write(picks, choice)
            else:
                write_choices(table, picks, choice)
        return choice
