"""Solving wide problems: bounds for all strategies, tables for the few that matter.

Messages bound the price of every strategy at a cost that grows with the number of
strategies, not with its square. The strategies with the least bounds make a *core*, a
problem of the same form that is solved by tables. What the core leaves out costs at least
the least bound of a strategy left out, so the answer has a proven bound; where that is not
good enough, messages are improved and the core grows around the best choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autoshard.solve.narrowing.core import Core, one_per_run
from autoshard.solve.narrowing.folded import Folded
from autoshard.solve.narrowing.messages import Messages
from autoshard.solve.narrowing.spanning import strategy_bounds
from autoshard.solve.problem import (
    USAGE_TOLERANCE,
    BoolArray,
    FloatArray,
    IntArray,
    Problem,
    Solution,
)
from autoshard.solve.repeats import Outcome, Pricing, Watch, independent_runs
from autoshard.solve.search import Search

_WIDE = 100.0
"""Mean number of strategies of a place from which on narrowing pays."""
_FIRST_WIDTH, _LAST_WIDTH = 24, 48
"""Strategies of a place that a core holds."""
_NEARBY = 8
"""Strategies of a place added for each way of looking at the best choice."""
_FULL = 3.0
"""A core holds all strategies that can matter where they are so many widths at most."""
_MOST_SWEEPS = 40
_LEAST_GAIN, _SHARE_OF_GAP = 2e-5, 0.05
"""Gain of a sweep below which a core is looked at: relative, and to the gap that is allowed."""
_NEWS = 0.1
"""Share of the gap that messages must close for another core of the same width."""
_STEEP = 1e6
"""Price of all usage that is allowed, in terms of the most that a choice can cost."""
_CLIMB_SHARE, _CORE_SHARE = 0.2, 0.5
"""Share of the time there is that messages and a core may take at once."""
_CORE_GAP = 0.1
"""Share of the gap that a core may leave."""

SolveCore = Callable[[Problem, float, float, float], Solution]
"""Solves a problem within seconds and a relative gap, given a lower bound."""


def solve_narrowed(search: Search, solve: SolveCore) -> Outcome:
    """Tell the search choices and bounds of a wide problem.

    Args:
        search: of the problem.
        solve: solves cores.
    """
    problem = search.problem
    if problem.ties or not (problem.repeats or problem.has_closures):
        return Outcome.NOTHING
    folded = Folded(problem, independent_runs(problem))
    sizes = [problem.nodes[place.nodes[0]].num_strategies for place in folded.places]
    if float(np.mean(sizes)) < _WIDE and not problem.has_closures:
        return Outcome.NOTHING
    narrowing = _Narrowing(search, folded, solve)
    costs = [node.cost for node in problem.nodes]
    # A limit that binds makes the best choice without it worth little.
    for rough in (True, False) if problem.can_bind else (False,):
        bound, choice = narrowing.minimise(costs, search.gap, rough=rough, tell=search.raise_bound)
        if search.closed or search.choice is None:
            break
    if bound == np.inf:
        return Outcome.INFEASIBLE
    if choice is None or search.choice is not None:
        return Outcome.TOLD
    return narrowing.keep_limit(choice)


@dataclass(eq=False)
class _Answer:
    """The best choice for some costs, and what every choice costs at least."""

    bound: float = -float("inf")
    value: float = float("inf")
    choice: IntArray | None = None

    def is_within(self, slack: float) -> bool:
        """Whether the choice is proven good enough, or it is proven that there is none."""
        if self.choice is None:
            return self.bound == np.inf
        return self.bound >= self.value - slack * abs(self.value)


class _Narrowing:
    """Minimises a wide problem for one vector of costs after another."""

    def __init__(self, search: Search, folded: Folded, solve: SolveCore) -> None:
        self._search = search
        self._problem = search.problem
        self._folded = folded
        self._solve = solve
        costs = [self._problem.nodes[place.nodes[0]].cost for place in folded.places]
        self._messages = Messages(folded, costs, check=search.check)
        self._tried = [np.zeros(len(cost), dtype=np.bool_) for cost in costs]

    def minimise(
        self,
        costs: Sequence[FloatArray],
        slack: float,
        *,
        rough: bool = False,
        tell: Callable[[float], object] = lambda _: None,
    ) -> tuple[float, IntArray | None]:
        """A lower bound for given costs per strategy of each node, and a choice.

        The search is offered all choices that are met.

        Args:
            costs: shape [S] for each node, the same for the nodes of a place.
            slack: relative difference that may be left between the two.
            rough: whether to leave it at the first core that has a choice.
            tell: called with each better bound.
        """
        self._messages.costs = [costs[place.nodes[0]] for place in self._folded.places]
        answer, width = _Answer(), _FIRST_WIDTH
        while width <= _LAST_WIDTH:
            value, bound = answer.value, answer.bound
            self._climb(answer, slack)
            proven, least = strategy_bounds(self._messages)
            answer.bound = max(answer.bound, self._messages.bound, proven)
            tell(answer.bound)
            if answer.is_within(slack):
                break
            self._try_core(answer, least, width, slack)
            tell(answer.bound)
            if answer.is_within(slack) or (rough and answer.choice is not None):
                break
            if answer.value == value and answer.bound - bound < _NEWS * (value - bound):
                width *= 2
        return answer.bound, answer.choice

    def keep_limit(self, start: IntArray) -> Outcome:
        """Find choices that keep the limit, from the best one, which does not.

        Prices on usage give a bound. The strategies that were tried at any of them make a
        core, which is solved under the limit.
        """
        search, problem = self._search, self._problem
        watch = Watch(problem, self._folded.runs)
        pricing = Pricing(search, watch, partial(self.minimise, rough=True))
        pricing.see(start)
        search.enter("find the least usage")
        most, limit = problem.most, problem.usage_limit
        steep = _STEEP * max(most, USAGE_TOLERANCE) / max(limit, USAGE_TOLERANCE)
        excess = pricing.ask(np.array([steep]), slack=USAGE_TOLERANCE)
        if excess is not None and excess > most + steep * limit * USAGE_TOLERANCE:
            peaks = [problem.peak_usage(point.choice) for point in pricing.points]
            search.statistics["minimum_usage"] = min(peaks)
            return Outcome.INFEASIBLE
        search.enter("price the usage")
        pricing.climb(problem.usage_limit, np.zeros(0), enough=float("inf"))
        search.raise_bound(pricing.bound)
        if not search.closed:
            self._messages.costs = [problem.nodes[p.nodes[0]].cost for p in self._folded.places]
            _, choice = self._solved(self._tried, search.gap, problem.usage_limit)
            if choice is not None:
                search.offer(choice)
        return Outcome.TOLD

    def _climb(self, answer: _Answer, slack: float) -> None:
        """Pass messages until that gains little, or proves enough."""
        self._search.enter("pass messages")
        end = self._search.elapsed + _CLIMB_SHARE * self._search.remaining
        enough = answer.value - slack * abs(answer.value)
        for sweep in range(_MOST_SWEEPS):
            before = self._messages.bound
            self._messages.sweep()
            self._search.count("narrowing.sweeps")
            bound = self._messages.bound
            little = max(_LEAST_GAIN, _SHARE_OF_GAP * slack) * abs(bound)
            slow = self._search.elapsed > end
            if slow or bound >= enough or (sweep and bound - before <= little):
                return

    def _try_core(
        self, answer: _Answer, least: Sequence[FloatArray], width: int, slack: float
    ) -> None:
        """Solve a core, for a better choice and for what that proves."""
        masks = self._selected(least, width, answer.choice)
        if answer.choice is not None:
            cutoff = answer.value - slack * abs(answer.value)
            hopeful = [bounds < cutoff for bounds in least]
            if max(int(mask.sum()) for mask in hopeful) <= _FULL * width:
                masks = [mask | more for mask, more in zip(masks, hopeful, strict=True)]
        masks = one_per_run(self._folded, masks)
        left_out = [
            float(bounds[~mask].min(initial=np.inf))
            for bounds, mask in zip(least, masks, strict=True)
        ]
        solution, choice = self._solved(masks, _CORE_GAP * slack, float("inf"), answer.bound)
        if choice is not None and solution.objective < answer.value:
            answer.value, answer.choice = solution.objective, choice
            self._search.offer(choice)
        answer.bound = max(answer.bound, min(solution.bound, *left_out))
        self._tried = [old | new for old, new in zip(self._tried, masks, strict=True)]

    def _selected(
        self, least: Sequence[FloatArray], width: int, near: IntArray | None
    ) -> list[BoolArray]:
        """The strategies of each place with the least bounds, and those nearest to a choice."""
        masks = [_cheapest(bounds, width) for bounds in least]
        if near is not None:
            nodes = [list(place.nodes) for place in self._folded.places]
            picks = [int(near[alike[len(alike) // 2]]) for alike in nodes]
            for place, mask in enumerate(masks):
                mask[near[nodes[place]]] = True
                nearby = [
                    _cheapest(prices, _NEARBY) for prices in self._messages.around(place, picks)
                ]
                masks[place] = np.logical_or.reduce([mask, *nearby])
        return masks

    def _solved(
        self, masks: Sequence[BoolArray], gap: float, limit: float, bound: float = -float("inf")
    ) -> tuple[Solution, IntArray | None]:
        """The solution of a core, and its choice in the whole problem."""
        search = self._search
        search.enter("solve a core")
        search.count("narrowing.cores")
        core = Core.of(
            self._problem, self._folded, masks, costs=self._messages.costs, usage_limit=limit
        )
        solution = self._solve(core.problem, _CORE_SHARE * search.remaining, gap, bound)
        search.check()
        return solution, core.choice(solution)


def _cheapest(prices: FloatArray, number: int) -> BoolArray:
    """The `number` least prices, shape [S]."""
    mask = np.zeros(len(prices), dtype=np.bool_)
    mask[np.argsort(prices, kind="stable")[:number]] = True
    return mask
