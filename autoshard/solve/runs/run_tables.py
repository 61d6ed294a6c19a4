"""Tables of all groups of a run together, and the choices that attain their entries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TypeVar

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.bounds.elimination import JointTable
from autoshard.solve.presolve import min_plus
from autoshard.solve.runs.block_table import BlockTable
from autoshard.solve.runs.find import Run

_BLOCK = 1 << 15
"""Number of entries that are computed at once."""

Factor = TypeVar("Factor")


def batched_min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """Min-plus products of stacks of matrices, [M, I, K] by [M, K, J] to [M, I, J]."""
    if len(left) == 1:
        return min_plus(left[0], right[0])[None]
    out = np.full((len(left), left.shape[1], right.shape[2]), np.inf)
    step = max(1, _BLOCK // max(left.shape[1] * right.shape[2], 1))
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        least, rows, cols = out[part], left[part], right[part]
        for k in range(left.shape[2]):
            np.minimum(least, rows[:, :, k, None] + cols[:, k, None, :], out=least)
    return out


def power(base: Factor, exponent: int, product: Callable[[Factor, Factor], Factor]) -> Factor:
    """Power of a factor, with an exponent of at least 1, by repeated squaring."""
    # Min-plus products are associative, too: a run of G groups takes at most 2 log2(G) of them.
    result: Factor | None = None
    square = base
    while exponent:
        if exponent & 1:
            result = square if result is None else product(result, square)
        exponent >>= 1
        if exponent:
            square = product(square, square)
    assert result is not None
    return result


def cheapest_path(prices: Sequence[FloatArray], start: int, end: int) -> list[int]:
    """States of the cheapest path from start to end, both included.

    Args:
        prices: of each step from state to state, shape [N, N] each; at least one step.
        start: first state.
        end: last state.
    """
    remaining = [np.where(np.arange(len(prices[0])) == end, 0.0, np.inf)]
    for matrix in reversed(prices):
        remaining.append((matrix + remaining[-1][None, :]).min(axis=1))
    path = [start]
    for matrix, left in zip(prices, reversed(remaining[:-1]), strict=True):
        path.append(int((matrix[path[-1]] + left).argmin()))
    return path


RunTables = tuple[tuple[BlockTable, int], ...]
"""Tables of a run's groups in order, each with the number of consecutive groups it is for."""


def alike_groups(run: Run, costs: Sequence[FloatArray]) -> tuple[tuple[int, int], ...]:
    """Representatives of consecutive groups with equal costs, and the number of groups of each."""
    groups = run.instances
    # Prices of usage differ in the last group only (`UsageWeights`), so it may need a table of its
    # own, and all others share one.
    inner, last = groups[min(1, len(groups) - 2)], groups[-1]
    if all(np.array_equal(costs[v], costs[w]) for v, w in zip(inner, last, strict=True)):
        return ((1, len(groups)),)
    return (min(1, len(groups) - 2), len(groups) - 1), (len(groups) - 1, 1)


def joined_table(tables: RunTables) -> JointTable:
    """The least price of all groups of a run, by strategies before it, at its end, and shared."""
    table = tables[0][0]
    run = table.run
    powers = [power(part.as_batch(), number, batched_min_plus) for part, number in tables]
    values = np.moveaxis(reduce(batched_min_plus, powers), 0, 2).reshape(table.shape)
    return JointTable((*run.before, *run.last_boundary, *table.shared_nodes), values)


@dataclass(frozen=True)
class Around:
    """Where the path of a run through its groups begins and ends.

    Attributes:
        shared_picks: strategies of the shared nodes that are axes of its tables.
        matrix: number of the matrix of this state of the shared nodes.
        first: state before the first group.
        last: state after the last group.
    """

    shared_picks: tuple[int, ...]
    matrix: int
    first: int
    last: int

    @classmethod
    def of(cls, table: BlockTable, picks: Mapping[int, int]) -> "Around":
        """The ends of a run with this table, given the strategies of the nodes around it."""
        run, shape = table.run, table.shape[: len(table.run.boundary)]
        shared_picks = tuple(picks[h] for h in table.shared_nodes)
        sizes = table.shape[2 * len(run.boundary) :]
        matrix = int(np.ravel_multi_index(shared_picks, sizes)) if shared_picks else 0
        first, last = (
            int(np.ravel_multi_index([picks[v] for v in nodes], shape))
            for nodes in (run.before, run.last_boundary)
        )
        return cls(shared_picks, matrix, first, last)

    def seen(self, table: BlockTable, step: tuple[int, int]) -> tuple[int, ...]:
        """Strategies of the nodes of a table's axes for a step from state to state."""
        shape = table.shape[: len(table.run.boundary)]
        states = (int(i) for flat in step for i in np.unravel_index(flat, shape))
        return (*states, *self.shared_picks)


def write_choices(tables: RunTables, picks: Mapping[int, int], choice: IntArray) -> None:
    """Write the choices of every group of a run, given those before it and at its end."""
    table = tables[0][0]
    around = Around.of(table, picks)
    of_group = [part for part, (_, number) in enumerate(tables) for _ in range(number)]
    matrices = [part.as_batch()[around.matrix] for part, _ in tables]
    path = cheapest_path([matrices[part] for part in of_group], around.first, around.last)
    # Groups that pass from the same state to the same state may choose alike: solved once.
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for k, step in enumerate(pairwise(path)):
        groups.setdefault((of_group[k], step), []).append(k)
    for (part, step), numbers in groups.items():
        own = tables[part][0]
        choice[table.run.node_array[numbers]] = own.interior(around.seen(own, step))
