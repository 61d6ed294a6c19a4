"""Reasons of infeasibility: a minimal set of conflicting options, possibly with the memory budget.

A conflict is minimal (an irreducible infeasible subset) if removing any one constraint resolves
it. It is found by deletion filtering (Chinneck and Dravnieks, ORSA J. Comput. 3:157, 1991): a
constraint is removed if the remaining ones are still infeasible.
"""

import time
from collections.abc import Callable
from math import floor, isfinite

from autoshard.base.limits import LimitReached, Limits, limited
from autoshard.base.outcome import SolveStatus
from autoshard.base.quantities import unit_hint
from autoshard.constraints import Constraint
from autoshard.plan.document import Conflict
from autoshard.plan.options import PlanOptions
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import CancelToken, solve_problem

_MIN_SECONDS = 1.0
"""Minimum time limit of a single solve, seconds, even after the deadline."""
_LATE_SECONDS = 30.0
"""Seconds after twice the time limit from which on no problem is formulated any more."""
_MAX_TRIES = 12
_ACCURACY = 2e-5
"""Relative accuracy of a minimum usage, with a margin."""
_CLEARLY_LESS = 0.99
"""Share of the smallest budget that is tested for a proof that it is too small."""
_LEAST_BUDGET_SECONDS = 10.0
"""Time limit of the search for the smallest feasible budget of larger problems, seconds."""
_FEW_STRATEGIES = 10_000
"""Number of strategies up to which only half of the request's time limit ends that search, so that
its result hardly depends on the load of the machine."""


def find_conflict(
    formulation: Formulation, options: PlanOptions, *, cancel: CancelToken | None = None
) -> Conflict:
    """Find the conflict that makes a formulation infeasible.

    Args:
        formulation: a formulation without a plan.
        options: options of the request; `time_limit` also limits this search. If it is reached,
            the conflict may not be minimal, and `Conflict.minimal` is false.
        cancel: an event; setting it ends the search like the time limit.
    """
    search = _ConflictSearch(formulation, options, cancel)
    try:
        with limited(
            Limits(time.perf_counter() + 2 * options.solver.time_limit + _LATE_SECONDS, cancel)
        ):
            return search.conflict()
    except LimitReached:
        return search.unfinished()


def conflict_text(conflict: Conflict, *, proven: bool) -> str:
    """A message that describes a conflict, and what to change.

    Args:
        conflict: the conflict.
        proven: True if it is proven that no plan fits, False if only none was found.
    """
    several = len(conflict.options) > 1
    options = "; ".join(conflict.options) + ("" if conflict.minimal else " (or some of these)")
    if conflict.budget is None:
        what = "these options contradict each other" if several else "this option is infeasible"
        return f"no plan is possible, {what}: {options}; change or remove one"
    fits = "fits" if proven else "was found that fits"
    short = f"no plan {fits} the memory budget of {conflict.budget:,} bytes per device"
    if (hint := unit_hint(conflict.budget)) is not None:
        short += f" ({hint})"
    least = "raise memory_budget, "
    if conflict.least_budget is not None:
        least = f"the smallest feasible budget is {_least_text(conflict)} bytes: {least}"
    if not conflict.options:
        return f"{short}; {least}use more devices, or a smaller batch"
    return f"{short} together with: {options}; {least}or change or remove one of these"


def _least_text(conflict: Conflict) -> str:
    found, bound = conflict.least_budget, conflict.least_budget_bound
    if bound is None:
        return f"at most {found:,}"
    return f"{found:,}" if bound == found else f"between {bound:,} and {found:,}"


