"""The least price of a problem with runs: exactly where tables are small, else with a bound."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.repeats.condensed import Answer, Condensed
from autoshard.solve.repeats.run_tables import Course
from autoshard.solve.repeats.runs import Run
from autoshard.solve.repeats.template import Open
from autoshard.solve.repeats.walks import Changing, Leaving
from autoshard.solve.search import Search

Minimise = Callable[[Sequence[FloatArray], float], tuple[float, IntArray | None] | None]
"""Bound and best choice for given costs per strategy of each node, and the relative difference
that may be left between them."""

Ports = Mapping[int, BoolArray]
"""A set of strategies of ports, by each port's node of the last group, shape [S]."""

_EAGER_WORK = 2e8
"""Additions up to which hubs are not relaxed first: some tenths of a second."""
_LIKELY = 24
"""Strategies of a port that a good choice is looked for among."""
_EXACT_WORK = 2e9
"""Additions after which the optimum itself is not insisted on: some three seconds. A clock
would make the answer depend on the machine."""
SLACK = 1e-6
"""Relative difference below which two prices count as the same."""


class GroupSolver:
    """Minimise a problem with runs for any costs, its usage limit aside.

    Args:
        search: of the problem.
        condensed: the problem with its runs condensed.
    """

    def __init__(self, search: Search, condensed: Condensed) -> None:
        self._search = search
        self._problem = search.problem
        self._condensed = condensed
        hubs = set(condensed.hubs)
        self._to_hubs = [e for e in self._problem.edges if hubs & {e.source, e.target}]

    def minimise(
        self, costs: Sequence[FloatArray], slack: float
    ) -> tuple[float, IntArray | None] | None:
        """A lower bound, and the best choice that was found.

        Hubs make tables large. If they are too large, hubs are first relaxed. What that
        leaves of their strategies (those that some choice as good as the best one might
        take) is usually a handful, and then the tables are small.

        Args:
            costs: shape [S] for each node.
            slack: relative difference that may be left between the two.

        Returns:
            None where the tables would be too large.
        """
        hubs, nodes = self._condensed.hubs, self._problem.nodes
        every = {hub: np.ones(nodes[hub].num_strategies, dtype=np.bool_) for hub in hubs}
        exact = self._condensed.minimise(costs, every, most_work=_EAGER_WORK)
        if exact is not None:
            return exact.value, exact.choice
        relaxed = self._condensed.minimise(costs, dict.fromkeys(hubs), bounds_of=hubs)
        if relaxed is None:
            return None
        best = self._fixed_at_best(costs, relaxed, self._likely_ports(costs, relaxed))
        if best is not None and np.isinf(best.value):
            best = self._fixed_at_best(costs, relaxed, {})
        if best is None:
            return relaxed.value, None
        if self._condensed.work > _EXACT_WORK:
            slack = max(slack, self._search.gap)
        if _close(best.value, relaxed.value, slack):
            return relaxed.value, best.choice
        return self._narrowed(costs, relaxed, best, slack)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs that are condensed."""
        return self._condensed.runs

    @property
    def modes(self) -> tuple[int | None, ...]:
        """Each mode of groups; None where there is only one."""
        num_modes = self._condensed.num_modes
        return tuple(range(num_modes)) if num_modes > 1 else (None,)

    def share_alike(self, choice: IntArray, other: IntArray) -> bool:
        """Whether groups share the same strategies in two choices."""
        one, two = (self._condensed.shared(x) for x in (choice, other))
        return all(np.array_equal(one[v], two[v]) for v in one)

    def near(
        self, costs: Sequence[FloatArray], choice: IntArray, mode: int | None
    ) -> IntArray | None:
        """The best choice of those that agree with another one on what groups share.

        Args:
            costs: shape [S] for each node.
            choice: the other one.
            mode: number of the only mode of groups that counts; all if None.
        """
        answer = self._condensed.minimise(costs, self._condensed.shared(choice), mode=mode)
        return None if answer is None else answer.choice

    def ports_apart(self, costs: Sequence[FloatArray], choice: IntArray) -> Ports:
        """Strategies of ports nearer to the best choice than what another choice takes.

        Returns:
            the strategies; empty where the other choice
            does not hand on anything that the best ones do not.
        """
        bounds = self._condensed.port_bounds(costs, dict.fromkeys(self._condensed.hubs))
        if not bounds:
            return {}
        taken = self._condensed.shared(choice)
        least = min(float(values.min()) for values in bounds.values())
        apart = max(float(values[taken[port]].min()) for port, values in bounds.items())
        if apart <= least + SLACK * abs(least):
            return {}
        return {port: values <= 0.5 * (least + apart) for port, values in bounds.items()}

    def cases(self, ports: Ports) -> Sequence[Minimise]:
        """Cases of which one holds for every choice.

        In the first all groups hand on strategies of a set, in each of the others one run has
        a group that hands on another one.

        Args:
            ports: the set.
        """
        every = (Leaving(run, _masks(run, ports)) for run in self._condensed.runs)
        return [
            partial(self._in_case, ports, ()),
            *(partial(self._in_case, {}, (leaving,)) for leaving in every),
        ]

    def changing(
        self,
        costs: Sequence[FloatArray],
        ports: Ports,
        hubs: IntArray,
        num_inside: int,
        *,
        inside_first: bool,
    ) -> IntArray | None:
        """The best choice whose groups hand on strategies of a set first and others then.

        Args:
            costs: shape [S] for each node.
            ports: the set.
            hubs: a choice that says what to take at hubs.
            num_inside: how many groups, of all runs in a row, hand on strategies of the set.
            inside_first: whether these groups are the first ones or the last ones.

        Returns:
            None where there is no such choice.
        """
        courses, left = [], num_inside
        for run in self._condensed.runs if inside_first else self._condensed.runs[::-1]:
            inside = min(left, len(run.instances))
            left -= inside
            num_first = inside if inside_first else len(run.instances) - inside
            courses.append(Changing(run, _masks(run, ports), num_first, inside_first))
        still_open = {v: mask for v, mask in self._condensed.shared(hubs).items() if v not in ports}
        answer = self._condensed.minimise(costs, still_open, courses=courses)
        return answer.choice if answer is not None and np.isfinite(answer.value) else None

    def _in_case(
        self, ports: Ports, courses: Sequence[Course], costs: Sequence[FloatArray], _slack: float
    ) -> tuple[float, IntArray | None] | None:
        still_open = {**dict.fromkeys(self._condensed.hubs), **ports}
        relaxed = self._condensed.minimise(costs, still_open, courses=courses)
        if relaxed is None:
            return None
        best = self._fixed_at_best(costs, relaxed, ports, courses)
        return relaxed.value, None if best is None else best.choice

    def _likely_ports(self, costs: Sequence[FloatArray], relaxed: Answer) -> Ports:
        """The strategies of ports that cost least where hubs are relaxed, and those picked."""
        hubs = self._condensed.hubs
        bounds = self._condensed.port_bounds(costs, dict.fromkeys(hubs)) or {}
        picked = self._condensed.shared(relaxed.choice)
        likely = {}
        for port, values in bounds.items():
            most = np.sort(values)[:_LIKELY][-1]
            likely[port] = (values <= most) & np.isfinite(values) | picked[port]
        return likely

    def _narrowed(
        self,
        costs: Sequence[FloatArray],
        relaxed: Answer,
        best: Answer,
        slack: float,
    ) -> tuple[float, IntArray]:
        """Drop what no choice as good as the best one takes, hub by hub, then solve the rest."""
        bound = relaxed.value
        every_hub: Open = dict.fromkeys(self._condensed.hubs)
        cutoff = best.value * (1 + np.sign(best.value) * SLACK)
        least = {**relaxed.hub_bounds, **(self._condensed.port_bounds(costs, every_hub) or {})}
        left = {v: bounds <= cutoff for v, bounds in least.items()}
        ports = {v: mask for v, mask in left.items() if v not in every_hub}
        for hub in self._condensed.hubs:
            # A hub that has a single strategy left costs no more kept than relaxed.
            decided = {h: mask for h, mask in left.items() if h in every_hub and mask.sum() == 1}
            trial = {**every_hub, **ports, **decided, hub: left[hub]}
            answer = self._condensed.minimise(costs, trial, bounds_of=(hub,))
            if answer is None:
                return bound, best.choice
            bound = max(bound, min(answer.value, best.value))
            better = self._fixed_at_best(costs, answer, ports)
            if better is not None and better.value < best.value:
                best = better
            if _close(best.value, bound, slack):
                return bound, best.choice
            left[hub] = answer.hub_bounds[hub] <= best.value * (1 + np.sign(best.value) * SLACK)
        exact = self._condensed.minimise(costs, left)
        if exact is None:
            return bound, best.choice
        if exact.value < best.value:
            return exact.value, exact.choice
        return best.value, best.choice

    def _fixed_at_best(
        self,
        costs: Sequence[FloatArray],
        relaxed: Answer,
        ports: Open,
        courses: Sequence[Course] = (),
    ) -> Answer | None:
        """The best choice with every hub at the strategy that suits the relaxed choice most."""
        suits = {hub: costs[hub].copy() for hub in self._condensed.hubs}
        for edge in self._to_hubs:
            if edge.source in suits:
                column = edge.cols[relaxed.choice[edge.target]]
                suits[edge.source] += edge.cost[edge.rows, column]
            if edge.target in suits:
                row = edge.rows[relaxed.choice[edge.source]]
                suits[edge.target] += edge.cost[row, edge.cols]
        fixed: Mapping[int, BoolArray] = {
            hub: np.arange(len(prices)) == int(prices.argmin()) for hub, prices in suits.items()
        }
        return self._condensed.minimise(costs, {**fixed, **ports}, courses=courses)


def _masks(run: Run, ports: Ports) -> tuple[BoolArray, ...]:
    return tuple(ports[port] for port in run.last_ports)


def _close(value: float, bound: float, slack: float) -> bool:
    return value <= bound or value - bound <= slack * abs(value) < np.inf
