"""A problem in which every run is a single table: its size does not depend on the depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autoshard.solve.elimination import MOST_WORK, Elimination, Evaluation, Table
from autoshard.solve.network import Network
from autoshard.solve.problem import BoolArray, FloatArray, IntArray, Node, Problem
from autoshard.solve.repeats.runs import Run, covered_edges
from autoshard.solve.repeats.template import (
    GroupTable,
    Hubs,
    Template,
    cheapest_path,
    min_plus_power,
)


@dataclass(frozen=True, eq=False)
class Answer:
    """The least price of a condensed problem.

    Attributes:
        value: the price; a lower bound where hubs are relaxed.
        choice: a strategy per node of the whole problem that attains it, hubs apart.
        hub_bounds: least price by strategy of each kept hub; inf where it is not open.
    """

    value: float
    choice: IntArray
    hub_bounds: Mapping[int, FloatArray] = field(default_factory=dict)


class Condensed:
    """The exact minimum of a problem with runs, by elimination.

    Args:
        problem: the problem; its usage limit is not looked at.
        runs: disjoint runs in it.
        check: called now and then; raises to stop.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run], *, check: Callable[[], None]) -> None:
        self._problem = problem
        self._check = check
        gone = {v for run in runs for instance in run.instances for v in instance}
        staying = {v for run in runs for v in run.last_ports}
        self._runs = [run for run in runs if not (gone - staying) & {*run.before, *run.hubs}]
        gone = {v for run in self._runs for instance in run.instances for v in instance}
        self._ports = {v for run in self._runs for v in run.last_ports}
        self._stay = [v for v in range(len(problem.nodes)) if v not in gone or v in self._ports]
        self._edges = covered_edges(problem, self._runs)
        self.hubs = tuple(sorted({h for run in self._runs for h in run.hubs}))

    @property
    def worthwhile(self) -> bool:
        """Whether there is a run left to condense."""
        return bool(self._runs)

    def minimise(
        self,
        costs: Sequence[FloatArray],
        open_hubs: Mapping[int, BoolArray | None],
        *,
        bounds_of: Sequence[int] = (),
        most_work: float = MOST_WORK,
    ) -> Answer | None:
        """The least price for given costs per strategy of each node.

        Args:
            costs: shape [S] for each node of the problem.
            open_hubs: strategies that each hub may take, or None where it is relaxed.
            bounds_of: hubs whose price by strategy is wanted.
            most_work: largest number of additions for one group's table.

        Returns:
            None where the tables would be too large.
        """
        tables: list[GroupTable] = []
        powers: list[FloatArray] = []
        for run in self._runs:
            template = Template(self._problem, run, open_hubs, check=self._check)
            if not template.compile(most_work):
                return None
            table = template.evaluate({v: costs[v] for v in run.instances[1]})
            tables.append(table)
            batch = table.as_batch(len(run.ports))
            powers.append(min_plus_power(batch, len(run.instances)))
        return self._join(costs, open_hubs, tables, powers, bounds_of)

    def _join(
        self,
        costs: Sequence[FloatArray],
        open_hubs: Hubs,
        tables: Sequence[GroupTable],
        powers: Sequence[FloatArray],
        bounds_of: Sequence[int],
    ) -> Answer | None:
        """Minimise what stays, with one table per run."""
        network, remaining = self._rest(costs, open_hubs)
        extra = [
            self._table(run, table, power)
            for run, table, power in zip(self._runs, tables, powers, strict=True)
        ]
        plan = Elimination.compile(network, extra=extra, check=self._check)
        if plan is None:
            return None
        result = plan.evaluate(remaining, check=self._check)
        choice = np.zeros(len(self._problem.nodes), dtype=np.intp)
        for v, s in result.picks.items():
            choice[v] = network.variables[v].labels[s]
        for run, table in zip(self._runs, tables, strict=True):
            self._expand(run, table, result, choice)
        return Answer(result.value, choice, self._hub_bounds(network, plan, result, bounds_of))

    def _hub_bounds(
        self, network: Network, plan: Elimination, result: Evaluation, wanted: Sequence[int]
    ) -> dict[int, FloatArray]:
        if not wanted or not np.isfinite(result.value):
            return {}
        marginals = plan.min_marginals(result, check=self._check)
        bounds = {}
        for hub in wanted:
            bounds[hub] = np.full(self._problem.nodes[hub].num_strategies, np.inf)
            bounds[hub][network.variables[hub].labels] = marginals[hub]
        return bounds

    def _rest(
        self, costs: Sequence[FloatArray], open_hubs: Hubs
    ) -> tuple[Network, dict[int, FloatArray]]:
        """What stays when runs are condensed; the price of a run's last ports is in its table."""
        place = {v: i for i, v in enumerate(self._stay)}
        nodes = [
            Node(np.zeros_like(costs[v]) if v in self._ports else costs[v], np.zeros_like(costs[v]))
            for v in self._stay
        ]
        edges = [
            type(e)(place[e.source], place[e.target], e.cost, e.rows, e.cols) for e in self._edges
        ]
        network = _renamed(Network.from_problem(Problem(tuple(nodes), tuple(edges))), self._stay)
        for hub, mask in open_hubs.items():
            if mask is not None:
                network.keep(hub, mask)
        return network, {v: x.cost for v, x in network.variables.items()}

    def _table(self, run: Run, table: GroupTable, power: FloatArray) -> Table:
        num_ports = len(run.ports)
        shape = table.values.shape
        values = np.moveaxis(power, 0, 2).reshape(shape)
        assert len(shape) == 2 * num_ports + len(table.template.kept_hubs)
        return Table((*run.before, *run.last_ports, *table.template.kept_hubs), values)

    def _expand(self, run: Run, table: GroupTable, result: Evaluation, choice: IntArray) -> None:
        """Write the choices of every group of a run, given those at its ends."""
        shape = table.values.shape[: len(run.ports)]
        state = 0
        hub_picks = tuple(result.picks[h] for h in table.template.kept_hubs)
        if hub_picks:
            hub_shape = table.values.shape[2 * len(run.ports) :]
            state = int(np.ravel_multi_index(hub_picks, hub_shape))
        ends = [
            int(np.ravel_multi_index([result.picks[v] for v in nodes], shape))
            for nodes in (run.before, run.last_ports)
        ]
        matrix = table.as_batch(len(run.ports))[state]
        path = cheapest_path(matrix, len(run.instances), *ends)
        interiors: dict[tuple[int, int], tuple[int, ...]] = {}
        for group, step in zip(run.instances, pairwise(path), strict=True):
            if step not in interiors:
                seen = [int(i) for flat in step for i in np.unravel_index(flat, shape)]
                interiors[step] = table.interior((*seen, *hub_picks))
            choice[list(group)] = interiors[step]


def _renamed(network: Network, names: Sequence[int]) -> Network:
    """The same network with other numbers for its variables."""
    renamed = Network()
    renamed.constant = network.constant
    for i, name in enumerate(names):
        renamed.variables[name] = network.variables[i]
        renamed.links[name] = {names[j]: link for j, link in network.links[i].items()}
        renamed.changes[name] = 0
    return renamed
