"""Problems with runs under a usage limit that binds.

Usage may peak at many times; a price at each of them would make every group different. Instead a
few weighted means of usage over time are priced that have equal weights for all groups, chosen at
the peaks of the choices found so far. At the best prices several choices are near-optimal: some are
within the limit, and others are cheaper but exceed it. Since groups are equal, switching some
groups from one choice to the other gives a choice close to the limit.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import product

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.lagrangian import SAME
from autoshard.solve.problem import Problem
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.find import Run, find_runs
from autoshard.solve.runs.run_solver import SLACK, RunSolver
from autoshard.solve.runs.swap_search import SwapSearch
from autoshard.solve.runs.usage_prices import Point, UsageLagrangian, UsageWeights
from autoshard.solve.state import SolveState

_NUDGE = 1e-3
"""Price at all times, relative to the steep price, so that usage at unpriced times is not free."""
_STEEPER = 8.0
"""Factor from the best prices to either end of the ray of prices that is searched."""


class LimitedRuns:
    """Find bounds and choices of a problem with runs whose limit binds.

    Args:
        state: of the problem; its limit is finite.
        runs: runs in it.
        solver: solves the problem for other costs, without its limit.

    The first of the warm start's `best_choices` is the best choice without a limit, which exceeds
    it.
    """

    def __init__(self, state: SolveState, runs: Sequence[Run], solver: RunSolver) -> None:
        self._state, self._settings = state, state.settings
        self._problem = state.problem
        self._runs = runs
        self._solver = solver
        self._usage_weights = UsageWeights(state.problem, runs)
        self._lagrangian = UsageLagrangian(state, self._usage_weights, solver.minimise)
        for choice in state.warm_start.best_choices:
            self._lagrangian.add_choice(choice)

    def run(self) -> bool:
        """Find the best usage prices, then combine the near-optimal choices at these prices.

        Returns:
            False if no choice satisfies the limit; the statistic `minimum_usage` is then the least
            feasible limit, if that is known.
        """
        try:
            fits = self._state.choice is not None or self._lagrangian.can_fit(
                slack=SLACK, mixtures=self._settings.usage_mixtures, nudges=(0.0, _NUDGE)
            )
            if not fits:
                return False
            self._state.enter("price the usage of repeated groups")
            prices = self._maximise_bound(self._problem.usage_limit)
            nearest = self._lagrangian.nearest(prices)[: self._settings.nearest_choices]
            self._reserve()
            self._state.enter("switch repeated groups")
            self._switch(nearest)
            if prices.any():
                self._swap_groups(prices, nearest)
        finally:
            self._state.warm_start.best_choices[:] = [
                point.choice for point in self._lagrangian.points
            ]
        return True

    def _maximise_bound(self, limit: float) -> FloatArray:
        prices = self._lagrangian.maximise_bound(limit)
        self._state.raise_bound(self._lagrangian.bound)
        return prices

    def _reserve(self) -> None:
        """Lower the limit of weighted usage until choices that satisfy it satisfy the real one."""
        limit = self._problem.usage_limit
        for _ in range(self._settings.reserve_rounds):
            within = (self._lagrangian.excesses(limit) <= 0).all(axis=1)
            points = [self._lagrangian.points[i] for i in np.flatnonzero(within)]
            peaks = [self._problem.peak_usage(point.choice) for point in points]
            over = max(peaks, default=0.0) - self._problem.usage_limit
            if self._state.closed or over <= 0 or over >= limit:
                return
            limit -= over
            self._maximise_bound(limit)

    def _switch(self, points: Sequence[Point]) -> None:
        """Offer combinations of the best choice with others."""
        state = self._state
        for point in (*points, *points):
            if state.closed or state.choice is None:
                return
            for choice in switched_choices(self._problem, self._runs, point.choice, state.choice):
                state.offer(choice)

    def _swap_groups(self, prices: FloatArray, points: Sequence[Point]) -> None:
        """Local search that replaces groups by groups of choices at other prices.

        Args:
            prices: the best usage prices.
            points: choices by their price at these prices, cheapest first; the first one within
                the limit and the first one above it are used.
        """
        state, limit = self._state, self._problem.usage_limit * float(prices.sum())
        fits = [self._paid(prices, point) <= limit for point in points]
        sides = [points[0]]
        if (not fits[0]) in fits:
            other = points[fits.index(not fits[0])]
            if not self._solver.is_same_at_shared(points[0].choice, other.choice):
                sides.append(other)
        swaps = SwapSearch(self._problem, self._runs, self._usage_weights, effort=state.effort)
        state.enter("swap repeated groups")
        found = state.warm_start.swap_options
        for i, (near, component) in enumerate(product(sides, self._solver.components)):
            if state.closed or state.choice is None:
                return
            if i == len(found):
                found.append(tuple(point.choice for point in self._sweep(prices, near, component)))
            self._switch([self._lagrangian.point(choice) for choice in found[i]])
            state.offer(swaps.improve(state.choice, found[i]))

    def _sweep(self, prices: FloatArray, near: Point, component: int | None) -> list[Point]:
        """Best choices at multiples of some prices, with the shared strategies of another choice.

        Between two of them, the next one is at the multiple at which both cost the same, unless no
        choice is cheaper there.
        """
        above, below = (self._near(x * prices, near, component) for x in (1.0 / _STEEPER, _STEEPER))
        found, ends = [near, above, below], deque([(above, below)])
        while ends and len(found) < self._settings.sweep_choices:
            above, below = ends.popleft()
            saved = self._paid(prices, above) - self._paid(prices, below)
            if saved <= 0 or below.cost <= above.cost:
                continue
            multiple = (below.cost - above.cost) / saved
            middle = self._near(multiple * prices, near, component)
            line, reached = (
                point.cost + multiple * self._paid(prices, point) for point in (above, middle)
            )
            if reached < line - SAME * abs(line):
                found.append(middle)
                ends += [(above, middle), (middle, below)]
        return found

    def _paid(self, prices: FloatArray, point: Point) -> float:
        """The price of a choice's usage."""
        return float(prices @ (self._usage_weights.matrix[: len(prices)] @ point.uses))

    def _near(self, prices: FloatArray, near: Point, component: int | None) -> Point:
        """The best choice at some prices that agrees with another one at shared nodes."""
        self._state.check()
        choice = self._solver.near(self._lagrangian.priced(prices), near.choice, component)
        return near if choice is None else self._lagrangian.point(choice)


