"""Problems with runs under a usage limit that binds.

Usage may peak at many times; a price at each of them would make every group different. Instead a
few weighted means of usage over time are priced that have equal weights for all groups, chosen at
the peaks of the choices found so far. At the best prices several choices are near-optimal: some are
within the limit, and others are cheaper but exceed it. An integer program combines their groups.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.find import Run, find_runs
from autoshard.solve.runs.group_master import GroupMaster
from autoshard.solve.runs.usage_prices import UsageLagrangian, UsageWeights
from autoshard.solve.state import SolveState

SLACK = 1e-6
"""Relative difference below which two prices count as equal."""
_MULTIPLES = (0.8, 0.5, 0.125)
"""Multiples of the best prices whose best choices are combined with the others."""
_MIXTURES = 8
"""Largest number of mixtures of times to prove a limit infeasible."""

_NUDGE = 1e-3
"""Price at all times, relative to the steep price, so that usage at unpriced times is not free."""


class LimitedRuns:
    """Find bounds and choices of a problem with runs whose limit binds.

    Args:
        state: of the problem; its limit is finite.
        runs: runs in it.
        contracted: solves the problem for other costs, without its limit.

    The first of the warm start's `best_choices` is the best choice without a limit, which exceeds
    it.
    """

    def __init__(
        self, state: SolveState, runs: Sequence[Run], contracted: ContractedProblem
    ) -> None:
        self._state = state
        self._problem = state.problem

        def minimise(costs: Sequence[FloatArray], _: float) -> tuple[float, IntArray] | None:
            return contracted.minimise(costs)

        weights = UsageWeights(state.problem, runs)
        self._lagrangian = UsageLagrangian(state, weights, minimise)
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
        """Find the best usage prices, then combine the groups of the choices found.

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
            prices = self._lagrangian.maximise_bound()
            self._state.raise_bound(self._lagrangian.bound)
            self._state.enter("combine repeated groups")
            self._combine(prices)
        finally:
            self._state.warm_start.best_choices[:] = [
                point.choice for point in self._lagrangian.points
            ]
        return True

    def _combine(self, prices: FloatArray) -> None:
        """Combine the groups of all choices found, and of more near the best prices."""
        master = GroupMaster(self._state)
        for point in self._lagrangian.points:
            master.add(point.choice)
        if self._state.choice is not None:
            master.add(self._state.choice)
        master.combine()
        for multiple in _MULTIPLES if prices.any() else ():
            if self._state.closed:
                return
            self._lagrangian.evaluate(multiple * prices, slack=SLACK)
            master.add(self._lagrangian.points[-1].choice)
            master.combine()


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
    is_limited = bool(np.isfinite(state.problem.usage_limit))
    if is_limited and state.warm_start.unlimited_bound is not None:
        state.raise_bound(state.warm_start.unlimited_bound)
    elif not (is_limited and state.warm_start.best_choices):
        # These tables do not depend on usage, so models with other depths share them.
        answer = contracted.minimise([node.cost for node in state.problem.nodes])
        if answer is None:
            return RunOutcome.SKIPPED
        bound, choice = answer
        state.raise_bound(bound)
        if bound == np.inf:
            return RunOutcome.INFEASIBLE
        if state.offer(choice) or not is_limited:
            return RunOutcome.UPDATED
    limited = LimitedRuns(state, runs, contracted)
    if not state.warm_start.best_choices:
        outcome = limited.add_cheapest()
        if outcome is not None:
            return outcome
    return RunOutcome.UPDATED if limited.run() else RunOutcome.INFEASIBLE
