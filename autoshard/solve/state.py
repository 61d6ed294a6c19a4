"""The state of one solve: best choice, bound, stopping rule, solution and warm start."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.base.limits import CancelToken
from autoshard.base.outcome import TIME_LIMIT_REACHED, SolveStatus, relative_gap
from autoshard.solve.block_cache import KeyValueStore, SolvedBlock
from autoshard.solve.problem import Problem
from autoshard.solve.settings import Effort, SolverSettings

MINIMUM_GAP = 1e-9
"""Lower limit of the requested relative gap, because of rounding."""


@dataclass(frozen=True)
class Solution:
    """The result of a solve.

    Attributes:
        status: optimal, feasible, infeasible, timed out or cancelled.
        choice: strategy index per node; None if none was found.
        objective: price of the choice, or inf.
        bound: proven lower bound of every choice's price.
        wall_time: seconds spent.
        statistics: counts and seconds of each step, by name.
        blocks: repeated groups that were solved as one block.
    """

    status: SolveStatus
    choice: IntArray | None
    objective: float
    bound: float
    wall_time: float
    statistics: dict[str, float] = field(default_factory=dict)
    blocks: tuple[SolvedBlock, ...] = ()

    @property
    def reached_time_limit(self) -> bool:
        """True if a time limit cut a step short, so that more time may give a better solution."""
        return TIME_LIMIT_REACHED in self.statistics

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the bound; inf without a choice."""
        return float("inf") if self.choice is None else relative_gap(self.objective, self.bound)


@dataclass(frozen=True, eq=False)
class RestrictedProblem:
    """A problem restricted to some strategies of each node.

    Attributes:
        problem: the nodes and edges of the whole problem with fewer strategies each.
        kept: index of each strategy in the whole problem, shape [K] for each node.
    """

    problem: Problem
    kept: tuple[IntArray, ...]

    def whole(self, choice: IntArray) -> IntArray:
        """Convert a choice of the restricted problem to one of the whole problem."""
        return np.array([kept[s] for kept, s in zip(self.kept, choice, strict=True)])

    def part(self, choice: IntArray) -> IntArray:
        """Convert a choice of the whole problem, whose strategies must all be kept."""
        places = zip(self.kept, choice, strict=True)
        return np.array([np.searchsorted(kept, s) for kept, s in places])


