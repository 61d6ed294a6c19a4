"""Wide problems, solved through restricted problems.

Messages bound the price of every strategy, at a cost linear in the number of strategies. The
strategies with the least bounds make a restricted problem of the same form, which is solved by
run contraction. A choice outside of it costs at least the least bound of an excluded strategy,
which proves a bound of the whole problem. If that is not good enough, messages are improved and
the restricted problem is extended around the best choice.

Under a usage limit that binds, the restricted problem is solved under the limit like any problem
with runs. Its best usage prices are then applied to all strategies: messages at these prices
prove a bound, and show which strategies are missing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.bounds.quotient_bounds import QuotientMessages, strategy_bounds
from autoshard.solve.bounds.quotient_graph import QuotientGraph
from autoshard.solve.problem import Edge, Problem, ProblemNode
from autoshard.solve.runs import (
    SAME,
    RunOutcome,
    UsageLagrangian,
    UsageWeights,
    independent_runs,
)
from autoshard.solve.state import RestrictedProblem, Solution, SolveState, WarmStart

_FIRST_SLACK = 0.3
"""Share of the requested gap by which the first restricted problem may exceed the bound."""
_MESSAGE_SHARE = 0.5
_RESTRICTED_SHARE = 0.5
_LIMITED_SHARE = 0.6
"""Shares of time for messages, a restricted problem, and one under a limit."""
_MAX_SWEEPS = 40
_FIRST_LIMITED_SWEEPS = 30
_MORE_LIMITED_SWEEPS = 10
"""Sweeps before a restricted problem; at the best prices the first time; and there later on."""
_LEAST_GAIN = 2e-5
_LIMITED_LEAST_GAIN = 5e-6
_BOUND_LEAST_GAIN = 1e-4
"""Relative gain of a sweep below which messages end; and at the best prices, where all proof is due
to them; and where nothing but a bound is asked for, which then takes half of the sweeps."""
_RESTRICTED_GAP = 0.1
"""Share of the gap that a restricted problem may leave."""
_ELASTICITIES = (0.4, 3.0)
"""First guesses of the price of usage: usage at the limit costs this many times the lower bound."""
_ROUGH_GAP = 0.01
"""Relative gap that may be left at such a guess."""
_PROOF_GAP = 0.5
"""Share of the requested gap that sweeps at the best prices leave: later solves have none."""
_LIMITED_ROUNDS = 3
_LIMITED_MIN_GAIN = 0.2
"""Restricted problems under one limit; the share of the gap that one closes if another follows."""


def restrict(
    problem: Problem, masks: Sequence[BoolArray], costs: Sequence[FloatArray] | None = None
) -> RestrictedProblem:
    """The restricted problem of some strategies, without a usage limit.

    Args:
        problem: the whole problem, without ties.
        masks: mask of the strategies of each node to keep, shape [S].
        costs: price of each strategy of each node, shape [S]; those of the problem if None.
    """
    assert not problem.ties
    shared = _Shared()
    kept = tuple(shared.positions(mask) for mask in masks)
    nodes = []
    for v, node in enumerate(problem.nodes):
        cost = shared.part(node.cost if costs is None else costs[v], kept[v])
        usage = shared.part(node.usage, kept[v])
        nodes.append(ProblemNode(cost, usage, node.interval, node.name))
    edges = tuple(shared.edge(edge, kept) for edge in problem.edges)
    return RestrictedProblem(Problem(tuple(nodes), edges, repeats=problem.repeats), kept)


def one_per_run(graph: QuotientGraph, masks: Sequence[BoolArray]) -> list[BoolArray]:
    """Unite masks so that corresponding nodes of a run's groups keep equal strategies."""
    united = list(masks)
    for run in graph.runs:
        before = dict(zip(run.boundary, run.before, strict=True))
        for p, nodes in enumerate(zip(*run.instances, strict=True)):
            node_classes = {graph.class_of[v] for v in (*nodes, before.get(p, nodes[0]))}
            # The node before the first group may have other strategies.
            alike = [
                q for q in node_classes if len(united[q]) == len(united[graph.class_of[nodes[0]]])
            ]
            mask = np.logical_or.reduce([united[q] for q in alike])
            for q in alike:
                united[q] = mask
    return united