class _ConflictSearch:
    def __init__(
        self, formulation: Formulation, options: PlanOptions, cancel: CancelToken | None
    ) -> None:
        self._formulation = formulation
        self._options = options
        self._deadline = time.perf_counter() + options.solver.time_limit
        self._cancel = cancel

    def conflict(self) -> Conflict:
        if self._contradicts(self._formulation):
            test, budget = self._contradicts, None
        else:
            test, budget = self._exceeds_memory, self._formulation.prices.memory_budget
        members = self._minimal(test)
        bound, least = (None, None) if budget is None else self._least_budget()
        return Conflict(
            options=tuple(constraint.label for constraint in members),
            minimal=not self._is_over,
            budget=budget,
            least_budget=least,
            least_budget_bound=bound,
        )

    def unfinished(self) -> Conflict:
        """The conflict of all options and the budget, if the search was stopped."""
        return Conflict(
            options=tuple(c.label for c in self._formulation.constraints.constraints),
            minimal=False,
            budget=self._formulation.prices.memory_budget,
            least_budget=None,
        )

    @property
    def _remaining(self) -> float:
        return max(self._deadline - time.perf_counter(), _MIN_SECONDS)

    @property
    def _is_over(self) -> bool:
        cancelled = self._cancel is not None and self._cancel.is_set()
        return cancelled or time.perf_counter() > self._deadline

    def _contradicts(self, formulation: Formulation) -> bool:
        """True if a formulation is infeasible even without a memory limit."""
        found = solve_problem(
            formulation.problem,
            relative_gap=0.5,
            time_limit=self._remaining,
            cancel=self._cancel,
        )
        return found.status is SolveStatus.INFEASIBLE

    def _exceeds_memory(self, formulation: Formulation) -> bool:
        """True if every plan provably exceeds the memory budget."""
        least = self._search(formulation).min_usage()
        # A search that is stopped may have found nothing, which proves nothing.
        is_proven = isfinite(least) or not self._is_over
        return is_proven and least > formulation.prices.memory_budget

    def _search(self, formulation: Formulation, seconds: float | None = None) -> BudgetSearch:
        seconds = self._remaining if seconds is None else seconds
        return BudgetSearch(formulation, self._options, seconds=seconds, cancel=self._cancel)

    def _least_budget(self) -> tuple[int | None, int | None]:
        """A lower bound of the feasible budgets, and the smallest for which a plan is found.

        The plan with the minimum counted usage need not have the lowest peak, so smaller budgets
        are tried until no plan is found.
        """
        variables = self._formulation.variables
        is_small = sum(len(variable.strategies) for variable in variables) <= _FEW_STRATEGIES
        until_half = self._remaining - self._options.solver.time_limit / 2
        most = until_half if is_small else min(until_half, _LEAST_BUDGET_SECONDS)
        seconds = max(most, _MIN_SECONDS)
        end = time.perf_counter() + seconds
        search = self._search(self._formulation, seconds)
        usage, plan = search.min_usage_plan

        def is_over() -> bool:
            return self._is_over or time.perf_counter() > end

        # A minimum that was not found in time is an upper bound.
        bound = None if is_over() or not isfinite(usage) else floor(usage * (1 - _ACCURACY))
        budget = None
        for _ in range(_MAX_TRIES):
            if plan is None:
                break
            budget = plan.memory.peak
            if is_over():
                break
            outcome = search.run(budget - 1, quick=True)
            if outcome.solution.status is SolveStatus.INFEASIBLE:
                return budget, budget
            plan = outcome.plan
        if budget is not None and not is_over():
            # Just below it, the small values that are not counted may be all that is missing.
            below = int(_CLEARLY_LESS * budget)
            if search.run(below, quick=True).solution.status is SolveStatus.INFEASIBLE:
                return max(bound or 0, below + 1), budget
        return bound, budget

    def _minimal(self, infeasible: Callable[[Formulation], bool]) -> list[Constraint]:
        """A minimal infeasible subset of the constraints; empty if no constraint is needed."""
        members = list(self._formulation.constraints.constraints)
        if members and infeasible(self._with_only([])):
            return []
        for constraint in tuple(members):
            rest = [c for c in members if c is not constraint]
            if rest and not self._is_over and infeasible(self._with_only(rest)):
                members = rest
        return members

    def _with_only(self, kept: list[Constraint]) -> Formulation:
        return self._formulation.constrained(self._formulation.constraints.only(kept))
