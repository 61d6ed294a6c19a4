"""A problem in which every run is a single table: its size does not depend on the depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autoshard.solve.elimination import MOST_WORK, Elimination, Evaluation, Table
from autoshard.solve.network import Network
from autoshard.solve.problem import FloatArray, IntArray, Node, Problem
from autoshard.solve.repeats.runs import Run, covered_edges
from autoshard.solve.repeats.template import (
    GroupTable,
    Known,
    Open,
    Template,
    cheapest_path,
    min_plus_power,
    reduce_around,
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
        self._known = Known()
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
        still_open: Open,
        *,
        bounds_of: Sequence[int] = (),
        most_work: float = MOST_WORK,
    ) -> Answer | None:
        """The least price for given costs per strategy of each node.

        Args:
            costs: shape [S] for each node of the problem.
            still_open: strategies that hubs and ports may take.
            bounds_of: hubs whose price by strategy is wanted.
            most_work: largest number of additions for one group's table.

        Returns:
            None where the tables would be too large.
        """
        tables = self._group_tables(costs, still_open, most_work)
        if tables is None:
            return None
        network = self._rest(costs, still_open)
        return self._join(network, tables, bounds_of)

    def port_bounds(
        self, costs: Sequence[FloatArray], still_open: Open
    ) -> dict[int, FloatArray] | None:
        """Lower bounds by strategy of each port, whichever group the port is of.

        Args:
            costs: shape [S] for each node of the problem.
            still_open: strategies of ports; all hubs must be relaxed.

        Returns:
            By the port's node of the last group, shape [S]; None where the tables would be
            too large.
        """
        tables = self._group_tables(costs, still_open, MOST_WORK)
        if tables is None:
            return None
        bounds: dict[int, FloatArray] = {}
        for i, (run, table) in enumerate(zip(self._runs, tables, strict=True)):
            network = self._rest(costs, still_open)
            others = [self._table(t) for j, t in enumerate(tables) if j != i]
            ends = (*run.before, *run.last_ports)
            keep = {v for other in others for v in other.scope} | set(ends)
            reduce_around(network, keep, self._known, check=self._check)
            plan = Elimination.compile(network, keep=ends, extra=others, check=self._check)
            if plan is None:
                return None
            left = {v: x.cost for v, x in network.variables.items()}
            outside = plan.joint_table(plan.evaluate(left, check=self._check), ends)
            bounds.update(_port_bounds(run, table, outside))
        return bounds

    def _group_tables(
        self, costs: Sequence[FloatArray], still_open: Open, most_work: float
    ) -> list[GroupTable] | None:
        tables: list[GroupTable] = []
        for run in self._runs:
            template = Template(self._problem, run, still_open, self._known, check=self._check)
            own = {v: costs[v] for v in run.instances[1]}
            table = template.evaluate(own, most_work=most_work)
            if table is None:
                return None
            tables.append(table)
        return tables

    def _join(
        self, network: Network, tables: Sequence[GroupTable], bounds_of: Sequence[int]
    ) -> Answer | None:
        """Minimise what stays, with one table per run."""
        extra = [self._table(table) for table in tables]
        keep = {v for table in extra for v in table.scope} | set(bounds_of)
        labels = {v: network.variables[v].labels for v in keep}
        inverse = reduce_around(network, keep, self._known, check=self._check)
        plan = Elimination.compile(network, extra=extra, check=self._check)
        if plan is None:
            return None
        remaining = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(remaining, check=self._check)
        choice = np.zeros(len(self._problem.nodes), dtype=np.intp)
        for v, s in result.picks.items():
            choice[v] = network.variables[v].labels[s]
        inverse(choice)
        for table in tables:
            self._expand(table, result, choice)
        return Answer(result.value, choice, self._hub_bounds(labels, plan, result, bounds_of))

    def _hub_bounds(
        self,
        labels: Mapping[int, IntArray],
        plan: Elimination,
        result: Evaluation,
        wanted: Sequence[int],
    ) -> dict[int, FloatArray]:
        if not wanted or not np.isfinite(result.value):
            return {}
        marginals = plan.min_marginals(result, check=self._check)
        bounds = {}
        for hub in wanted:
            bounds[hub] = np.full(self._problem.nodes[hub].num_strategies, np.inf)
            bounds[hub][labels[hub]] = marginals[hub]
        return bounds

    def _rest(self, costs: Sequence[FloatArray], still_open: Open) -> Network:
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
        for v, mask in still_open.items():
            if mask is not None and v in self.hubs:
                network.keep(v, mask)
        for run in self._runs:
            for before, port in zip(run.before, run.last_ports, strict=True):
                mask = still_open.get(port)
                for v in {before, port} if mask is not None else ():
                    assert mask is not None
                    network.keep(v, mask[network.variables[v].labels])
        return network

    def _table(self, table: GroupTable) -> Table:
        """The price of all groups of a run together, by what is at its ends."""
        run = table.template.run
        power = min_plus_power(table.as_batch(len(run.ports)), len(run.instances))
        values = np.moveaxis(power, 0, 2).reshape(table.values.shape)
        return Table((*run.before, *run.last_ports, *table.template.kept_hubs), values)

    def _expand(self, table: GroupTable, result: Evaluation, choice: IntArray) -> None:
        """Write the choices of every group of a run, given those at its ends."""
        run = table.template.run
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


def _port_bounds(run: Run, table: GroupTable, outside: FloatArray) -> dict[int, FloatArray]:
    """Least price of everything by strategy of each port, whichever group it is of.

    Args:
        run: the run.
        table: of one of its groups, hubs relaxed.
        outside: price of everything else by the states at the two ends of the run.
    """
    shape = table.values.shape[: len(run.ports)]
    (matrix,) = table.as_batch(len(run.ports))
    ends = outside.reshape(matrix.shape)
    # What is outside joins the two ends; a part for each end is a lower bound of it.
    head = ends[:, int(ends.min(axis=0).argmin())]
    with np.errstate(invalid="ignore"):
        tail = np.nan_to_num(ends - head[:, None], nan=np.inf, posinf=np.inf).min(axis=0)
    forward, backward = [head], [tail]
    for _ in run.instances:
        forward.append((forward[-1][:, None] + matrix).min(axis=0))
        backward.append((matrix + backward[-1][None, :]).min(axis=1))
    pairs = zip(forward, reversed(backward), strict=True)
    least = np.min([f + b for f, b in pairs], axis=0).reshape(shape)
    bounds = {}
    for axis, port in enumerate(run.last_ports):
        others = tuple(i for i in range(len(shape)) if i != axis)
        bounds[port] = np.full(table.template.num_strategies(port), np.inf)
        bounds[port][table.template.port_labels(axis)] = least.min(axis=others)
    return bounds


def _renamed(network: Network, names: Sequence[int]) -> Network:
    """The same network with other numbers for its variables."""
    renamed = Network()
    renamed.constant = network.constant
    for i, name in enumerate(names):
        renamed.variables[name] = network.variables[i]
        renamed.links[name] = {names[j]: link for j, link in network.links[i].items()}
        renamed.changes[name] = 0
    return renamed
