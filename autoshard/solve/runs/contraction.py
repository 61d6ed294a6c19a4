"""Run contraction: every run becomes a single table, whatever its length.

A state is a combination of strategies of the boundary nodes between two groups. The table of a
group has a price for each pair of states, so the table of a run is its min-plus power.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.block_cache import KeyValueStore, SolvedBlock
from autoshard.solve.bounds.elimination import Elimination
from autoshard.solve.network import Network, NetworkVariable
from autoshard.solve.presolve import Inverse, sequence
from autoshard.solve.problem import Problem
from autoshard.solve.runs.block_table import (
    BlockTable,
    PresolveMemo,
    RunBlock,
    Shared,
    reduce_around,
)
from autoshard.solve.runs.counted_groups import CountedMinimum, Outside
from autoshard.solve.runs.find import independent_runs, uncovered_edges
from autoshard.solve.runs.run_tables import RunTables, alike_groups, joined_table, write_choices
from autoshard.solve.settings import DEFAULT_EFFORT, Effort


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

    @property
    def has_shared_nodes(self) -> bool:
        """True if groups of runs have nodes outside of the runs in common."""
        return bool(self._shared_nodes)

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
        # Shared nodes are then no axes of tables, whose sizes are products over axes. The first
        # call gives the bound; the second one a choice that has one strategy for each of them.
        relaxed = self._joined(costs, rest, dict.fromkeys(self._shared_nodes), most_work)
        if relaxed is None:
            return None
        fixed = self._joined(costs, rest, self._best_shared(costs, relaxed[1]), most_work)
        return None if fixed is None else (relaxed[0], fixed[1])

    def minimise_by_count(
        self, costs: Sequence[FloatArray], most: float, *, shared: IntArray | None = None
    ) -> CountedMinimum | None:
        """The least prices for given costs by the numbers of groups in one of their components.

        If shared nodes make tables too large, prices are lower bounds, as those of `minimise`.

        Args:
            costs: shape [S] for each node of the problem.
            most: larger prices do not matter.
            shared: a choice whose strategies the shared nodes have; None for any strategies.

        Returns:
            None if no run has components, or the tables would be too large.
        """
        if shared is not None:
            return self._counted(costs, {h: int(shared[h]) for h in self._shared_nodes}, most)
        exact = self._counted(costs, {}, most)
        if exact is not None or not self._shared_nodes:
            return exact
        relaxed = self._counted(costs, dict.fromkeys(self._shared_nodes), most)
        if relaxed is None:
            return None

        def choice(numbers: Sequence[int]) -> IntArray:
            found = relaxed.choice(numbers)
            fixed = self._counted(costs, self._best_shared(costs, found), np.inf)
            return found if fixed is None else fixed.choice(numbers)

        return replace(relaxed, choice=choice)

    def _counted(
        self, costs: Sequence[FloatArray], shared: Shared, most: float
    ) -> CountedMinimum | None:
        """The least prices by numbers of groups, or None, with arguments as those of `_joined`."""
        settings = self._effort.settings
        most_work = settings.max_elimination_work if shared else settings.max_group_work
        tables = self._tables(costs, shared, most_work)
        if tables is None:
            return None
        network, inverse = self._rest(costs)
        inverse = sequence([inverse, self._reduced_around(network, costs, shared)])
        outside = Outside(network, inverse, len(costs), self._effort)
        return CountedMinimum.of(outside, tables, most)

    def _tables(
        self, costs: Sequence[FloatArray], shared: Shared, most_work: float
    ) -> list[RunTables] | None:
        """The tables of each run; None if one would be too large."""
        found = []
        for block in self._blocks:
            tables = _evaluated(block, costs, shared, most_work)
            if tables is None:
                return None
            found.append(tables)
        return found

    def _reduced_around(
        self, network: Network, costs: Sequence[FloatArray], shared: Shared
    ) -> Inverse:
        """Reduce the network outside of runs, with the given strategies of shared nodes."""
        for v, strategy in shared.items():
            if strategy is not None:
                network.keep(v, np.arange(len(costs[v])) == strategy)
        return reduce_around(network, self._seen, self._known, effort=self._effort)

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
        tables = self._tables(costs, shared, most_work)
        if tables is None:
            return None
        network, inverse = rest[0].copy(), rest[1]
        inverse = sequence([inverse, self._reduced_around(network, costs, shared)])
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
            write_choices(table, result.picks, choice)
        return result.value, choice

    def _rest(self, costs: Sequence[FloatArray]) -> tuple[Network, Inverse]:
        """The reduced network outside of runs; last boundary nodes are priced by the tables."""
        network = Network()
        for v in self._stay:
            cost = np.zeros_like(costs[v]) if v in self._boundary else costs[v]
            network.add(v, NetworkVariable(np.arange(len(cost)), cost))
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
