"""Why there is no plan: which options cannot all hold, and whether memory is among them.

A conflict is minimal: without any one of its members the others can hold. It is found by
deletion filtering (Chinneck and Dravnieks, ORSA J. Comput. 3:157, 1991): leave out one
restriction after the other, and leave it out for good where the rest still conflicts.
"""

import time
from collections.abc import Callable, Sequence

from autoshard.outcome import SolveStatus
from autoshard.plan.constraints import Constraint
from autoshard.plan.document import Conflict
from autoshard.plan.options import PlanOptions
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.memory_budget.planning import Planning
from autoshard.solve import USAGE_TOLERANCE, CancelToken, solve_problem

_LEAST_SECONDS = 1.0
"""What a single look may take even where the time is over."""
_MOST_TRIES = 12


def find_conflict(
    formulation: Formulation, options: PlanOptions, *, cancel: CancelToken | None = None
) -> Conflict:
    """What keeps a formulation from having a plan.

    Args:
        formulation: a formulation without a plan.
        options: of the request; their time limit is that for looking, and afterwards the
            conflict may not be minimal, and says so.
        cancel: ends the search, as the end of the time does.
    """
    return _Filter(formulation, options, cancel).conflict()


def conflict_text(conflict: Conflict, *, proven: bool) -> str:
    """A conflict in words, with the way out.

    Args:
        conflict: the conflict.
        proven: whether it is proven that no plan fits, or none was found.
    """
    several = len(conflict.options) > 1
    options = "; ".join(conflict.options) + ("" if conflict.minimal else " (or some of these)")
    if conflict.budget is None:
        what = "these options cannot all hold" if several else "this option cannot hold"
        return f"no plan is possible, {what}: {options}; change or drop one"
    fits = "fits" if proven else "was found that fits"
    short = f"no plan {fits} the memory budget of {conflict.budget:,} bytes per device"
    least = "raise memory_budget, "
    if conflict.least_budget is not None:
        least = f"the smallest that works is {conflict.least_budget:,} bytes: {least}"
    if not conflict.options:
        return f"{short}; {least}use more devices, or a smaller batch"
    return f"{short} together with: {options}; {least}or change or drop one of these"


class _Filter:
    def __init__(
        self, formulation: Formulation, options: PlanOptions, cancel: CancelToken | None
    ) -> None:
        self._formulation = formulation
        self._options = options
        self._deadline = time.perf_counter() + options.time_limit
        self._cancel = cancel

    def conflict(self) -> Conflict:
        if self._contradicts(self._formulation):
            return self._conflict(self._smallest(self._contradicts), budget=None, least=None)
        members = self._smallest(self._exceeds)
        budget = self._formulation.prices.memory_budget
        return self._conflict(members, budget=budget, least=self._least_budget())

    def _conflict(
        self, members: Sequence[Constraint], *, budget: int | None, least: int | None
    ) -> Conflict:
        return Conflict(
            options=tuple(restriction.label for restriction in members),
            minimal=not self._over,
            budget=budget,
            least_budget=least,
        )

    @property
    def _remaining(self) -> float:
        return max(self._deadline - time.perf_counter(), _LEAST_SECONDS)

    @property
    def _over(self) -> bool:
        cancelled = self._cancel is not None and self._cancel.is_set()
        return cancelled or time.perf_counter() > self._deadline

    def _contradicts(self, formulation: Formulation) -> bool:
        """Whether no choice is possible even with all the memory in the world."""
        found = solve_problem(
            formulation.problem,
            relative_gap=0.5,
            time_limit=self._remaining,
            cancel=self._cancel,
        )
        return found.status is SolveStatus.INFEASIBLE

    def _exceeds(self, formulation: Formulation) -> bool:
        """Whether every choice takes more memory than there is."""
        room = formulation.prices.memory_budget * (1 + USAGE_TOLERANCE)
        return self._planning(formulation).least_usage() > room

    def _planning(self, formulation: Formulation) -> Planning:
        return Planning(formulation, self._options, seconds=self._remaining, cancel=self._cancel)

    def _least_budget(self) -> int | None:
        """The smallest budget for which a plan is found.

        The plan that holds least need not be the one whose peak is least, so smaller ones
        are tried until none is found.
        """
        planning = self._planning(self._formulation)
        plan, budget = planning.with_least(), None
        for _ in range(_MOST_TRIES):
            if plan is None:
                break
            budget = plan.memory.peak
            if self._over:
                break
            plan = planning.within(budget - 1).plan
        return budget

    def _smallest(self, infeasible: Callable[[Formulation], bool]) -> list[Constraint]:
        """Restrictions that cannot all hold, though they can without any one of them."""
        members = list(self._formulation.constraints.constraints)
        if members and infeasible(self._steered([])):
            return []
        for restriction in tuple(members):
            rest = [r for r in members if r is not restriction]
            if rest and not self._over and infeasible(self._steered(rest)):
                members = rest
        return members

    def _steered(self, restrictions: Sequence[Constraint]) -> Formulation:
        old = self._formulation
        constraints = old.constraints.only(restrictions)
        return Formulation(old.graph, old.axes, old.prices, constraints=constraints)