class _Shared:
    """Memo of derived arrays, so that equal nodes and edges share them."""

    def __init__(self) -> None:
        self._positions: dict[bytes, IntArray] = {}
        self._parts: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        self._tables: dict[tuple[int, bytes, bytes], FloatArray] = {}

    def positions(self, mask: BoolArray) -> IntArray:
        """Indices where a mask is true, shape [K]."""
        return self._positions.setdefault(mask.tobytes(), np.flatnonzero(mask))

    def part(self, values: FloatArray, keep: IntArray) -> FloatArray:
        key = (id(values), id(keep))
        if key not in self._parts:
            self._parts[key] = values[keep]
        found: FloatArray = self._parts[key]
        return found

    def edge(self, edge: Edge, kept: Sequence[IntArray]) -> Edge:
        """An edge between the kept strategies."""
        row_labels, rows = self._view(edge.rows, kept[edge.source])
        col_labels, cols = self._view(edge.cols, kept[edge.target])
        key = (id(edge.prices), row_labels.tobytes(), col_labels.tobytes())
        if key not in self._tables:
            prices = edge.prices
            self._tables[key] = (
                prices.between(row_labels, col_labels)
                if isinstance(prices, ShortestPathCost)
                else prices[np.ix_(row_labels, col_labels)]
            )
        return Edge(edge.source, edge.target, self._tables[key], rows, cols)

    def _view(self, shown: IntArray, keep: IntArray) -> tuple[IntArray, IntArray]:
        key = (id(shown), id(keep))
        if key not in self._views:
            labels, classes = np.unique(shown[keep], return_inverse=True)
            self._views[key] = labels, classes
        return self._views[key]


class SolveRestricted(Protocol):
    """Solves a restricted problem within some seconds, up to a relative gap.

    `bound` is a known lower bound; `warm_start` comes from solves under other limits; with
    `runs_only` nothing but run contraction is tried.
    """

    def __call__(
        self,
        restricted: Problem,
        seconds: float,
        *,
        gap: float,
        bound: float,
        warm_start: WarmStart | None,
        runs_only: bool = False,
    ) -> Solution:
        """Solve the problem."""


@dataclass(eq=False)
class _Answer:
    """The best choice for some costs, and a lower bound of all choices."""

    bound: float = -float("inf")
    value: float = float("inf")
    choice: IntArray | None = None

    def is_within(self, slack: float) -> bool:
        """True if the choice is proven good enough, or proven not to exist."""
        if self.choice is None:
            return self.bound == np.inf
        return self.bound >= self.value - slack * abs(self.value)


