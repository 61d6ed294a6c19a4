"""Run contraction: every run becomes a single table, whatever its length.

A state is a combination of strategies of the boundary nodes between two groups. The table of a
group has a price for each pair of states, so the table of a run is its min-plus power.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.block_cache import KeyValueStore, SolvedBlock
from autoshard.solve.elimination import Elimination, Evaluation, Table
from autoshard.solve.network import Network, Variable
from autoshard.solve.presolve import Inverse, min_plus
from autoshard.solve.problem import Problem
from autoshard.solve.runs.block_table import (
    BlockTable,
    BlockTemplate,
    OpenStrategies,
    PresolveMemo,
    RunBlock,
    reduce_around,
)
from autoshard.solve.runs.find import Run, independent_runs, uncovered_edges
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_OVERHEAD = 3e7
"""Work that is added for each evaluation of a contracted problem."""


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


def joining_work(tables: RunTables) -> float:
    """Additions that joining the tables of a run takes."""
    sizes = ((table.as_batch(len(table.template.run.boundary)), number) for table, number in tables)
    return float(sum(2 * n.bit_length() * m.shape[0] * m.shape[1] ** 3 for m, n in sizes))


def joined_table(tables: RunTables) -> Table:
    """The least price of all groups of a run, by strategies before it, at its end, and shared."""
    table = tables[0][0]
    run = table.template.run
    powers = [min_plus_power(part.as_batch(len(run.boundary)), number) for part, number in tables]
    values = np.moveaxis(reduce(batched_min_plus, powers), 0, 2).reshape(table.values.shape)
    return Table((*run.before, *run.last_boundary, *table.template.kept_shared_nodes), values)


def write_choices(tables: RunTables, result: Evaluation, choice: IntArray) -> None:
    """Write the choices of every group of a run, given those before it and at its end."""
    table = tables[0][0]
    run = table.template.run
    shape = table.values.shape[: len(run.boundary)]
    state = 0
    shared_picks = tuple(result.picks[h] for h in table.template.kept_shared_nodes)
    if shared_picks:
        shared_shape = table.values.shape[2 * len(run.boundary) :]
        state = int(np.ravel_multi_index(shared_picks, shared_shape))
    first, last = (
        int(np.ravel_multi_index([result.picks[v] for v in nodes], shape))
        for nodes in (run.before, run.last_boundary)
    )
    of_group = [part for part, (_, number) in enumerate(tables) for _ in range(number)]
    matrices = [part.as_batch(len(run.boundary))[state] for part, _ in tables]
    path = cheapest_path([matrices[part] for part in of_group], first, last)
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for k, step in enumerate(pairwise(path)):
        groups.setdefault((of_group[k], step), []).append(k)
    for (part, step), numbers in groups.items():
        seen = [int(i) for flat in step for i in np.unravel_index(flat, shape)]
        choice[run.node_array[numbers]] = tables[part][0].interior((*seen, *shared_picks))


@dataclass(frozen=True, eq=False)
class Answer:
    """The least price of a contracted problem.

    Attributes:
        value: the price; a lower bound where shared nodes are relaxed.
        choice: a strategy per node of the whole problem that attains it; those of relaxed shared
            nodes are arbitrary.
        shared_node_bounds: least price by strategy of each kept shared node; inf for strategies
            that are not open.
    """

    value: float
    choice: IntArray
    shared_node_bounds: Mapping[int, FloatArray] = field(default_factory=dict)


@dataclass(eq=False)
class _AtCosts:
    """Intermediate results for some costs.

    Attributes:
        costs: shape [S] for each node of the problem.
        rest: the reduced network outside of runs, and the inverse of its reductions.
        tables: of each run, by its number and the key of its open strategies.
        alike: result of `alike_groups` for each run.
    """

    costs: Sequence[FloatArray]
    rest: tuple[Network, Inverse] | None = None
    tables: dict[tuple[int, bytes], RunTables | None] = field(default_factory=dict)
    alike: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)


class ContractedProblem:
    """Exact minimisation of a problem with runs, by contraction and elimination.

    Corresponding nodes must have equal costs in all groups of a run but its last one.

    Args:
        problem: the problem; its usage limit is ignored.
        store: stores tables of groups for other solves; None for no store.
        effort: limits of work, and when to stop.

    Attributes:
        work: approximate number of additions so far. Tables from the store count as if they were
            computed, so that the number does not depend on the content of the store.
    """

    def __init__(
        self,
        problem: Problem,
        store: KeyValueStore | None = None,
        *,
        effort: Effort = DEFAULT_EFFORT,
    ) -> None:
        self._problem = problem
        self._effort, self._settings = effort, effort.settings
        self._known = PresolveMemo()
        self._at: _AtCosts | None = None
        self.work = 0.0
        self._runs = independent_runs(problem)
        contracted = {v for run in self._runs for instance in run.instances for v in instance}
        self._boundary = {v for run in self._runs for v in run.last_boundary}
        self._stay = [
            v for v in range(len(problem.nodes)) if v not in contracted or v in self._boundary
        ]
        self._edges = uncovered_edges(problem, self._runs)
        self.shared_nodes = tuple(sorted({h for run in self._runs for h in run.shared_nodes}))
        self._blocks = [RunBlock(problem, run, store) for run in self._runs]

    @property
    def worthwhile(self) -> bool:
        """True if there is a run to contract."""
        return bool(self._runs)

    @property
    def num_components(self) -> int:
        """Largest number of components of a run's groups."""
        return max(len(block.components) for block in self._blocks)

    def report(self) -> tuple[SolvedBlock, ...]:
        """Statistics of the block of each run."""
        return tuple(block.report() for block in self._blocks)

    def shared(self, choice: IntArray) -> dict[int, BoolArray]:
        """Strategies of a choice at shared nodes, and at boundary nodes of any group."""
        taken = {shared_node: choice[[shared_node]] for shared_node in self.shared_nodes}
        for run in self._runs:
            for boundary_node, before, last in zip(
                run.boundary, run.before, run.last_boundary, strict=True
            ):
                taken[last] = choice[[before, *(group[boundary_node] for group in run.instances)]]
        return {
            v: np.isin(np.arange(self._problem.nodes[v].num_strategies), strategies)
            for v, strategies in taken.items()
        }

    def minimise(
        self,
        costs: Sequence[FloatArray],
        still_open: OpenStrategies,
        *,
        bounds_of: Sequence[int] = (),
        most_work: float | None = None,
        component: int | None = None,
    ) -> Answer | None:
        """The least price for given costs per strategy of each node.

        Args:
            costs: shape [S] for each node of the problem.
            still_open: strategies that shared nodes and boundary nodes may take.
            bounds_of: shared nodes whose least price by strategy is computed.
            most_work: largest number of additions for one group's table.
            component: number of the only component of groups that is allowed; all if None.

        Returns:
            None if the tables would be too large.
        """
        if most_work is None:
            most_work = self._settings.max_elimination_work
        self.work += _OVERHEAD
        tables = self._group_tables(costs, still_open, most_work, component)
        if tables is None:
            return None
        return self._join(self._rest(costs, still_open), tables, bounds_of)

    def _group_tables(
        self,
        costs: Sequence[FloatArray],
        still_open: OpenStrategies,
        most_work: float,
        component: int | None = None,
    ) -> list[RunTables] | None:
        known = self._known_at(costs)
        found: list[RunTables] = []
        for i, block in enumerate(self._blocks):
            template = BlockTemplate(
                self._problem,
                block,
                still_open,
                self._known,
                component=component,
                effort=self._effort,
            )
            view = template.view(most_work)
            if i not in known.alike:
                known.alike[i] = alike_groups(block.run, costs)
            if (i, view) not in known.tables:
                known.tables[i, view] = self._evaluated(template, known.alike[i], costs, most_work)
            tables = known.tables[i, view]
            if tables is None:
                return None
            found.append(tables)
        return found

    def _evaluated(
        self,
        template: BlockTemplate,
        alike: Sequence[tuple[int, int]],
        costs: Sequence[FloatArray],
        most_work: float,
    ) -> RunTables | None:
        """The table of each representative group, with its number of groups."""
        groups, tables = template.run.instances, []
        for k, number in alike:
            own = {v: costs[w] for v, w in zip(groups[1], groups[k], strict=True)}
            table = template.evaluate(own, most_work=most_work)
            if table is None:
                return None
            self.work += table.work
            tables.append((table, number))
        return tuple(tables)

    def _known_at(self, costs: Sequence[FloatArray]) -> "_AtCosts":
        if self._at is None or self._at.costs is not costs:
            self._at = _AtCosts(costs)
        return self._at

    def _join(
        self,
        rest: tuple[Network, Inverse],
        tables: Sequence[RunTables],
        bounds_of: Sequence[int],
    ) -> Answer | None:
        """Minimise the network outside of runs, with one table per run."""
        network, inverse = rest
        self.work += sum(map(joining_work, tables))
        extra = [joined_table(table) for table in tables]
        plan = Elimination.compile(network, extra=extra, effort=self._effort)
        if plan is None:
            return None
        remaining = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(remaining)
        choice = np.zeros(len(self._problem.nodes), dtype=np.intp)
        for v, s in result.picks.items():
            choice[v] = network.variables[v].labels[s]
        inverse(choice)
        for table in tables:
            write_choices(table, result, choice)
        labels = {v: network.variables[v].labels for v in bounds_of}
        return Answer(result.value, choice, self._shared_node_bounds(labels, plan, result))

    def _shared_node_bounds(
        self,
        labels: Mapping[int, IntArray],
        plan: Elimination,
        result: Evaluation,
    ) -> dict[int, FloatArray]:
        if not labels or not np.isfinite(result.value):
            return {}
        marginals = plan.min_marginals(result)
        bounds = {}
        for shared_node, still_open in labels.items():
            bounds[shared_node] = np.full(self._problem.nodes[shared_node].num_strategies, np.inf)
            bounds[shared_node][still_open] = marginals[shared_node]
        return bounds

    def _rest(
        self, costs: Sequence[FloatArray], still_open: OpenStrategies
    ) -> tuple[Network, Inverse]:
        """The network outside of runs with open strategies only, and the inverse."""
        known = self._known_at(costs)
        if known.rest is None:
            known.rest = self._reduce_rest(costs)
        network, inverse = known.rest[0].copy(), known.rest[1]
        for v, mask in still_open.items():
            if mask is not None and v in self.shared_nodes:
                network.keep(v, mask)
        for run in self._runs:
            for before, boundary_node in zip(run.before, run.last_boundary, strict=True):
                mask = still_open.get(boundary_node)
                for v in {before, boundary_node} if mask is not None else ():
                    assert mask is not None
                    network.keep(v, mask[network.variables[v].labels])
        return network, inverse

    def _reduce_rest(self, costs: Sequence[FloatArray]) -> tuple[Network, Inverse]:
        """The reduced network outside of runs; last boundary nodes are priced by the tables."""
        network = Network()
        for v in self._stay:
            cost = np.zeros_like(costs[v]) if v in self._boundary else costs[v]
            network.add(v, Variable(np.arange(len(cost)), cost))
        network.connect_all(self._edges)
        seen = {
            v for run in self._runs for v in (*run.before, *run.last_boundary, *run.shared_nodes)
        }
        return network, reduce_around(network, seen, self._known, effort=self._effort)
