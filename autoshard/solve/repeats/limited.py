"""A binding usage limit over runs: prices on usage, then groups switched one by one.

Lagrangian relaxation (Fisher, Management Science 27:1, 1981): usage is priced instead of
limited, which gives a lower bound for every price. At the best price two choices meet, one
that keeps the limit and a cheaper one that does not. Since groups are alike, going from one
to the other group by group ends close to the limit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solve.problem import USAGE_TOLERANCE, FloatArray, IntArray, Problem
from autoshard.solve.repeats.runs import Run
from autoshard.solve.search import Search

_MOST_PRICES = 24
_GROWTH = 4.0
"""Factor by which the price of usage grows until some choice keeps the limit."""
_STEEP = 1e6
"""Price of all usage that is allowed, in terms of the most that a choice can cost."""
_SAME = 1e-9

Minimise = Callable[[Sequence[FloatArray]], tuple[float, IntArray | None] | None]
"""Bound and best choice for given costs per strategy of each node."""


@dataclass(frozen=True, eq=False)
class _Point:
    """A choice by its price, usage aside, and its usage."""

    choice: IntArray
    cost: float
    usage: float


@dataclass(eq=False)
class _Ends:
    """The best choices known on the two sides of the limit."""

    above: _Point
    below: _Point | None = None

    def improve(self, point: _Point, limit: float, price: float) -> bool:
        """Take a point that was best at a price; False where it tells nothing new."""
        if self.below is not None:
            line = self.above.cost + price * self.above.usage
            if point.cost + price * point.usage >= line - _SAME * abs(line):
                return False
        if point.usage > limit:
            self.above = point
        else:
            self.below = point
        return True

    def next_price(self, price: float) -> float:
        """The price at which both ends cost the same, or a higher one to find an end below."""
        if self.below is None:
            return price * _GROWTH
        return (self.below.cost - self.above.cost) / (self.above.usage - self.below.usage)


def price_usage(search: Search, runs: Sequence[Run], minimise: Minimise, start: IntArray) -> bool:
    """Tell the search bounds and choices of a problem whose usage peaks at one time only.

    Args:
        search: of the problem; its limit is finite.
        runs: runs in it, for switching groups.
        minimise: solves the problem for other costs, its limit aside.
        start: the best choice without a limit, which breaks it.

    Returns:
        False where no choice keeps the limit; the statistic `minimum_usage` is then the
        least limit that one keeps.
    """
    problem = search.problem
    if not _is_possible(search, minimise):
        return False
    ends = _Ends(_point(problem, start))
    price = max(ends.above.cost, _SAME) / problem.usage_limit if problem.usage_limit else 1.0
    for _ in range(_MOST_PRICES):
        search.enter("price the usage of repeated groups")
        point = _priced(search, minimise, price)
        if point is None or not ends.improve(point, problem.usage_limit, price):
            break
        if ends.below is not None:
            search.offer(ends.below.choice)
        if search.closed:
            return True
        price = ends.next_price(price)
    if ends.below is not None:
        for choice in _between(problem, runs, ends.above.choice, ends.below.choice):
            search.offer(choice)
    return True


def _is_possible(search: Search, minimise: Minimise) -> bool:
    """Whether some choice keeps the limit; False is proven.

    At a price of usage beyond all other costs, the least total shows the least usage.
    """
    search.enter("find the least usage of repeated groups")
    problem = search.problem
    most = _most_expensive(problem)
    price = _STEEP * max(most, _SAME) / max(problem.usage_limit, _SAME)
    answer = minimise([node.cost + price * node.usage for node in problem.nodes])
    bound, choice = answer or (0.0, None)
    if choice is None:
        return True
    room = problem.usage_limit * (1 + USAGE_TOLERANCE)
    if bound - price * room <= most:
        search.offer(choice)
        return True
    search.statistics["minimum_usage"] = problem.peak_usage(choice)
    return False


def _most_expensive(problem: Problem) -> float:
    """A price that no allowed choice exceeds."""
    arrays = [*(node.cost for node in problem.nodes), *(edge.cost for edge in problem.edges)]
    known: dict[int, float] = {}
    for array in arrays:
        if id(array) not in known:
            known[id(array)] = float(array[np.isfinite(array)].max(initial=0.0))
    return sum(known[id(array)] for array in arrays)


def _priced(search: Search, minimise: Minimise, price: float) -> _Point | None:
    """The best choice at a price of usage; its bound goes to the search."""
    problem = search.problem
    answer = minimise([node.cost + price * node.usage for node in problem.nodes])
    if answer is None or answer[1] is None:
        return None
    search.raise_bound(answer[0] - price * problem.usage_limit)
    return _point(problem, answer[1])


def _point(problem: Problem, choice: IntArray) -> _Point:
    return _Point(choice, problem.objective(choice), problem.peak_usage(choice))


def _between(
    problem: Problem, runs: Sequence[Run], above: IntArray, below: IntArray
) -> Iterator[IntArray]:
    """Choices that keep the limit, from one that does towards a cheaper one that does not."""
    base = below.copy()
    everything = [instance for run in runs for instance in run.instances]
    for order in (everything, everything[::-1]):
        kept = _most_switched(problem, order, above, base)
        yield _switched(order[:kept], above, base)
    outside = np.ones(len(base), dtype=bool)
    outside[[v for instance in everything for v in instance]] = False
    base[outside] = above[outside]
    kept = _most_switched(problem, everything, above, base)
    yield _switched(everything[:kept], above, base)


def _most_switched(
    problem: Problem, order: Sequence[tuple[int, ...]], above: IntArray, base: IntArray
) -> int:
    """How many groups can be switched before the limit breaks, by bisection."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        usage = problem.peak_usage(_switched(order[:middle], above, base))
        low, high = (middle, high) if usage <= problem.usage_limit else (low, middle - 1)
    return low


def _switched(groups: Sequence[tuple[int, ...]], above: IntArray, base: IntArray) -> IntArray:
    choice = base.copy()
    for group in groups:
        members = list(group)
        choice[members] = above[members]
    return choice