class RestrictedSolver:
    """Minimises a wide problem for different costs, without its limit.

    Args:
        state: of the problem.
        graph: its quotient graph.
        solve: solves restricted problems.

    Attributes:
        graph: the quotient graph.
        tried: strategies of each node class that were in a restricted problem, shape [S].
        least: the last lower bounds by strategy of each node class, shape [S].
    """

    def __init__(self, state: SolveState, graph: QuotientGraph, solve: SolveRestricted) -> None:
        self.graph = graph
        self._state, self._settings = state, state.settings
        self._problem = state.problem
        self._solve = solve
        costs = [self._problem.nodes[node_class.nodes[0]].cost for node_class in graph.node_classes]
        self._messages = QuotientMessages(graph, costs, effort=state.effort)
        self.tried = [np.zeros(len(cost), dtype=np.bool_) for cost in costs]
        self.least = costs

    def minimise(
        self,
        costs: Sequence[FloatArray],
        slack: float,
        *,
        rough: bool = False,
        report_bound: Callable[[float], object] = lambda _: None,
    ) -> tuple[float, IntArray | None]:
        """A lower bound for given costs per strategy of each node, and a choice.

        The solve state is offered all choices found.

        Args:
            costs: shape [S] for each node, the same for the nodes of a node class.
            slack: relative difference that may be left between the two.
            rough: stop after the first restricted problem that has a choice.
            report_bound: called with each better bound.
        """
        answer, width, is_first = _Answer(), self._settings.first_width, not rough

        def report(bound: float) -> None:
            answer.bound = max(answer.bound, bound)
            report_bound(answer.bound)

        while width <= self._settings.last_width:
            enough = answer.value - slack * abs(answer.value)
            self.least = self.bounds(costs, _MAX_SWEEPS, report_bound=report, enough=enough)
            if answer.is_within(slack):
                break
            self._try_restricted(answer, self.least, width, slack, is_first=is_first)
            report(answer.bound)
            if answer.is_within(slack) or (rough and answer.choice is not None):
                break
            # The first restricted problem has fewer strategies than the width allows; the second
            # one has them all before the width grows.
            if not is_first:
                width *= 2
            is_first = False
        return answer.bound, answer.choice

    def bounds(
        self,
        costs: Sequence[FloatArray],
        num_sweeps: int,
        *,
        report_bound: Callable[[float], object],
        enough: float,
        least_gain: float = _LEAST_GAIN,
    ) -> list[FloatArray]:
        """Lower bounds for given costs by strategy of each node class.

        Args:
            costs: as of `minimise`.
            num_sweeps: largest number of sweeps; they start from the messages for the previous
                costs.
            report_bound: called with each better lower bound of all choices.
            enough: bound at which the sweeps end.
            least_gain: relative gain of a sweep below which they end.
        """
        self._state.enter("pass messages")
        deadline = self._state.deadline(_MESSAGE_SHARE)
        self._messages.replace_costs([costs[c.nodes[0]] for c in self.graph.node_classes])
        before = -np.inf
        for _ in range(num_sweeps):
            self._messages.sweep()
            self._state.count("restricted.sweeps")
            bound = self._messages.bound
            report_bound(bound)
            if bound >= enough or bound - before <= least_gain * abs(bound):
                break
            if self._state.is_late(deadline):
                break
            before = bound
        proven, least = strategy_bounds(self._messages)
        report_bound(proven)
        return least

    @contextmanager
    def restored_messages(self) -> Iterator[None]:
        """Restore the messages at the end of a `with` block."""
        values = self._messages.values
        yield
        self._messages.values = values

    def _try_restricted(
        self,
        answer: _Answer,
        least: Sequence[FloatArray],
        width: int,
        slack: float,
        *,
        is_first: bool,
    ) -> None:
        """Solve a restricted problem, for a better choice and a better bound.

        The first one has only strategies of choices that could be very close to the bound, so
        that its tables are small.
        """
        masks = [cheapest(bounds, width) for bounds in least]
        for node_class, mask in zip(self.graph.node_classes, masks, strict=True):
            if answer.choice is not None:
                mask[answer.choice[list(node_class.nodes)]] = True
        if is_first:
            close = answer.bound + _FIRST_SLACK * slack * abs(answer.bound)
            masks = [
                (mask & (bounds <= close)) | cheapest(bounds, 1)
                for mask, bounds in zip(masks, least, strict=True)
            ]
        masks = one_per_run(self.graph, masks)
        left_out = [
            float(bounds[~mask].min(initial=np.inf))
            for bounds, mask in zip(least, masks, strict=True)
        ]
        gap = _RESTRICTED_GAP * slack
        solution, choice = self._solved(masks, gap, answer.bound, runs_only=is_first)
        if choice is not None and solution.objective < answer.value:
            answer.value, answer.choice = solution.objective, choice
            self._state.offer(choice)
        # A choice either lies in the restricted problem, or has a strategy that was left out, and
        # costs at least the bound of that strategy.
        answer.bound = max(answer.bound, min(solution.bound, *left_out))
        self.tried = [old | new for old, new in zip(self.tried, masks, strict=True)]

    def _solved(
        self, masks: Sequence[BoolArray], gap: float, bound: float, *, runs_only: bool
    ) -> tuple[Solution, IntArray | None]:
        """The solution of a restricted problem, and its choice in the whole problem."""
        state = self._state
        state.enter("solve a restricted problem")
        state.count("restricted.problems")
        restricted = restrict(
            self._problem, self.graph.by_node(masks), self.graph.by_node(self._messages.costs)
        )
        seconds = _RESTRICTED_SHARE * state.remaining
        solution = self._solve(
            restricted.problem,
            seconds,
            gap=gap,
            bound=bound,
            warm_start=None,
            runs_only=runs_only,
        )
        state.check()
        return solution, None if solution.choice is None else restricted.whole(solution.choice)


def cheapest(prices: FloatArray, number: int) -> BoolArray:
    """The `number` least prices, shape [S]."""
    mask = np.zeros(len(prices), dtype=np.bool_)
    mask[np.argsort(prices, kind="stable")[:number]] = True
    return mask


