"""The least price of a wide problem for one vector of costs after another.

Messages bound the price of every strategy. The strategies with the least bounds make a core,
which is solved by tables; messages are improved and the core grows around the best choice
until the answer is proven good enough.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.narrowing.core import Core, one_per_run
from autoshard.solve.narrowing.folded import Folded
from autoshard.solve.narrowing.messages import Messages
from autoshard.solve.narrowing.spanning import strategy_bounds
from autoshard.solve.problem import Problem
from autoshard.solve.search import Search
from autoshard.solve.solution import Solution
from autoshard.solve.warm_start import WarmStart

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
_CLIMB_SHARE, _CORE_SHARE = 0.2, 0.5
"""Share of the time there is that messages and a core may take at once."""
_CORE_GAP = 0.1
"""Share of the gap that a core may leave."""


class SolveCore(Protocol):
    """Solves a core."""

    def __call__(
        self,
        core: Problem,
        seconds: float,
        *,
        gap: float,
        bound: float,
        warm_start: WarmStart | None,
    ) -> Solution:
        """Solve a core within some seconds.

        Args:
            core: the core.
            seconds: after which the best choice so far is returned.
            gap: relative gap that may be left.
            bound: a lower bound that is known.
            warm_start: left by solving it under other limits.
        """


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


class Narrowing:
    """Minimises a wide problem for one vector of costs after another.

    Args:
        search: of the problem.
        folded: the problem, folded.
        solve: solves cores.

    Attributes:
        folded: as given.
        tried: strategies of each place that were in a core, shape [S].
        least: the last lower bounds by strategy of each place, shape [S].
    """

    def __init__(self, search: Search, folded: Folded, solve: SolveCore) -> None:
        self.folded = folded
        self._search = search
        self._problem = search.problem
        self._solve = solve
        costs = [self._problem.nodes[place.nodes[0]].cost for place in folded.places]
        self._messages = Messages(folded, costs, check=search.check)
        self.tried = [np.zeros(len(cost), dtype=np.bool_) for cost in costs]
        self.least = costs

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
        self._set(costs)
        answer, width = _Answer(), _FIRST_WIDTH
        while width <= _LAST_WIDTH:
            value, bound = answer.value, answer.bound
            self._climb(answer, slack)
            proven, self.least = strategy_bounds(self._messages)
            answer.bound = max(answer.bound, self._messages.bound, proven)
            tell(answer.bound)
            if answer.is_within(slack):
                break
            self._try_core(answer, self.least, width, slack)
            tell(answer.bound)
            if answer.is_within(slack) or (rough and answer.choice is not None):
                break
            if answer.value == value and answer.bound - bound < _NEWS * (value - bound):
                width *= 2
        return answer.bound, answer.choice

    def bounds(
        self, costs: Sequence[FloatArray], num_sweeps: int
    ) -> tuple[float, list[FloatArray]]:
        """Lower bounds for given costs, of all choices and by strategy of each place.

        Args:
            costs: as above.
            num_sweeps: how often to pass messages; they begin with those of other costs.
        """
        self._search.enter("pass messages")
        self._set(costs)
        for _ in range(num_sweeps):
            self._messages.sweep()
            self._search.count("narrowing.sweeps")
        proven, least = strategy_bounds(self._messages)
        return max(self._messages.bound, proven), least

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forget the messages that are passed meanwhile."""
        values = [value.copy() for value in self._messages.values]
        yield
        self._messages.values = values

    def _set(self, costs: Sequence[FloatArray]) -> None:
        self._messages.costs = [costs[place.nodes[0]] for place in self.folded.places]

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
        masks = one_per_run(self.folded, masks)
        left_out = [
            float(bounds[~mask].min(initial=np.inf))
            for bounds, mask in zip(least, masks, strict=True)
        ]
        solution, choice = self._solved(masks, _CORE_GAP * slack, answer.bound)
        if choice is not None and solution.objective < answer.value:
            answer.value, answer.choice = solution.objective, choice
            self._search.offer(choice)
        answer.bound = max(answer.bound, min(solution.bound, *left_out))
        self.tried = [old | new for old, new in zip(self.tried, masks, strict=True)]

    def _selected(
        self, least: Sequence[FloatArray], width: int, near: IntArray | None
    ) -> list[BoolArray]:
        """The strategies of each place with the least bounds, and those nearest to a choice."""
        masks = [cheapest(bounds, width) for bounds in least]
        if near is not None:
            nodes = [list(place.nodes) for place in self.folded.places]
            picks = [int(near[alike[len(alike) // 2]]) for alike in nodes]
            for place, mask in enumerate(masks):
                mask[near[nodes[place]]] = True
                nearby = [
                    cheapest(prices, _NEARBY) for prices in self._messages.around(place, picks)
                ]
                masks[place] = np.logical_or.reduce([mask, *nearby])
        return masks

    def _solved(
        self, masks: Sequence[BoolArray], gap: float, bound: float
    ) -> tuple[Solution, IntArray | None]:
        """The solution of a core, and its choice in the whole problem."""
        search = self._search
        search.enter("solve a core")
        search.count("narrowing.cores")
        core = Core.of(self._problem, self.folded, masks, costs=self._messages.costs)
        seconds = _CORE_SHARE * search.remaining
        solution = self._solve(core.problem, seconds, gap=gap, bound=bound, warm_start=None)
        search.check()
        return solution, None if solution.choice is None else core.whole(solution.choice)


def cheapest(prices: FloatArray, number: int) -> BoolArray:
    """The `number` least prices, shape [S]."""
    mask = np.zeros(len(prices), dtype=np.bool_)
    mask[np.argsort(prices, kind="stable")[:number]] = True
    return mask
