"""Limits of making one pipeline: time, cancellation, and the size of problems."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from autoshard.base.limits import LimitReached
from autoshard.base.outcome import SolveStatus
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions
from autoshard.planner.formulation.formulating import formulated, work_limits
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import CancelToken, KeyValueStore, Problem, Progress, Solution, solve_problem

_LEAST_SECONDS = 0.5
"""Least time limit of one solve, so that a late one still has an answer."""


class Stopped(Exception):  # noqa: N818 - a signal inside the package, not an error
    """Making a pipeline ended before there was one.

    Attributes:
        status: `cancelled` or `timed_out`.
    """

    def __init__(self, status: SolveStatus) -> None:
        super().__init__(status.value)
        self.status = status


@dataclass
class SearchLimits:
    """The limits of one request for a pipeline.

    Attributes:
        time_limit: seconds for the search; the time to plan the stages that it found is extra.
        total: seconds for both.
        cancel: setting it stops the search.
        max_strategies: maximum total number of strategies of all variables of one problem.
        on_progress: called with the progress of the search, and of each solve.
        doing: what is being planned, for reports.
        incumbent: estimated step time of the best pipeline so far.
    """

    time_limit: float
    cancel: CancelToken | None = None
    max_strategies: int | None = None
    on_progress: Callable[[Progress], None] | None = None
    doing: str = ""
    incumbent: float = inf
    total: float = inf
    _start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left of the request."""
        return max(self.total - self.seconds, 0.0)

    @property
    def is_cancelled(self) -> bool:
        """True if the caller stopped the request."""
        return self.cancel is not None and self.cancel.is_set()

    @property
    def is_over(self) -> bool:
        """True if the search must end with what it has."""
        return self.is_cancelled or self.seconds > self.time_limit

    def begin(self, doing: str) -> None:
        """Report what is planned next."""
        self.doing = doing
        self.report(Progress("", inf, -inf, 0.0))

    def report(self, progress: Progress) -> None:
        """Report the progress of a solve; only the whole pipeline has an incumbent."""
        if self.on_progress is not None:
            phase = f"{self.doing}: {progress.phase}" if progress.phase else self.doing
            self.on_progress(Progress(phase, self.incumbent, -inf, self.seconds))

    def formulated(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> Formulation:
        """The formulation of a program on a mesh, within what is left of the time.

        Raises:
            GraphError: the program cannot be planned in this mode.
            OptionError: an option is invalid, or the problem has too many strategies.
            Stopped: the search ended before.
        """
        seconds = max(self.time_limit - self.seconds, _LEAST_SECONDS)
        limits = work_limits(seconds, self.cancel)
        try:
            return formulated(graph, mesh, options, limits, self.max_strategies)
        except LimitReached as reached:
            raise Stopped(reached.status or SolveStatus.TIMED_OUT) from None

    def stopped(self) -> Stopped:
        """The signal that ends the request."""
        return Stopped(SolveStatus.CANCELLED if self.is_cancelled else SolveStatus.TIMED_OUT)

    def solve(
        self, problem: Problem, options: PlanOptions, block_cache: KeyValueStore | None
    ) -> Solution:
        """Solve a problem within what is left of the time.

        Raises:
            Stopped: the search ended before there was a solution.
        """
        if self.is_cancelled:
            raise self.stopped()
        solution = solve_problem(
            problem,
            time_limit=max(self.time_limit - self.seconds, _LEAST_SECONDS),
            relative_gap=options.solver.relative_gap,
            seed=options.solver.seed,
            cancel=self.cancel,
            on_progress=self.report,
            block_cache=block_cache,
        )
        if solution.choice is None:
            raise self.stopped()
        return solution
