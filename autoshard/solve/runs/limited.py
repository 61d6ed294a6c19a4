"""Problems with runs under a usage limit that binds.

Usage may peak at many times; a price at each of them would make every group different. Instead a
few weighted means of usage over time are priced that have equal weights for all groups, chosen at
the peaks of the choices found so far. At the best prices several choices are near-optimal: some are
within the limit, and others are cheaper but exceed it. An integer program combines their groups.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain, product

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.find import Run, find_runs
from autoshard.solve.runs.group_master import GroupMaster
from autoshard.solve.runs.run_solver import SLACK, RunSolver
from autoshard.solve.runs.usage_prices import Point, UsageLagrangian, UsageWeights
from autoshard.solve.state import SolveState

_NEAREST_CHOICES = 6
_RESERVE_ROUNDS = 3
_MIXTURES = 8
"""Largest number of mixtures of times to prove a limit infeasible."""

_NUDGE = 1e-3
"""Price at all times, relative to the steep price, so that usage at unpriced times is not free."""


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

    def add_cheapest(self) -> "RunOutcome | None":
        """Add the best choice without the limit; of equal ones, one with little usage.

        Returns:
            None if it exceeds the limit; else the outcome, because there is nothing more to do.
        """
        choice = self._lagrangian.cheapest_choice()
        if choice is None:
            return RunOutcome.SKIPPED
        if self._state.offer(choice):
            return RunOutcome.UPDATED
        self._lagrangian.add_choice(choice)
        self._state.warm_start.best_choices.append(choice)
        return None

    def run(self) -> bool:
        """Find the best usage prices, then combine the groups of choices near them.

        Returns:
            False if no choice satisfies the limit; the statistic `minimum_usage` is then the least
            feasible limit, if that is known.
        """
        try:
            fits = self._state.choice is not None or self._lagrangian.can_fit(
                slack=SLACK, mixtures=_MIXTURES, nudges=(0.0, _NUDGE)
            )
            if not fits:
                return False
            self._state.enter("price the usage of repeated groups")
            prices = self._maximise_bound(self._problem.usage_limit)
            nearest = self._lagrangian.nearest(prices)[:_NEAREST_CHOICES]
            self._reserve()
            self._state.enter("combine repeated groups")
            self._combine(prices, nearest)
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
        for _ in range(_RESERVE_ROUNDS):
            within = (self._lagrangian.excesses(limit) <= 0).all(axis=1)
            points = [self._lagrangian.points[i] for i in np.flatnonzero(within)]
            peaks = [self._problem.peak_usage(point.choice) for point in points]
            over = max(peaks, default=0.0) - self._problem.usage_limit
            if self._state.closed or over <= 0 or over >= limit:
                return
            limit -= over
            self._maximise_bound(limit)

    def _combine(self, prices: FloatArray, nearest: Sequence[Point]) -> None:
        """Combine the groups of all choices found, and of more choices while the gap is open."""
        state, options = self._state, self._state.warm_start.group_options
        master = GroupMaster(state)
        for point in self._lagrangian.points:
            master.add(point.choice)
        for choice in chain(*options.values(), [] if state.choice is None else [state.choice]):
            master.add(choice)
        master.combine()
        sides = self._sides(prices, nearest)
        for multiple in self._settings.price_multiples if prices.any() else ():
            if state.closed:
                return
            if multiple not in options:
                options[multiple] = list(self._options(multiple * prices, sides))
                for choice in options[multiple]:
                    master.add(choice)
                master.combine()

    def _sides(self, prices: FloatArray, nearest: Sequence[Point]) -> list[IntArray]:
        """The first choice within the limit and the first one above it, if they differ.

        Args:
            prices: the best usage prices.
            nearest: choices by their price at these prices, cheapest first.
        """
        limit = self._problem.usage_limit * float(prices.sum())
        fits = [self._paid(prices, point) <= limit for point in nearest]
        sides = [nearest[0].choice]
        if (not fits[0]) in fits:
            other = nearest[fits.index(not fits[0])].choice
            if not self._solver.is_same_at_shared(sides[0], other):
                sides.append(other)
        return sides

    def _options(self, prices: FloatArray, sides: Sequence[IntArray]) -> Iterator[IntArray]:
        """The best choices at some usage prices near other choices, of each component."""
        costs = self._lagrangian.priced(prices)
        for near, component in product(sides, self._solver.components):
            self._state.check()
            choice = self._solver.near(costs, near, component)
            if choice is not None:
                self._state.offer(choice)
                yield choice

    def _paid(self, prices: FloatArray, point: Point) -> float:
        """The price of a choice's usage."""
        return float(prices @ (self._usage_weights.matrix[: len(prices)] @ point.uses))


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
    state.enter("solve repeated groups")
    solver = RunSolver(state, contracted)
    is_limited = bool(np.isfinite(state.problem.usage_limit))
    if is_limited and state.warm_start.unlimited_bound is not None:
        state.raise_bound(state.warm_start.unlimited_bound)
    elif not (is_limited and state.warm_start.best_choices):
        costs = [node.cost for node in state.problem.nodes]
        quick = None if is_limited else solver.quick_choice(costs)
        if quick is not None:
            state.offer(quick)
        # These tables do not depend on usage, so models with other depths share them.
        answer = solver.minimise(costs, SLACK)
        if answer is None:
            return RunOutcome.SKIPPED
        bound, choice = answer
        state.raise_bound(bound)
        if bound == np.inf:
            return RunOutcome.INFEASIBLE
        if choice is None or state.offer(choice) or not is_limited:
            return RunOutcome.UPDATED
    limited = LimitedRuns(state, runs, solver)
    if not state.warm_start.best_choices:
        outcome = limited.add_cheapest()
        if outcome is not None:
            return outcome
    return RunOutcome.UPDATED if limited.run() else RunOutcome.INFEASIBLE
