"""State of a search under a memory budget: what is counted, the usage limit, the plans found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf

import numpy as np

from autoshard.base.arrays import BoolArray, IntArray
from autoshard.base.outcome import SolveStatus
from autoshard.lowering.instructions import Lowering
from autoshard.plan.predictions import Costs, Memory
from autoshard.plan.stage import Stage
from autoshard.planner.formulation.stage_builder import Decisions
from autoshard.planner.memory.time_points import BackwardPoint
from autoshard.solve import Problem, Solution, WarmStart, restrict

_SAME_LIMIT = 3e-3
"""Relative difference below which two usage limits count as equal."""


@dataclass(frozen=True)
class FinishedPlan:
    """A finished plan: its only stage, lowered too, its costs, and its memory from the timeline."""

    stage: Stage
    lowering: Lowering
    costs: Costs
    memory: Memory


@dataclass(frozen=True)
class CountedProblem:
    """A problem that counts memory as usage, without a limit.

    Attributes:
        problem: the problem.
        decisions: maps a choice to decisions.
        variable_of: maps a node to the formulation's variable; -1 if it has none.
        nodes_with: maps strategies of variables to the compatible strategies of nodes.
        num_common: number of the first nodes, which do not depend on the time points.
        whole: of a problem with some strategies only, maps a choice to one of the whole problem.
        warm_start: state of the solver between solves under different limits.
    """

    problem: Problem
    decisions: Callable[[IntArray], Decisions]
    variable_of: Callable[[int], int]
    nodes_with: Callable[[Sequence[BoolArray]], list[BoolArray]] = list
    num_common: int = 0
    whole: Callable[[IntArray], IntArray] = np.copy
    warm_start: WarmStart = field(default_factory=WarmStart)

    def restricted(self, masks: Sequence[BoolArray]) -> "CountedProblem":
        """The problem with some strategies of each variable only.

        Args:
            masks: mask of the strategies of each variable to keep, shape [S].
        """
        part = restrict(self.problem, self.nodes_with(masks))
        return CountedProblem(
            part.problem,
            lambda choice: self.decisions(part.whole(choice)),
            self.variable_of,
            num_common=self.num_common,
            whole=part.whole,
        )

    def completed(self, common: IntArray) -> IntArray | None:
        """The choice that continues one of the common nodes, with the cheapest other strategies.

        Args:
            common: strategies of the common nodes of a problem with other time points.

        Returns:
            None if that problem has other common nodes: with micro-batches that wait for their
            backward, they depend on whether there is a time point of an operation.
        """
        if len(common) != self.num_common:
            return None
        nodes = self.problem.nodes
        prices = [node.cost.copy() for node in nodes[self.num_common :]]
        for edge in self.problem.edges:
            if edge.target >= self.num_common:
                row = edge.rows[common[edge.source]]
                prices[edge.target - self.num_common] += edge.cost[row, edge.cols]
        return np.array([*common, *(int(price.argmin()) for price in prices)], dtype=np.intp)


def problem_sizes(problem: Problem) -> dict[str, float]:
    """The numbers of nodes, edges and strategies of a problem."""
    return {
        "nodes": float(len(problem.nodes)),
        "edges": float(len(problem.edges)),
        "strategies": float(sum(node.num_strategies for node in problem.nodes)),
    }


@dataclass(frozen=True)
class Outcome:
    """Result of a search.

    Attributes:
        solution: status, objective, bound and statistics of the problem that was solved.
        sizes: the numbers of nodes, edges and strategies of that problem.
        plan: the best plan that fits; None if none was found.
        variable_of: maps a node of the problem to the formulation's variable; -1 if it has none.
    """

    solution: Solution
    sizes: Mapping[str, float]
    plan: FinishedPlan | None
    variable_of: Callable[[int], int]

    @property
    def is_conflict(self) -> bool:
        """True if there is no plan because of options or memory, not because of the time limit."""
        exceeds = (
            self.solution.status is SolveStatus.TIMED_OUT and "unfit" in self.solution.statistics
        )
        return self.solution.status is SolveStatus.INFEASIBLE or exceeds


@dataclass(frozen=True)
class Exceeding:
    """A plan that does not fit: strategy of each variable, and seconds of a step."""

    layouts: IntArray
    cost: float


class LimitSearch:
    """Searches the largest usage limit for which the peak of the plan is within the budget.

    Attributes:
        limit: the next limit to try.
        fits: the largest limit so far whose plan fits.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.fits, self._exceeds = 0.0, float("inf")
        self.limit = float(budget)

    @property
    def is_over(self) -> bool:
        """True if no further limit is worth trying."""
        close = _SAME_LIMIT * self._budget
        return self._exceeds - self.fits < close or self.limit - self.fits < 0.1 * close

    def record(self, usage: float, peak: int) -> None:
        """Record the usage in the problem and the true peak of the plan for the current limit."""
        excess = peak - self._budget
        if excess <= 0:
            self.fits = self.limit
            # The peak differs from the usage by what the problem does not count, which is much the
            # same in similar plans: so the limit moves by as much as the peak is off.
            promising = usage - excess
        else:
            # Any limit between its usage and this limit would give the same plan.
            self._exceeds = min(self._exceeds, self.limit, usage)
            promising = usage - excess - 0.5 * _SAME_LIMIT * self._budget
        between = self.fits < promising < self._exceeds
        # Every plan that fits has a choice within the budget.
        self.limit = min(promising if between else self._middle, float(self._budget))

    def record_failure(self) -> None:
        """Record that no plan was found for the current limit."""
        self.fits = self.limit
        self.limit = self._middle

    @property
    def _middle(self) -> float:
        return self.fits if isinf(self._exceeds) else 0.5 * (self.fits + self._exceeds)


