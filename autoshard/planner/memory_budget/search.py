"""What looking for a plan under a budget has come to, and what to try next."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isinf

from autoshard.arrays import BoolArray, IntArray
from autoshard.outcome import SolveStatus
from autoshard.plan.document import Costs, Memory, Stage
from autoshard.planner.formulation.decisions import Decisions
from autoshard.planner.memory_budget.checkpoints import Backward
from autoshard.solve import Problem, Solution, WarmStart

_FINE = 3e-3
"""Share of the budget below which two limits are the same."""


@dataclass(frozen=True)
class Draft:
    """A plan that was made and looked at.

    Attributes:
        stage: its only stage.
        costs: its price.
        memory: its peak.
    """

    stage: Stage
    costs: Costs
    memory: Memory


@dataclass(frozen=True)
class Counted:
    """A problem that counts what choices hold, and how to read it.

    Attributes:
        problem: without a limit.
        decisions: what a choice means.
        variable_of: the formulation's variable that a node stands for.
        nodes_with: strategies of nodes that go with some strategies of variables.
        warm_start: left by solving it under some limits.
    """

    problem: Problem
    decisions: Callable[[IntArray], Decisions]
    variable_of: Callable[[int], int]
    nodes_with: Callable[[Sequence[BoolArray]], list[BoolArray]] = list
    warm_start: WarmStart = field(default_factory=WarmStart)


class LimitSearch:
    """Looks for the most that choices may hold so that the peak obeys a budget.

    Attributes:
        limit: what to try next.
        enough: the most that was tried and that was not too much.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.enough, self._too_much = 0.0, float("inf")
        self.limit = float(budget)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try."""
        close = _FINE * self._budget
        return self._too_much - self.enough < close or self.limit - self.enough < 0.1 * close

    def sees(self, held: float, peak: int) -> None:
        """A plan at the limit holds so much, and has this peak."""
        excess = peak - self._budget
        if excess <= 0:
            self.enough = self.limit
            promising = held - excess
        else:
            # Between what it holds and the limit, it would be found again.
            self._too_much = min(self._too_much, self.limit, held)
            promising = held - excess - 0.5 * _FINE * self._budget
        between = self.enough < promising < self._too_much
        self.limit = promising if between else self._middle

    def fails(self) -> None:
        """There is no plan at the limit, or none was found."""
        self.enough = self.limit
        self.limit = self._middle

    @property
    def _middle(self) -> float:
        if isinf(self._too_much):
            return self.enough
        return 0.5 * (self.enough + self._too_much)


class Rounds:
    """What looking for a plan under a budget has come to.

    Attributes:
        budget: bytes per device.
        bound: lower bound of the price of every plan that fits.
        best: the cheapest plan that fits, and the solution that it is.
        backward: moments at which memory is counted.
        counted: the problem; None if it is to be made.
        search: the limit to solve it with.
        num_better: looks since a plan fits.
    """

    def __init__(self, budget: int, bound: float) -> None:
        self.budget = budget
        self.bound = bound
        self.best: tuple[Solution, Draft] | None = None
        self.backward: list[Backward] = []
        self.counted: Counted | None = None
        self.num_better = 0
        self.search = LimitSearch(budget)

    def count(self, moments: Iterable[Backward]) -> bool:
        """Count at more moments from now on; tell whether there are new ones."""
        new = [moment for moment in dict.fromkeys(moments) if moment not in self.backward]
        if new:
            self.backward += new
            self.counted, self.search = None, LimitSearch(self.budget)
        return bool(new)


def without_plan(solution: Solution, bound: float) -> Solution:
    """What a solution proves of which no plan fits."""
    if solution.choice is None:
        return solution
    status = (
        SolveStatus.CANCELLED if solution.status is SolveStatus.CANCELLED else SolveStatus.TIMED_OUT
    )
    statistics = {**solution.statistics, "unfit": 1.0}
    return replace(
        solution,
        status=status,
        choice=None,
        objective=float("inf"),
        bound=bound,
        statistics=statistics,
    )