class LimitedRestriction:
    """Find bounds and choices of a wide problem whose limit binds.

    Args:
        state: of the problem.
        restricted_solver: minimises the problem for other costs, without its limit.
        solve: solves restricted problems.
    """

    def __init__(
        self, state: SolveState, restricted_solver: RestrictedSolver, solve: SolveRestricted
    ) -> None:
        self._state, self._settings = state, state.settings
        self._problem = state.problem
        self._restricted_solver = restricted_solver
        self._graph = restricted_solver.graph
        self._solve = solve
        self._usage_weights = UsageWeights(state.problem, self._graph.runs)
        self._lagrangian = UsageLagrangian(
            state, self._usage_weights, partial(restricted_solver.minimise, rough=True)
        )
        for choice in state.warm_start.best_choices:
            self._lagrangian.add_choice(choice)

    def run(self) -> RunOutcome:
        """Solve restricted problems until one closes the gap, or closes little of it.

        Returns:
            INFEASIBLE if no choice satisfies the limit; the statistic `minimum_usage` is then a
            feasible limit.
        """
        state, warm_start = self._state, self._state.warm_start
        follows = warm_start.restricted is not None
        if not follows:
            self._set_restricted(self._first_masks())
        if self._problem.usage_limit <= warm_start.proven[0]:
            state.raise_bound(warm_start.proven[1])
        for _ in range(_LIMITED_ROUNDS):
            gap = state.objective - state.bound
            self._solve_restricted()
            if state.choice is None:
                if not self._can_fit():
                    return RunOutcome.INFEASIBLE
                self._set_restricted(self._restricted_solver.tried)
                continue
            if state.closed or follows:
                break
            self._prove()
            if self._settings.bounds_only:
                break
            closed = gap - (state.objective - state.bound)
            if state.closed or closed <= _LIMITED_MIN_GAIN * gap < np.inf:
                break
        return RunOutcome.UPDATED

    def _first_masks(self) -> list[BoolArray]:
        """Candidates of the warm start, or else strategies that are good at some usage prices."""
        candidates = self._state.warm_start.candidates
        if candidates:
            return [candidates[c.nodes[0]].copy() for c in self._graph.node_classes]
        self._add_peak_weights()
        price = max(self._state.bound, SAME)
        price /= max(self._problem.usage_limit, SAME)
        for elasticity in _ELASTICITIES:
            self._lagrangian.evaluate(np.array([elasticity * price]), slack=_ROUGH_GAP)
        return self._restricted_solver.tried

    def _add_peak_weights(self) -> None:
        """Price the time at which the usage can be largest, if no time is priced yet."""
        if not self._usage_weights.weights:
            self._usage_weights.add(np.array([usage.max() for usage in self._usage_weights.usage]))

    def _set_restricted(self, masks: Sequence[BoolArray]) -> None:
        """Set the restricted problem to some strategies and those of the previous one."""
        warm_start, inner = self._state.warm_start, WarmStart()
        if warm_start.restricted is not None:
            masks = [mask.copy() for mask in masks]
            for node_class, mask in zip(self._graph.node_classes, masks, strict=True):
                mask[warm_start.restricted[0].kept[node_class.nodes[0]]] = True
        # Run contraction needs groups that are equal, so all groups of a run keep the same
        # strategies.
        masks = one_per_run(self._graph, masks)
        restricted = restrict(self._problem, self._graph.by_node(masks))
        if warm_start.restricted is not None:
            old, seen = warm_start.restricted
            # The new problem has all strategies of the old one, so its choices are choices of the
            # new one.
            inner.best_choices = [
                restricted.part(old.whole(choice)) for choice in seen.best_choices
            ]
        warm_start.restricted = restricted, inner

    def _solve_restricted(self) -> None:
        """Solve the restricted problem under the limit, and collect the choices found."""
        state, warm_start = self._state, self._state.warm_start
        state.enter("solve a restricted problem")
        state.count("restricted.problems")
        assert warm_start.restricted is not None
        restricted, inner = warm_start.restricted
        limited = restricted.problem.with_limit(self._problem.usage_limit)
        seconds = _LIMITED_SHARE * state.remaining
        solution = self._solve(limited, seconds, gap=state.gap, bound=state.bound, warm_start=inner)
        if solution.choice is not None:
            state.offer(restricted.whole(solution.choice))
        known = {choice.tobytes() for choice in warm_start.best_choices}
        for choice in map(restricted.whole, inner.best_choices):
            if choice.tobytes() not in known:
                self._lagrangian.add_choice(choice)
                warm_start.best_choices.append(choice)
        state.check()

    def _prove(self) -> None:
        """Bound all choices at the best usage prices; extend the restricted problem."""
        warm_start, limit = self._state.warm_start, self._problem.usage_limit
        if not warm_start.best_choices or not self._usage_weights.weights:
            return
        prices, _ = self._lagrangian.best_prices()
        if not prices.any():
            return
        slack = _PROOF_GAP * self._state.gap * self._state.magnitude
        # The messages bound price plus priced usage. `proven` takes the price of the whole limit
        # from that, so it is added to what must be reached.
        enough = self._state.objective - slack + float(prices.sum()) * limit

        def report(bound: float) -> None:
            self._state.raise_bound(self._lagrangian.proven(bound, prices))
            # A smaller limit leaves fewer choices, so later solves under one start from this bound.
            warm_start.proven = limit, self._state.bound

        sweeps = _FIRST_LIMITED_SWEEPS if np.isinf(warm_start.proven[0]) else _MORE_LIMITED_SWEEPS
        least = self._restricted_solver.bounds(
            self._lagrangian.priced(prices),
            sweeps,
            report_bound=report,
            enough=enough,
            least_gain=_BOUND_LEAST_GAIN if self._settings.bounds_only else _LIMITED_LEAST_GAIN,
        )
        if not self._state.closed and warm_start.restricted is not None:
            self._set_restricted(
                [cheapest(bounds, self._settings.limited_width) for bounds in least]
            )

    def _can_fit(self) -> bool:
        """Search for a choice within the limit; False if it is proven that there is none."""
        self._add_peak_weights()
        with self._restricted_solver.restored_messages():
            fits = self._lagrangian.can_fit(slack=SAME)
        if not fits:
            peaks = (self._problem.peak_usage(point.choice) for point in self._lagrangian.points)
            self._state.statistics["minimum_usage"] = min(peaks)
        return fits


