"""A problem in which every run is a single table: its size does not depend on the depth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.elimination import MOST_WORK, Elimination, Evaluation
from autoshard.solve.network import Network
from autoshard.solve.problem import Node, Problem
from autoshard.solve.reductions import Inverse
from autoshard.solve.repeats.block import Block
from autoshard.solve.repeats.run_tables import (
    Course,
    RunTables,
    alike_groups,
    bounds_at_ports,
    joined_table,
    steps_over,
    write_choices,
)
from autoshard.solve.repeats.runs import Run, covered_edges
from autoshard.solve.repeats.template import (
    Known,
    Open,
    Template,
    reduce_around,
)
from autoshard.solve.tables import KeyValueStore, SolvedBlock

_LEAST_WORK = 3e7
"""What one look at a problem costs beside additions, in additions."""


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


@dataclass(eq=False)
class _AtCosts:
    """What has been worked out for some costs.

    Attributes:
        costs: shape [S] for each node of the problem.
        rest: what stays when runs are condensed, reduced, and the way back.
        tables: of each run by its number, and by what was open to it.
        alike: for each run, groups that stand for others, and for how many in a row.
    """

    costs: Sequence[FloatArray]
    rest: tuple[Network, Inverse] | None = None
    tables: dict[tuple[int, bytes], RunTables | None] = field(default_factory=dict)
    alike: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)


class Condensed:
    """The exact minimum of a problem with runs, by elimination.

    The nodes of a place must be priced alike, but for those of a run's last group.

    Args:
        problem: the problem; its usage limit is not looked at.
        runs: disjoint runs in it.
        store: keeps tables of groups for other solves, if there is one.
        check: called now and then; raises to stop.

    Attributes:
        work: additions that it has come to so far, nearly; those of tables from the store are
            among them, so that it says the same whatever there is in the store.
    """

    def __init__(
        self,
        problem: Problem,
        runs: Sequence[Run],
        store: KeyValueStore | None = None,
        *,
        check: Callable[[], None],
    ) -> None:
        self._problem = problem
        self._check = check
        self._known = Known()
        self._at: _AtCosts | None = None
        self.work = 0.0
        gone = {v for run in runs for instance in run.instances for v in instance}
        staying = {v for run in runs for v in run.last_ports}
        self._runs = [run for run in runs if not (gone - staying) & {*run.before, *run.hubs}]
        gone = {v for run in self._runs for instance in run.instances for v in instance}
        self._ports = {v for run in self._runs for v in run.last_ports}
        self._stay = [v for v in range(len(problem.nodes)) if v not in gone or v in self._ports]
        self._edges = covered_edges(problem, self._runs)
        self.hubs = tuple(sorted({h for run in self._runs for h in run.hubs}))
        self._blocks = [Block(problem, run, store) for run in self._runs]

    @property
    def worthwhile(self) -> bool:
        """Whether there is a run left to condense."""
        return bool(self._runs)

    @property
    def num_modes(self) -> int:
        """Largest number of modes of a run's groups."""
        return max(len(block.modes) for block in self._blocks)

    def report(self) -> tuple[SolvedBlock, ...]:
        """What became of the block of each run."""
        return tuple(block.report() for block in self._blocks)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs that are condensed."""
        return tuple(self._runs)

    def shared(self, choice: IntArray) -> dict[int, BoolArray]:
        """What a choice takes at hubs, and at each port in any group of its run."""
        taken = {hub: choice[[hub]] for hub in self.hubs}
        for run in self._runs:
            for port, before, last in zip(run.ports, run.before, run.last_ports, strict=True):
                taken[last] = choice[[before, *(group[port] for group in run.instances)]]
        return {
            v: np.isin(np.arange(self._problem.nodes[v].num_strategies), strategies)
            for v, strategies in taken.items()
        }

    def minimise(
        self,
        costs: Sequence[FloatArray],
        still_open: Open,
        *,
        bounds_of: Sequence[int] = (),
        most_work: float = MOST_WORK,
        courses: Sequence[Course] = (),
        mode: int | None = None,
    ) -> Answer | None:
        """The least price for given costs per strategy of each node.

        Args:
            costs: shape [S] for each node of the problem.
            still_open: strategies that hubs and ports may take.
            bounds_of: hubs whose price by strategy is wanted.
            most_work: largest number of additions for one group's table.
            courses: for some runs, the walks over its groups that count.
            mode: number of the only mode of groups that counts; all if None.

        Returns:
            None where the tables would be too large.
        """
        self.work += _LEAST_WORK
        tables = self._group_tables(costs, still_open, most_work, mode)
        if tables is None:
            return None
        return self._join(self._rest(costs, still_open), tables, bounds_of, courses)

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
            network, _ = self._rest(costs, still_open)
            others = [joined_table(t, steps_over(t, ())) for j, t in enumerate(tables) if j != i]
            ends = (*run.before, *run.last_ports)
            plan = Elimination.compile(network, keep=ends, extra=others, check=self._check)
            if plan is None:
                return None
            left = {v: x.cost for v, x in network.variables.items()}
            outside = plan.joint_table(plan.evaluate(left, check=self._check), ends)
            bounds.update(bounds_at_ports(run, table, outside))
        return bounds

    def _group_tables(
        self,
        costs: Sequence[FloatArray],
        still_open: Open,
        most_work: float,
        mode: int | None = None,
    ) -> list[RunTables] | None:
        known = self._known_at(costs)
        found: list[RunTables] = []
        for i, block in enumerate(self._blocks):
            template = Template(
                self._problem, block, still_open, self._known, mode=mode, check=self._check
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
        template: Template,
        alike: Sequence[tuple[int, int]],
        costs: Sequence[FloatArray],
        most_work: float,
    ) -> RunTables | None:
        """A table for each of some groups, with the number that comes with it."""
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
        courses: Sequence[Course],
    ) -> Answer | None:
        """Minimise what stays, with one table per run."""
        network, inverse = rest
        steps = [steps_over(table, courses) for table in tables]
        self.work += sum(walk.work for walk in steps)
        extra = [joined_table(*pair) for pair in zip(tables, steps, strict=True)]
        plan = Elimination.compile(network, extra=extra, check=self._check)
        if plan is None:
            return None
        remaining = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(remaining, check=self._check)
        choice = np.zeros(len(self._problem.nodes), dtype=np.intp)
        for v, s in result.picks.items():
            choice[v] = network.variables[v].labels[s]
        inverse(choice)
        for table, walk in zip(tables, steps, strict=True):
            write_choices(table, walk, result, choice)
        labels = {v: network.variables[v].labels for v in bounds_of}
        return Answer(result.value, choice, self._hub_bounds(labels, plan, result))

    def _hub_bounds(
        self,
        labels: Mapping[int, IntArray],
        plan: Elimination,
        result: Evaluation,
    ) -> dict[int, FloatArray]:
        if not labels or not np.isfinite(result.value):
            return {}
        marginals = plan.min_marginals(result, check=self._check)
        bounds = {}
        for hub, still_open in labels.items():
            bounds[hub] = np.full(self._problem.nodes[hub].num_strategies, np.inf)
            bounds[hub][still_open] = marginals[hub]
        return bounds

    def _rest(self, costs: Sequence[FloatArray], still_open: Open) -> tuple[Network, Inverse]:
        """What stays when runs are condensed, and the way back to all of it."""
        known = self._known_at(costs)
        if known.rest is None:
            known.rest = self._reduce_rest(costs)
        network, inverse = known.rest[0].copy(), known.rest[1]
        for v, mask in still_open.items():
            if mask is not None and v in self.hubs:
                network.keep(v, mask)
        for run in self._runs:
            for before, port in zip(run.before, run.last_ports, strict=True):
                mask = still_open.get(port)
                for v in {before, port} if mask is not None else ():
                    assert mask is not None
                    network.keep(v, mask[network.variables[v].labels])
        return network, inverse

    def _reduce_rest(self, costs: Sequence[FloatArray]) -> tuple[Network, Inverse]:
        """What stays, reduced; the price of a run's last ports is in its table."""
        place = {v: i for i, v in enumerate(self._stay)}
        nodes = [
            Node(np.zeros_like(costs[v]) if v in self._ports else costs[v], np.zeros_like(costs[v]))
            for v in self._stay
        ]
        edges = [
            type(e)(place[e.source], place[e.target], e.cost, e.rows, e.cols) for e in self._edges
        ]
        network = _renamed(Network.from_problem(Problem(tuple(nodes), tuple(edges))), self._stay)
        seen = {v for run in self._runs for v in (*run.before, *run.last_ports, *run.hubs)}
        return network, reduce_around(network, seen, self._known, check=self._check)


def _renamed(network: Network, names: Sequence[int]) -> Network:
    """The same network with other numbers for its variables."""
    renamed = Network()
    renamed.constant = network.constant
    for i, name in enumerate(names):
        renamed.variables[name] = network.variables[i]
        renamed.links[name] = {names[j]: link for j, link in network.links[i].items()}
        renamed.changes[name] = 0
    return renamed
