"""The problems of one search under a memory budget, their solutions and the plans of these."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoshard.base.arrays import IntArray
from autoshard.base.collection import collection_paused
from autoshard.base.limits import unlimited
from autoshard.lowering.timeline import timeline
from autoshard.plan.options import PlanOptions
from autoshard.planner.budget.rounds import CountedProblem, FinishedPlan
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.stage_builder import Decisions, StageBuilder, with_gathers_again
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory.memory_problem import MemoryProblem
from autoshard.planner.memory.time_points import BackwardPoint
from autoshard.solve import (
    CancelToken,
    KeyValueStore,
    Problem,
    Progress,
    Solution,
    SolverSettings,
    WarmStart,
    minimum_usage,
    solve_problem,
    with_equal_groups,
)

_NEGLIGIBLE = 0.005
"""Maximum total size of the values that are not counted, as a share of the budget."""
_MIN_SECONDS = 1.0
"""Minimum time limit of a single solve, seconds, even after the deadline."""

_CountedKey = tuple[float, tuple[BackwardPoint, ...]]
"""Bytes that are negligible, and the time points."""


class BudgetSolver:
    """Makes and solves the problems of one search, and builds plans of their solutions.

    Args:
        formulation: the problem without memory.
        options: limits of the solver, and the options for recomputation.
        seconds: time limit of the search; by default that of the options.
        alike: True to consider only plans whose repeated blocks are all alike.
        on_progress: called while the solver runs.
        cancel: an event; setting it stops the solver.
        block_cache: a store of solved blocks.

    Attributes:
        bound: lower bound of the time of all plans that fit.
        cut_short: True if a time limit ended any solve.
        must_recompute: True if the options ask for recomputation.
    """

    def __init__(
        self,
        formulation: Formulation,
        options: PlanOptions,
        *,
        seconds: float | None = None,
        alike: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
        block_cache: KeyValueStore | None = None,
    ) -> None:
        self._formulation = formulation
        self._options = options
        self._alike = alike
        self._deadline = time.perf_counter() + (seconds or options.solver.time_limit)
        self._on_progress = on_progress
        self._cancel = cancel
        self._block_cache = block_cache
        self.bound = -float("inf")
        self.cut_short = False
        self._unlimited = WarmStart()  # for the problem without memory
        self._last_counted: tuple[_CountedKey, CountedProblem] | None = None
        self.must_recompute = "always" in (
            options.memory.reshard_after_forward,
            options.memory.activation_checkpointing,
        )

    @property
    def is_cancelled(self) -> bool:
        """True if the search is cancelled."""
        return self._cancel is not None and self._cancel.is_set()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; not less than a single solve gets after it."""
        return max(self._deadline - time.perf_counter(), _MIN_SECONDS)

    @property
    def is_late(self) -> bool:
        """True after the deadline."""
        return time.perf_counter() > self._deadline

    def solve(
        self,
        problem: Problem,
        *,
        gap: float | None = None,
        warm_start: WarmStart | None = None,
        seconds: float | None = None,
        proves: bool = False,
        bounds_only: bool = False,
    ) -> Solution:
        """Solve a problem; `proves` if its bound is one of all plans that fit.

        With `bounds_only`, prices of memory prove a bound, and no better choice is searched for.
        """

        def report(progress: Progress) -> None:
            if proves:
                self.bound = max(self.bound, progress.bound)
            if self._on_progress is not None:
                self._on_progress(replace(progress, bound=self.bound))

        solution = solve_problem(
            with_equal_groups(problem) if self._alike else problem,
            time_limit=seconds or self.remaining,
            relative_gap=self._options.solver.relative_gap if gap is None else gap,
            seed=self._options.solver.seed,
            on_progress=report,
            cancel=self._cancel,
            solver=self._options.solver.name,
            block_cache=self._block_cache,
            warm_start=warm_start,
            settings=SolverSettings(bounds_only=bounds_only),
        )
        self.cut_short = self.cut_short or solution.reached_time_limit
        return solution

    @collection_paused()
    def build(self, decisions: Decisions) -> FinishedPlan:
        """Build the plan of some decisions, without re-gathers that backward does not need.

        A plan is also built of what was found until the time was over or the search was cancelled.
        """
        with unlimited():
            return self._built(with_gathers_again(self._formulation, decisions))

    def _built(self, decisions: Decisions) -> FinishedPlan:
        formulation = self._formulation
        builder = StageBuilder(formulation, decisions)
        stage = builder.stage()
        memory = timeline(
            stage,
            formulation.graph,
            training=formulation.prices.training,
            optimizer=formulation.prices.optimizer,
            saving=formulation.prices.saving,
        )
        if memory.unneeded:
            # Depending on its layout, a view may be a copy, whose source backward does not need.
            # The problem does not model that.
            idle = {
                i
                for i in decisions.regathered
                if formulation.use_key(formulation.uses[i]) in memory.unneeded
            }
            return self._built(replace(decisions, regathered=decisions.regathered - idle))
        return FinishedPlan(stage, memory.lowering, builder.costs(stage), builder.memory(memory))

    def count(self, negligible: float, points: Sequence[BackwardPoint] = ()) -> CountedProblem:
        """The problem that counts memory as usage; the last one is kept.

        Args:
            negligible: maximum total bytes of the small values that are not counted.
            points: time points of backward at which memory is counted.
        """
        key = negligible, tuple(points)
        if self._last_counted is None or self._last_counted[0] != key:
            self._last_counted = key, self._count(*key)
        return self._last_counted[1]

    def count_given(
        self, strategies: IntArray, negligible: float, points: Sequence[BackwardPoint]
    ) -> CountedProblem:
        """The problem that counts memory with given strategies of all variables only.

        Args:
            strategies: strategy index of each variable.
            negligible: as for `count`.
            points: as for `count`.
        """
        part = self._count(negligible, points, self._formulation.restricted(strategies))
        return replace(
            part, decisions=lambda choice: replace(part.decisions(choice), choice=strategies)
        )

    def _count(
        self,
        negligible: float,
        points: Sequence[BackwardPoint],
        formulation: Formulation | None = None,
    ) -> CountedProblem:
        formulation, options = formulation or self._formulation, self._options
        if not formulation.prices.training:
            problem = formulation.problem
            return CountedProblem(problem, Decisions, lambda v: v, num_common=len(problem.nodes))
        with collection_paused():
            memory = MemoryProblem(
                formulation,
                reshard_after_forward=options.memory.reshard_after_forward,
                activation_checkpointing=options.memory.activation_checkpointing,
                negligible=negligible,
                points=points,
            )
            variables = memory.variables
            return CountedProblem(
                memory.problem,
                memory.decisions,
                lambda v: variables.get(v, -1),
                memory.nodes_with,
                memory.num_common,
            )

    def least_usage(self, problem: Problem) -> float:
        """The least limit for which a problem has a choice; inf if there is none."""
        return minimum_usage(problem, time_limit=self.remaining, cancel=self._cancel)

    def negligible(self, memory_budget: int) -> float:
        """Maximum total bytes of the values that are not counted."""
        return 0.0 if self.must_recompute else _NEGLIGIBLE * memory_budget

    def peak_points(self, plan: FinishedPlan) -> Iterator[BackwardPoint]:
        """The time point of a plan's peak, if it is in backward and the problem can model it."""
        formulation = self._formulation
        if plan.memory.phase not in ("backward", "recompute"):
            return
        for i, variable in enumerate(formulation.variables):
            if (variable.role, variable.name) == (Role.OPERATOR, plan.memory.at):
                unit = formulation.unit_of.get(i)
                if unit is None:
                    yield BackwardPoint(variable=i)
                elif formulation.prices.micro_batches == 1:
                    yield BackwardPoint(variable=formulation.first_of(unit), starts_block=True)
        resharded = {c.use for c in plan.stage.reshardings if c.value == plan.memory.at}
        inside = formulation.inside_blocks
        for i, use in enumerate(formulation.uses if resharded else ()):
            is_inside = use.source in inside or use.target in inside
            if not is_inside and formulation.use_key(use) in resharded:
                yield BackwardPoint(use=i)

    def block_points(self) -> Iterator[BackwardPoint]:
        """The time points at which the backward of each block that may be checkpointed starts."""
        formulation = self._formulation
        # It makes a difference there which blocks are recomputed: gradients of parameters have
        # grown, and activations of the blocks before are still in memory.
        # With several micro-batches, gradients of parameters do not grow during backward.
        grows = formulation.prices.training and formulation.prices.micro_batches == 1
        if grows and self._options.memory.activation_checkpointing != "never":
            for nodes in formulation.checkpoint_units:
                yield BackwardPoint(variable=formulation.first_of(nodes), starts_block=True)