@dataclass(eq=False)
class WarmStart:
    """Results of earlier solves of a problem that are valid for every usage limit.

    Attributes:
        unlimited_bound: lower bound of the price of every choice without a limit; None until the
            problem was solved without one and the best choice exceeded the limit.
        best_choices: choices that were best at some prices of usage.
        known: choices to start from, whatever their usage.
        strategy_bounds: of a wide problem without a limit, lower bounds by strategy per node.
        candidates: of a wide problem, mask of the first strategies of each node.
        restricted: of a wide problem, the restricted problem that was solved, and its own
            warm start.
        proven: largest limit for which a bound was proven, and that bound.
    """

    unlimited_bound: float | None = None
    best_choices: list[IntArray] = field(default_factory=list)
    known: list[IntArray] = field(default_factory=list)
    strategy_bounds: list[FloatArray] = field(default_factory=list)
    candidates: list[BoolArray] = field(default_factory=list)
    restricted: "tuple[RestrictedProblem, WarmStart] | None" = None
    proven: tuple[float, float] = (-float("inf"), -float("inf"))


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a running solve.

    Attributes:
        phase: name of the running step.
        incumbent: price of the best choice so far, or inf.
        bound: proven lower bound so far, or -inf.
        elapsed: seconds since the start.
    """

    phase: str
    incumbent: float
    bound: float
    elapsed: float

    @property
    def gap(self) -> float:
        """Relative distance of the incumbent from the bound; inf without an incumbent."""
        return relative_gap(self.incumbent, self.bound)


class Interrupted(Exception):  # noqa: N818 - a signal inside the package, not an error
    """The time is over or the solve was cancelled; results so far are in the `SolveState`."""


class SolveState:
    """Best choice, bound and stopping rule of one solve.

    Args:
        problem: the problem; every offered choice is checked against it.
        time_limit: seconds, or None.
        gap: gap at which the solve may stop, relative to the sum of the absolute prices of the
            choice (the objective, if no price is negative).
        seed: of random numbers.
        on_progress: called with each improvement and at the start of each phase.
        cancel: checked between steps and from inside the solvers.
        block_cache: stores tables of solved blocks for other solves; None for no store.
        settings: limits of work.
        warm_start: results of solves of the same problem under other limits; extended.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        time_limit: float | None = None,
        gap: float = 0.0,
        seed: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
        block_cache: KeyValueStore | None = None,
        warm_start: WarmStart | None = None,
        settings: SolverSettings | None = None,
    ) -> None:
        self.problem = problem
        self.settings = SolverSettings() if settings is None else settings
        self.warm_start = WarmStart() if warm_start is None else warm_start
        self.gap = gap
        self.seed = seed
        self.block_cache = block_cache
        self.blocks: tuple[SolvedBlock, ...] = ()
        self.choice: IntArray | None = None
        self.objective = float("inf")
        self.magnitude = 0.0
        self.bound = -float("inf")
        self.statistics: dict[str, float] = {}
        self.phase = "start"
        # A bound above this, which is the problem's cut-off but for rounding, excludes all choices.
        scale = abs(problem.cutoff) - 2.0 * problem.min_negative_price
        self._price_limit = problem.cutoff + MINIMUM_GAP * scale
        self._start = time.perf_counter()
        self._time_limit = time_limit
        self._on_progress = on_progress
        self._cancel = cancel

    @property
    def effort(self) -> Effort:
        """Limits of the work of a step; made anew, since a cycle of references keeps memory."""
        return Effort(self.settings, self.check)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def remaining(self) -> float:
        """Seconds until the time limit, at least 0; inf without one."""
        if self._time_limit is None:
            return float("inf")
        return max(self._time_limit - self.elapsed, 0.0)

    def deadline(self, share: float) -> float:
        """Deadline of a step that may take a share of the remaining time; see `is_late`."""
        return self.elapsed + share * self.remaining

    def is_late(self, deadline: float) -> bool:
        """True if the time of a step is over, which is recorded.

        Steps are limited by work, so that the solution does not depend on the machine, or on what
        else it does. Deadlines only make sure that a solve ends in time.
        """
        late = self.elapsed >= deadline
        if late:
            self.record_time_limit()
        return late

    def record_time_limit(self) -> None:
        """Record that a step ended because of the time limit, not because of its work."""
        self.statistics[TIME_LIMIT_REACHED] = 1.0

    @property
    def cancelled(self) -> bool:
        """True if the solve was cancelled."""
        return self._cancel is not None and self._cancel.is_set()

    @property
    def must_stop(self) -> bool:
        """True if the time is over or the solve was cancelled."""
        return self.cancelled or self.remaining <= 0

    @property
    def closed(self) -> bool:
        """True if the best choice is proven good enough, or every choice to exceed the cut-off."""
        if self.bound > self._price_limit:
            return True
        if self.objective > self.problem.cutoff:
            return False
        return self.objective - self.bound <= self.gap * self.magnitude

    @property
    def cutoff(self) -> float:
        """Upper limit of the price of choices that would be an improvement."""
        if self.choice is None or self.objective > self.problem.cutoff:
            return min(float(np.nextafter(self._price_limit, np.inf)), self.objective)
        # A bound at this value closes the solve, so strategies may be dropped up to here although
        # better choices may be lost: those are within the gap.
        return self.objective - 0.5 * self.gap * self.magnitude

    def is_set(self) -> bool:
        """True if a step of this solve should stop; makes the state a `CancelToken`."""
        return self.must_stop

    def check(self) -> None:
        """Raise if the solve must stop.

        Raises:
            Interrupted: the time is over or the solve was cancelled.
        """
        if self.must_stop:
            raise Interrupted

    def enter(self, phase: str) -> None:
        """Start a phase and report it.

        Raises:
            Interrupted: the time is over or the solve was cancelled.
        """
        self.check()
        self.phase = phase
        self.report()

    def report(self) -> None:
        """Report progress."""
        if self._on_progress is not None:
            self._on_progress(Progress(self.phase, self.objective, self.bound, self.elapsed))

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a statistic."""
        self.statistics[name] = self.statistics.get(name, 0.0) + amount

    def offer(self, choice: IntArray) -> bool:
        """Keep a choice if it is allowed and better than the best; return whether it is allowed.

        Choices that exceed the cut-off of the problem guide the search.
        """
        if not self.problem.fits(choice):
            return False
        objective = self.problem.objective(choice)
        if self.choice is None or objective < self.objective:
            self.choice, self.objective = choice.copy(), objective
            # The scale of rounding errors: the objective, if no price is negative.
            self.magnitude = float(np.abs(self.problem.prices(choice)).sum())
            self.report()
        return True

    def raise_bound(self, bound: float) -> None:
        """Record a proven lower bound."""
        if bound > self.bound:
            self.bound = bound
            self.report()

    def finish(self, *, infeasible: bool = False) -> Solution:
        """The solution with the best choice and bound so far."""
        if self.remaining <= 0 and not (infeasible or self.closed):
            self.record_time_limit()
        # By rounding, the bound of an optimum may be above its price.
        choice, objective, bound = self.choice, self.objective, min(self.bound, self.objective)
        status = self._status()
        if objective > self.problem.cutoff:
            infeasible = infeasible or self.bound > self._price_limit or self._exact
            choice, objective = None, float("inf")
        if infeasible:
            status, choice, bound = SolveStatus.INFEASIBLE, None, float("inf")
        return Solution(
            status, choice, objective, bound, self.elapsed, self.statistics, self.blocks
        )

    @property
    def _exact(self) -> bool:
        """True if the best choice is proven optimal but for rounding."""
        rounding = MINIMUM_GAP * self.magnitude
        return self.choice is not None and self.objective - self.bound <= rounding

    def _status(self) -> SolveStatus:
        found = self.objective <= self.problem.cutoff and self.choice is not None
        if found and self.closed:
            return SolveStatus.OPTIMAL
        if self.cancelled:
            return SolveStatus.CANCELLED
        return SolveStatus.FEASIBLE if found else SolveStatus.TIMED_OUT