def solve_wide(
    state: SolveState, solve: SolveRestricted, *, least_strategies: float = 0.0
) -> RunOutcome:
    """Find choices and bounds of a wide problem.

    Args:
        state: of the problem.
        solve: solves restricted problems.
        least_strategies: mean number of strategies of a node class below which a problem with
            matrices is not wide.
    """
    problem, warm_start = state.problem, state.warm_start
    needs_paths = problem.needs_paths(state.settings)
    if problem.ties or not (problem.repeats or needs_paths):
        return RunOutcome.SKIPPED
    graph = QuotientGraph(problem, independent_runs(problem))
    sizes = [problem.nodes[node_class.nodes[0]].num_strategies for node_class in graph.node_classes]
    if float(np.mean(sizes)) < least_strategies and not needs_paths:
        return RunOutcome.SKIPPED
    restricted_solver = RestrictedSolver(state, graph, solve)
    if warm_start.unlimited_bound is None:
        bound = _minimise(state, restricted_solver)
        if bound == np.inf:
            return RunOutcome.INFEASIBLE
        if state.choice is not None or not warm_start.best_choices:
            return RunOutcome.UPDATED
        warm_start.unlimited_bound = bound
    state.raise_bound(warm_start.unlimited_bound)
    return LimitedRestriction(state, restricted_solver, solve).run()


def _minimise(state: SolveState, restricted_solver: RestrictedSolver) -> float:
    """Offer the best choice without the limit; add it to the warm start if it exceeds the limit.

    Returns:
        a lower bound.
    """
    costs = [node.cost for node in state.problem.nodes]
    # If the limit can bind, a rough solution without it may show that it does.
    for rough in (True, False) if state.problem.can_bind else (False,):
        bound, choice = restricted_solver.minimise(
            costs, state.gap, rough=rough, report_bound=state.raise_bound
        )
        if state.closed or state.choice is None:
            break
    if choice is not None and state.choice is None:
        state.warm_start.best_choices.append(choice)
    node_classes = restricted_solver.graph.class_of
    state.warm_start.strategy_bounds = [
        restricted_solver.least[node_classes[v]] for v in range(len(state.problem.nodes))
    ]
    return bound
