"""Problems with runs under a usage limit that binds.

Usage may peak at many times; a price at each of them would make every group different. Instead a
few weighted means of usage over time are priced that have equal weights for all groups, chosen at
the peaks of the choices found so far. At the best prices several choices are near-optimal: some are
within the limit, and others are cheaper but exceed it. An integer program combines their groups.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.count_branches import branch_on_counts
from autoshard.solve.runs.find import Run, find_runs
from autoshard.solve.runs.group_master import GroupMaster
from autoshard.solve.runs.usage_prices import UsageLagrangian, UsageWeights
from autoshard.solve.state import SolveState

_SLACK = 1e-6
"""Relative difference below which two prices count as equal."""
_MULTIPLES = (0.8, 0.5, 0.125)
"""Multiples of the best prices whose best choices are combined with the others."""
_MIXTURES = 8
"""Largest number of mixtures of times to prove a limit infeasible."""

_NUDGE = 1e-3
"""Price at all times, relative to the steep price, so that usage at unpriced times is not free."""


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
    return _solve_limited(state, runs, contracted)


def _solve_limited(
    state: SolveState, runs: Sequence[Run], contracted: ContractedProblem
) -> RunOutcome:
    """Find bounds and choices under a limit that binds.

    If no choice satisfies it, the statistic `minimum_usage` is the least feasible limit, if that is
    known. The first of the warm start's `best_choices` is the best choice without a limit.
    """

    def minimise(costs: Sequence[FloatArray], _: float) -> tuple[float, IntArray] | None:
        return contracted.minimise(costs)

    best_choices = state.warm_start.best_choices
    is_enough = state.settings.bounds_only and state.choice is not None
    lagrangian = UsageLagrangian(state, UsageWeights(state.problem, runs), minimise)
    for choice in best_choices:
        lagrangian.add_choice(choice)
    if not best_choices:
        # Of choices that cost the same without the limit, one with little usage.
        if lagrangian.evaluate(np.zeros(0), slack=_SLACK) is None:
            return RunOutcome.SKIPPED
        if state.problem.fits(lagrangian.points[-1].choice):
            return RunOutcome.UPDATED
    for choice in state.warm_start.known if is_enough else ():
        lagrangian.add_choice(choice)
    try:
        # Also if a choice is known: groups of choices with little usage are combined, too.
        exceeds = bool(lagrangian.usage_weights.weights) and not is_enough
        nudges = (0.0, _NUDGE)
        if exceeds and not lagrangian.can_fit(slack=_SLACK, mixtures=_MIXTURES, nudges=nudges):
            return RunOutcome.INFEASIBLE
        state.enter("price the usage of repeated groups")
        prices = lagrangian.maximise_bound()
        state.raise_bound(lagrangian.bound)
        if is_enough:
            return RunOutcome.UPDATED
        state.enter("combine repeated groups")
        master = GroupMaster(state)
        _combine_groups(lagrangian, prices, master)
        if not state.closed:
            state.enter("branch on numbers of groups")
            branch_on_counts(lagrangian, prices, contracted, master)
    finally:
        best_choices[:] = [point.choice for point in lagrangian.points]
    return RunOutcome.UPDATED


def _combine_groups(lagrangian: UsageLagrangian, prices: FloatArray, master: GroupMaster) -> None:
    """Combine the groups of all choices found, and of more choices while the gap is open."""
    state = master.state
    for point in lagrangian.points:
        master.add(point.choice)
    master.combine()
    if state.choice is not None and not state.closed:
        master.add(state.choice)
        master.combine()
    for multiple in _MULTIPLES if prices.any() else ():
        if state.closed:
            return
        lagrangian.evaluate(multiple * prices, slack=_SLACK)
        master.add(lagrangian.points[-1].choice)
        master.combine()