class Rounds:
    """State of a search under one budget.

    Attributes:
        budget: bytes per device.
        bound: lower bound of the time of every plan that fits.
        quick: True if the first plan that fits is returned.
        proves: True if a bound of all plans that fit is proven for it.
        layouts: strategies of the variables of that plan; None if no layouts have a plan that fits.
        common: strategies of the common nodes of all counted problems in that plan; None if it is
            not known.
        unlimited: the best plan without recomputation, which does not fit, and its solution; None
            if there is no such plan.
        best: the fastest plan that fits; None if none was found.
        fits: True if a plan of the problem with all layouts fits.
        exceeding: the last plan that does not fit; None once a plan fits that is not slower.
        relaxed: the last solution with the budget itself as the limit.
        points: time points of backward at which memory is counted.
        counted: the problem with these time points; None if it has to be built.
        limits: the search of the usage limit.
        num_improvements: number of rounds since the first plan that fits.
    """

    def __init__(
        self, budget: int, bound: float, *, quick: bool = False, proves: bool = False
    ) -> None:
        self.budget = budget
        self.bound = bound
        self.quick = quick
        self.proves = proves
        self.layouts: IntArray | None = None
        self.common: IntArray | None = None
        self.unlimited: tuple[Solution, FinishedPlan] | None = None
        self.best: Outcome | None = None
        self.fits = False
        self.exceeding: Exceeding | None = None
        self.relaxed: Solution | None = None
        self.points: list[BackwardPoint] = []
        self.counted: CountedProblem | None = None
        self.num_improvements = 0
        self.limits = LimitSearch(budget)

    def keep(self, outcome: Outcome, common: IntArray) -> None:
        """Keep an outcome with a plan that fits if it is faster than the best one.

        Args:
            outcome: the outcome.
            common: strategies of the common nodes of all counted problems.
        """
        cost = outcome.solution.objective
        if self.exceeding is not None and cost <= self.exceeding.cost:
            self.exceeding = None
        if self.best is None or cost < self.best.solution.objective:
            self.best, self.common = outcome, common

    def add_points(self, points: Iterable[BackwardPoint]) -> bool:
        """Count memory at more time points; return True if any of them is new."""
        new = [point for point in dict.fromkeys(points) if point not in self.points]
        if new:
            self.points += new
            # With more time points counted, the same plan may have more usage: what was learned of
            # limits does not hold any more.
            self.counted, self.limits = None, LimitSearch(self.budget)
        return bool(new)
