"""Run contraction: every run becomes a single table, whatever its length.

A state is a combination of strategies of the boundary nodes between two groups. The table of a
group has a price for each pair of states, so the table of a run is its min-plus power.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.block_cache import KeyValueStore, SolvedBlock
from autoshard.solve.elimination import Elimination, Evaluation, Table
from autoshard.solve.network import Network, Variable
from autoshard.solve.presolve import Inverse, min_plus, sequence
from autoshard.solve.problem import Problem
from autoshard.solve.runs.block_table import (
    BlockTable,
    PresolveMemo,
    RunBlock,
    Shared,
    reduce_around,
)
from autoshard.solve.runs.find import Run, independent_runs, uncovered_edges
from autoshard.solve.settings import DEFAULT_EFFORT, Effort


def batched_min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """Min-plus products of stacks of matrices, [M, I, K] by [M, K, J] to [M, I, J]."""
    return np.stack([min_plus(*pair) for pair in zip(left, right, strict=True)])


def min_plus_power(matrices: FloatArray, exponent: int) -> FloatArray:
    """Min-plus power of a stack of square matrices [M, N, N] by repeated squaring."""
    result: FloatArray | None = None
    square = matrices
    while exponent:
        if exponent & 1:
            result = square if result is None else batched_min_plus(result, square)
        exponent >>= 1
        if exponent:
            square = batched_min_plus(square, square)
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
    inner, last = groups[min(1, len(groups) - 2)], groups[-1]
    if all(np.array_equal(costs[v], costs[w]) for v, w in zip(inner, last, strict=True)):
        return ((1, len(groups)),)
    return (min(1, len(groups) - 2), len(groups) - 1), (len(groups) - 1, 1)


def joined_table(tables: RunTables) -> Table:
    """The least price of all groups of a run, by strategies before it, at its end, and shared."""
    table = tables[0][0]
    run = table.run
    powers = [min_plus_power(part.as_batch(), number) for part, number in tables]
    values = np.moveaxis(reduce(batched_min_plus, powers), 0, 2).reshape(table.shape)
    return Table((*run.before, *run.last_boundary, *table.shared_nodes), values)


def write_choices(tables: RunTables, result: Evaluation, choice: IntArray) -> None:
    """Write the choices of every group of a run, given those before it and at its end."""
    table = tables[0][0]
    run = table.run
    shape = table.shape[: len(run.boundary)]
    state = 0
    shared_picks = tuple(result.picks[h] for h in table.shared_nodes)
    if shared_picks:
        shared_shape = table.shape[2 * len(run.boundary) :]
        state = int(np.ravel_multi_index(shared_picks, shared_shape))
    first, last = (
        int(np.ravel_multi_index([result.picks[v] for v in nodes], shape))
        for nodes in (run.before, run.last_boundary)
    )
    of_group = [part for part, (_, number) in enumerate(tables) for _ in range(number)]
    matrices = [part.as_batch()[state] for part, _ in tables]
    path = cheapest_path([matrices[part] for part in of_group], first, last)
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for k, step in enumerate(pairwise(path)):
        groups.setdefault((of_group[k], step), []).append(k)
    for (part, step), numbers in groups.items():
        seen = [int(i) for flat in step for i in np.unravel_index(flat, shape)]
        choice[run.node_array[numbers]] = tables[part][0].interior((*seen, *shared_picks))


class ContractedProblem:
    """Exact minimisation of a problem with runs, by contraction and elimination.

    Corresponding nodes must have equal costs in all groups of a run but its last one.

    Args:
        problem: the problem; its usage limit is ignored.
        store: stores tables of groups for other solves; None for no store.
        effort: limits of work, and when to stop.
    """

    def __init__(
        self,
        problem: Problem,
        store: KeyValueStore | None = None,
        *,
        effort: Effort = DEFAULT_EFFORT,
    ) -> None:
        self._problem = problem
        self._effort = effort
        self._runs = independent_runs(problem)
        contracted = {v for run in self._runs for instance in run.instances for v in instance}
        self._boundary = {v for run in self._runs for v in run.last_boundary}
        self._stay = [
            v for v in range(len(problem.nodes)) if v not in contracted or v in self._boundary
        ]
        self._edges = uncovered_edges(problem, self._runs)
        self._seen = {
            v for run in self._runs for v in (*run.before, *run.last_boundary, *run.shared_nodes)
        }
        self._known = PresolveMemo()
        self._blocks = [RunBlock(problem, run, store, self._known, effort) for run in self._runs]
        self._shared_nodes = tuple(sorted({h for run in self._runs for h in run.shared_nodes}))
        self._to_shared_nodes = [
            edge
            for edge in problem.edges
            if not {edge.source, edge.target}.isdisjoint(self._shared_nodes)
        ]

    @property
    def worthwhile(self) -> bool:
        """True if there is a run to contract."""
        return bool(self._runs)

    def report(self) -> tuple[SolvedBlock, ...]:
        """Statistics of the block of each run."""
        return tuple(block.report() for block in self._blocks)

    def minimise(self, costs: Sequence[FloatArray]) -> tuple[float, IntArray] | None:
        """A lower bound for given costs per strategy of each node, and a choice.

        The choice attains the bound, unless shared nodes make tables too large. Then every group
        may pick another strategy of a shared node, which gives the bound; for the choice, they have
        the strategies that are best for the others of the choice at the bound.

        Args:
            costs: shape [S] for each node of the problem.

        Returns:
            None if the tables would be too large.
        """
        settings, rest = self._effort.settings, self._rest(costs)
        exact = self._joined(costs, rest, {}, settings.max_group_work)
        if exact is not None or not self._shared_nodes:
            return exact
        most_work = settings.max_elimination_work
        relaxed = self._joined(costs, rest, dict.fromkeys(self._shared_nodes), most_work)
        if relaxed is None:
            return None
        fixed = self._joined(costs, rest, self._best_shared(costs, relaxed[1]), most_work)
        return None if fixed is None else (relaxed[0], fixed[1])

    def _best_shared(self, costs: Sequence[FloatArray], choice: IntArray) -> Shared:
        """The cheapest strategy of each shared node for the other strategies of a choice."""
        prices = {h: costs[h].copy() for h in self._shared_nodes}
        for edge in self._to_shared_nodes:
            if edge.source in prices:
                prices[edge.source] += edge.cost[edge.rows, edge.cols[choice[edge.target]]]
            if edge.target in prices:
                prices[edge.target] += edge.cost[edge.rows[choice[edge.source]], edge.cols]
        return {h: int(paid.argmin()) for h, paid in prices.items()}

    def _joined(
        self,
        costs: Sequence[FloatArray],
        rest: tuple[Network, Inverse],
        shared: Shared,
        most_work: float,
    ) -> tuple[float, IntArray] | None:
        """The least price and a choice that attains it; None if the tables would be too large.

        Args:
            costs: shape [S] for each node of the problem.
            rest: the reduced network outside of runs, and the inverse of its reductions.
            shared: shared nodes that are no axes of tables.
            most_work: largest number of additions for one table.
        """
        tables = []
        for block in self._blocks:
            evaluated = _evaluated(block, costs, shared, most_work)
            if evaluated is None:
                return None
            tables.append(evaluated)
        network, inverse = rest[0].copy(), rest[1]
        for v, strategy in shared.items():
            if strategy is not None:
                network.keep(v, np.arange(len(costs[v])) == strategy)
        inverse = sequence(
            [inverse, reduce_around(network, self._seen, self._known, effort=self._effort)]
        )
        extra = [joined_table(table) for table in tables]
        plan = Elimination.compile(network, extra=extra, effort=self._effort)
        if plan is None:
            return None
        result = plan.evaluate({v: x.cost for v, x in network.variables.items()})
        choice = np.zeros(len(self._problem.nodes), dtype=np.intp)
        for v, s in result.picks.items():
            choice[v] = network.variables[v].labels[s]
        inverse(choice)
        for table in tables:
            write_choices(table, result, choice)
        return result.value, choice

    def _rest(self, costs: Sequence[FloatArray]) -> tuple[Network, Inverse]:
        """The reduced network outside of runs; last boundary nodes are priced by the tables."""
        network = Network()
        for v in self._stay:
            cost = np.zeros_like(costs[v]) if v in self._boundary else costs[v]
            network.add(v, Variable(np.arange(len(cost)), cost))
        network.connect_all(self._edges)
        return network, reduce_around(network, self._seen, self._known, effort=self._effort)


def _evaluated(
    block: RunBlock, costs: Sequence[FloatArray], shared: Shared, most_work: float
) -> RunTables | None:
    """The table of each group with costs of its own, and the number of groups with these costs."""
    groups, tables = block.run.instances, []
    for k, number in alike_groups(block.run, costs):
        own = {v: costs[w] for v, w in zip(groups[1], groups[k], strict=True)}
        table = BlockTable(block, own, shared, most_work)
        if table.values is None:
            return None
        tables.append((table, number))
    return tuple(tables)