class RunOutcome(StrEnum):
    """Outcome of run contraction."""

    SKIPPED = "skipped"
    """There are no runs, or the tables would be too large."""
    UPDATED = "updated"
    """The solve state has new choices and bounds."""
    INFEASIBLE = "infeasible"
    """No choice has a finite price within the usage limit."""


def solve_runs(state: SolveState) -> RunOutcome:
    """Solve a problem by run contraction; the state gets the best choice found, and a bound."""
    problem = state.problem
    runs = find_runs(problem)
    contracted = ContractedProblem(problem, state.block_cache, effort=state.effort)
    if problem.ties or not contracted.worthwhile:
        return RunOutcome.SKIPPED
    try:
        return _solve_contracted(state, runs, contracted)
    finally:
        state.blocks = contracted.report()


def _solve_contracted(
    state: SolveState, runs: Sequence[Run], contracted: ContractedProblem
) -> RunOutcome:
    problem = state.problem
    state.enter("solve repeated groups")
    solver = RunSolver(state, contracted)
    if not state.warm_start.best_choices:
        costs = [node.cost for node in problem.nodes]
        if np.isinf(problem.usage_limit):
            quick = solver.quick_choice(costs)
            if quick is not None:
                state.offer(quick)
        answer = solver.minimise(costs, SLACK)
        if answer is None:
            return RunOutcome.SKIPPED
        bound, choice = answer
        state.raise_bound(bound)
        if bound == np.inf:
            return RunOutcome.INFEASIBLE
        if choice is None or state.offer(choice) or np.isinf(problem.usage_limit):
            return RunOutcome.UPDATED
        state.warm_start.best_choices.append(choice)
    possible = LimitedRuns(state, runs, solver).run()
    return RunOutcome.UPDATED if possible else RunOutcome.INFEASIBLE


def switched_choices(
    problem: Problem, runs: Sequence[Run], above: IntArray, below: IntArray
) -> Iterator[IntArray]:
    """Combinations of two choices that satisfy the usage limit.

    As many groups as possible are taken from `above`, the first ones or the last ones; nodes
    outside of groups are taken from either.

    Args:
        problem: the problem.
        runs: runs in it.
        above: a choice that may exceed the limit.
        below: a choice that satisfies it.
    """
    groups = [instance for run in runs for instance in run.instances]
    outside = np.ones(len(below), dtype=bool)
    outside[[v for group in groups for v in group]] = False
    for base in (below, np.where(outside, above, below)):
        for order in (groups, groups[::-1]):
            kept = _most_switched(problem, order, above, base)
            yield _switched(order[:kept], above, base)


def _most_switched(
    problem: Problem, order: Sequence[tuple[int, ...]], above: IntArray, base: IntArray
) -> int:
    """Largest number of groups that can be switched within the limit, by bisection."""
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
