"""Search for the fastest plan whose peak memory fits a budget.

The optimization problem counts memory at some time points of a step only, while the timeline of a
finished plan has its true peak. If the peak of a plan exceeds the budget, the time point of the
peak is added to the problem; if the problem cannot model that time point, it is solved again with a
smaller usage limit. Counted memory is a lower bound of the peak, so a bound that is proven with the
budget as the usage limit is valid for every plan that fits.

In training, the best plan without recomputation is made first. If it fits, it is optimal, unless
the options ask for recomputation. If not, what is kept, recomputed, and run once per step is
optimized for its layouts. That takes little time and gives the first plan that fits. Then all is
optimized together.

Rounds are counted, and the solver counts its work. The time limit is the same for all: whatever
runs when it is over ends there, and the search says so.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.collection import collection_paused
from autoshard.costs import Frequency
from autoshard.limits import LimitReached, Limits, limited
from autoshard.outcome import TIME_LIMIT_REACHED, SolveStatus
from autoshard.plan.options import PlanOptions, Recomputing
from autoshard.plan.timeline import timeline
from autoshard.planner.budget_rounds import CountedProblem, Rounds, StagePlan
from autoshard.planner.formulation import Formulation, Role
from autoshard.planner.frequencies import Frequencies, most_savings
from autoshard.planner.memory_problem import MemoryProblem
from autoshard.planner.saved_tensors import SavedTensors
from autoshard.planner.stage_builder import Decisions, StageBuilder
from autoshard.planner.time_points import BackwardPoint
from autoshard.solve import (
    CancelToken,
    KeyValueStore,
    Node,
    Problem,
    Progress,
    Solution,
    WarmStart,
    minimum_usage,
    solve_problem,
    with_equal_groups,
)

_MAX_ROUNDS = 8
_FIRST_ROUNDS = 5
"""Maximum number of rounds with given layouts."""
_FIRST_GAP = 0.01
"""Least relative gap of their solutions."""
_FIRST_SECONDS = 3.0
"""Seconds that are reserved for them, and least time limit of the solves before and with them."""
_MAX_IMPROVEMENTS = 2
"""Maximum number of rounds after the first plan that fits."""
_NEGLIGIBLE = 0.005
"""Maximum total size of the values that are not counted, as a share of the budget."""
_LOOSE_GAP = 6.0
"""Factor by which the relative gap is larger while limits and time points are searched."""
_MIN_SECONDS = 1.0
"""Minimum time limit of a single solve, seconds, even after the deadline."""
_LATE_SECONDS = 30.0
"""Seconds after twice the time limit from which on no problem is formulated any more."""
_ELASTICITIES = (0.4, 3.0)
"""Costs of using the whole budget, relative to the time of a step, for which candidate strategies
are collected."""
_NUM_CANDIDATES = 12
"""Number of candidate strategies per variable and cost of memory."""


@dataclass(frozen=True)
class Outcome:
    """Result of a search.

    Attributes:
        solution: status, objective, bound and statistics; its choice belongs to `problem`.
        problem: the last problem that was solved.
        plan: the best plan that fits; None if none was found.
        variable_of: maps a node of `problem` to the formulation's variable; -1 if it has none.
    """

    solution: Solution
    problem: Problem
    plan: StagePlan | None
    variable_of: Callable[[int], int]

    @property
    def is_conflict(self) -> bool:
        """True if there is no plan because of options or memory, not because of the time limit."""
        exceeds = (
            self.solution.status is SolveStatus.TIMED_OUT and "unfit" in self.solution.statistics
        )
        return self.solution.status is SolveStatus.INFEASIBLE or exceeds


class BudgetSearch:
    """Searches the best plan of a formulation under a memory budget.

    Args:
        formulation: the problem without memory.
        options: limits of the solver, and the options for recomputation.
        seconds: time limit of the search; by default that of the options.
        on_progress: called while the solver runs; the bound is one of all plans that fit.
        cancel: an event; setting it stops the solver.
        block_cache: a store of solved blocks.
        alike: True to consider only plans whose repeated blocks are all alike, for small problems.
        quick: True to return the first plan that fits, with the layouts of the fastest plan
            without recomputation. If every parameter must be re-gathered, other tensors are not.
    """

    def __init__(
        self,
        formulation: Formulation,
        options: PlanOptions,
        *,
        seconds: float | None = None,
        alike: bool = False,
        quick: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
        block_cache: KeyValueStore | None = None,
    ) -> None:
        self._formulation = formulation
        self._options = options
        self._alike = alike
        self._quick = quick
        self._deadline = time.perf_counter() + (seconds or options.time_limit)
        self._on_progress = on_progress
        self._cancel = cancel
        self._block_cache = block_cache
        self._bound = -float("inf")  # of all plans that fit
        self._unlimited = WarmStart()  # for the problem without memory
        self._cut_short = False  # by a time limit, in any solve
        self._first_layouts: IntArray | None = None  # of the first plan that fits
        self.must_recompute = "always" in (
            options.reshard_after_forward,
            options.activation_checkpointing,
        )

    def run(self, memory_budget: int) -> Outcome:
        """Search the fastest plan whose peak is within a budget, in bytes per device."""
        self._bound = -float("inf")
        if self._formulation.min_input_bytes > memory_budget:
            return self._infeasible()
        rounds = Rounds(memory_budget, -float("inf"))
        try:
            # The last solves may begin after the deadline, and so may the problems that they need.
            latest = time.perf_counter() + 2 * self._remaining + _LATE_SECONDS
            with limited(Limits(latest, self._cancel)):
                outcome = self._searched(rounds)
        except LimitReached as reached:
            return self._stopped(rounds, reached)
        if not (self._cut_short or self._is_late):
            return outcome
        statistics = {**outcome.solution.statistics, TIME_LIMIT_REACHED: 1.0}
        return replace(outcome, solution=replace(outcome.solution, statistics=statistics))

    def _stopped(self, rounds: Rounds, reached: LimitReached) -> Outcome:
        """The outcome of a search that was stopped while a problem was formulated."""
        status, infinite = reached.status or SolveStatus.TIMED_OUT, float("inf")
        found = [plan for plan in (rounds.best, rounds.first) if plan is not None]
        if not found:
            solution = Solution(status, None, infinite, rounds.bound, 0.0, {}, ())
            return Outcome(solution, self._formulation.problem, None, lambda v: v)
        solution, plan = min(found, key=lambda pair: pair[1].costs.total)
        solution = self._with_bound(solution, rounds.bound)
        return Outcome(solution, self._formulation.problem, plan, lambda v: v)

    def _searched(self, rounds: Rounds) -> Outcome:
        memory_budget = rounds.budget
        if not self._formulation.prices.training:
            return self._fit(rounds)
        problem = self._formulation.problem
        seconds = max(self._remaining - _FIRST_SECONDS, _FIRST_SECONDS)
        solution = self._solve(problem, warm_start=self._unlimited, seconds=seconds, proves=True)
        plan = None if solution.choice is None else self.build(Decisions(solution.choice))
        rounds.bound = solution.bound
        if self._quick and plan is not None:
            regathering = self._all_regathered(solution)
            if regathering is not None and regathering.memory.peak <= memory_budget:
                solution = replace(solution, objective=regathering.costs.total)
                solution = self._with_bound(solution, rounds.bound)
                return Outcome(solution, problem, regathering, lambda v: v)
        if not self.must_recompute:
            if plan is None or plan.memory.peak <= memory_budget:
                return Outcome(solution, problem, plan, lambda v: v)
            rounds.unlimited = solution, plan
        return self._fit_after_first(rounds, solution)

    def _all_regathered(self, solution: Solution) -> StagePlan | None:
        """The plan that re-gathers every parameter, if the options ask for that and no more."""
        options = self._options
        asked = options.reshard_after_forward, options.activation_checkpointing
        if solution.choice is None or asked[0] != "always" or asked[1] == "always":
            return None
        formulation = self._formulation
        uses = enumerate(formulation.uses)
        regathered = frozenset(i for i, use in uses if use.value in formulation.parameters)
        return self.build(Decisions(solution.choice, regathered=regathered))

    def _fit_after_first(self, rounds: Rounds, unlimited: Solution) -> Outcome:
        """The first plan that fits, or a faster one.

        Args:
            rounds: the initial state.
            unlimited: the solution without memory.
        """
        if unlimited.choice is not None:
            rounds.first = self._first_plan(unlimited, rounds.budget)
        if rounds.first is None:
            return self._fit(rounds)
        solution, plan = rounds.first
        first = Outcome(solution, self._formulation.problem, plan, lambda v: v)
        if self._quick or self._is_late or first.solution.status is SolveStatus.OPTIMAL:
            return first
        return self._faster(self._fit(rounds), first)

    def _first_plan(
        self, unlimited: Solution, memory_budget: int
    ) -> tuple[Solution, StagePlan] | None:
        """A plan that fits with the layouts of the best plan, or of one that is small.

        Args:
            unlimited: the solution without memory.
            memory_budget: bytes per device.
        """
        found = []
        if self._formulation.prices.micro_batches > 1 and not self.must_recompute:
            found.append(self._with_frequencies(unlimited, memory_budget))
        assert unlimited.choice is not None
        layouts = unlimited.choice
        found.append(self._with_layouts(layouts, memory_budget))
        # All strategies of a problem that is not wide take little more time than these layouts.
        tried = self._quick or self._unlimited.strategy_bounds
        for elasticity in _ELASTICITIES if tried else ():
            if any(found):
                break
            priced = self._priced(elasticity * unlimited.objective / memory_budget)
            if priced.choice is not None:
                layouts = priced.choice
                found.append(self._with_layouts(layouts, memory_budget))
        plans = [plan for plan in found if plan is not None]
        if not plans:
            return None
        solution, plan = min(plans, key=lambda pair: pair[1].costs.total)
        solution = self._with_bound(solution, unlimited.bound)
        self._first_layouts = layouts
        # Its blocks are those of the problem without memory, as its layouts.
        return replace(solution, blocks=unlimited.blocks), plan

    def _with_layouts(
        self, strategies: IntArray, memory_budget: int
    ) -> tuple[Solution, StagePlan] | None:
        """A plan that fits with given strategies of all variables; None if none was found."""
        masks = self._only(strategies)
        rounds = Rounds(memory_budget, -float("inf"))
        rounds.add_points(self._block_points())
        for _ in range(_FIRST_ROUNDS):
            if rounds.counted is None:
                rounds.counted = self._count_with(masks, rounds)
            limit = rounds.limits.limit
            limited = replace(rounds.counted.problem, usage_limit=limit)
            solution = self._solve(
                limited,
                gap=max(self._loose_gap, _FIRST_GAP),
                warm_start=rounds.counted.warm_start,
                seconds=max(self._remaining, _FIRST_SECONDS),
            )
            if solution.choice is not None:
                self._record(rounds, rounds.counted, limited, solution)
            elif limit == memory_budget:
                break
            else:
                rounds.limits.record_failure()
            if limit == memory_budget:
                # A bound of the plans with these layouts.
                rounds.bound = max(rounds.bound, solution.bound)
            if rounds.best is not None:
                total = rounds.best[1].costs.total
                if self._is_late or total - rounds.bound <= _FIRST_GAP * total:
                    break
            if rounds.limits.is_over:
                break
        return rounds.best

    def _count_with(self, masks: Sequence[BoolArray], rounds: Rounds) -> CountedProblem:
        """The problem that counts memory, with some strategies of each variable."""
        counted = self._count(self._negligible(rounds.budget), rounds.points)
        return counted.restricted(masks)

    def _with_frequencies(
        self, solution: Solution, memory_budget: int
    ) -> tuple[Solution, StagePlan] | None:
        """The strategies of a solution, with gathers and reductions as often as fits the budget."""
        assert solution.choice is not None
        choice = solution.choice
        plans: dict[tuple[tuple[int, Frequency], ...], StagePlan] = {}

        def fits(frequencies: Frequencies) -> bool:
            plan = self.build(Decisions(choice, frequencies=frequencies))
            plans[tuple(frequencies.items())] = plan
            return plan.memory.peak <= memory_budget

        found = most_savings(self._formulation, choice, fits)
        if found is None:
            return None
        plan = plans[tuple(found.items())]
        objective = plan.costs.total
        return replace(solution, status=SolveStatus.FEASIBLE, objective=objective), plan

    def _infeasible(self) -> Outcome:
        """The outcome for a budget that the inputs alone exceed."""
        infinite = float("inf")
        solution = Solution(SolveStatus.INFEASIBLE, None, infinite, infinite, 0.0, {}, ())
        return Outcome(solution, self._formulation.problem, None, lambda v: v)

    def min_usage_plan(self) -> tuple[float, StagePlan | None]:
        """The minimum counted usage, and the fastest plan with it, whose peak may be larger."""
        counted = self._count(0.0)
        least = self._min_usage(counted.problem)
        if not isfinite(least):
            return least, None
        solution = self._solve(replace(counted.problem, usage_limit=least))
        if solution.choice is None:
            return least, None
        return least, self.build(counted.decisions(solution.choice))

    def min_usage(self) -> float:
        """Lower bound of the peak memory of any plan, bytes; inf if there is no plan."""
        return self._min_usage(self._count(0.0).problem)

    @collection_paused()
    def build(self, decisions: Decisions) -> StagePlan:
        """Build the plan of some decisions, without re-gathers that backward does not need."""
        formulation = self._formulation
        builder = StageBuilder(formulation, decisions)
        stage = builder.stage()
        memory = timeline(
            stage,
            formulation.graph,
            training=formulation.prices.training,
            optimizer=formulation.prices.optimizer,
        )
        if memory.unneeded:
            # Depending on its layout, a view may be a copy, whose source backward does not need.
            # The problem does not model that.
            idle = {
                i
                for i in decisions.regathered
                if formulation.use_key(formulation.uses[i]) in memory.unneeded
            }
            return self.build(replace(decisions, regathered=decisions.regathered - idle))
        return StagePlan(stage, memory.lowering, builder.costs(stage), builder.memory(memory))

    def _negligible(self, memory_budget: int) -> float:
        """Maximum total bytes of the values that are not counted."""
        return 0.0 if self.must_recompute else _NEGLIGIBLE * memory_budget

    def _only(self, strategies: IntArray) -> list[BoolArray]:
        """Masks of given strategies of all variables, shape [S] each."""
        variables = self._formulation.variables
        return [
            np.arange(len(variable.strategies)) == strategy
            for variable, strategy in zip(variables, strategies, strict=True)
        ]

    def _fit(self, rounds: Rounds) -> Outcome:
        """Solve with more and more time points, or lower usage limits, until a plan fits.

        Args:
            rounds: the initial state.
        """
        unlimited = rounds.unlimited
        points = self._peak_points(unlimited[1]) if unlimited else iter(())
        rounds.add_points(chain(points, self._block_points()))
        candidates = self._candidates(rounds)
        bound_of_unlimited = rounds.bound
        relaxed: Solution | None = None  # with the budget itself as the limit
        limited: Problem | None = None
        for _ in range(_MAX_ROUNDS):
            if rounds.counted is None:
                limited = None  # frees its memory
                rounds.counted = self._count(self._negligible(rounds.budget), rounds.points)
                warm_start = rounds.counted.warm_start
                warm_start.unlimited_bound = bound_of_unlimited if unlimited else None
                warm_start.candidates = rounds.counted.nodes_with(candidates) if candidates else []
            limit = rounds.limits.limit
            limited = replace(rounds.counted.problem, usage_limit=limit)
            solution = self._solve(
                limited,
                gap=self._loose_gap,
                warm_start=rounds.counted.warm_start,
                proves=limit == rounds.budget,
            )
            if relaxed is None or limit == rounds.budget:
                relaxed = solution
                rounds.bound = max(rounds.bound, solution.bound)
            if solution.choice is not None:
                self._record(rounds, rounds.counted, limited, solution)
            elif solution is relaxed:
                break
            else:
                rounds.limits.record_failure()
            if rounds.limits.is_over or self._is_over(rounds):
                break
        assert relaxed is not None
        self._polish(rounds)
        return self._outcome(rounds, relaxed)

    def _polish(self, rounds: Rounds) -> None:
        """Solve once more under the best limit and the full gap, if the gap is still open."""
        counted = rounds.counted
        if rounds.best is None or counted is None or self._is_good(rounds):
            return
        limited = replace(counted.problem, usage_limit=rounds.limits.fits)
        proves = rounds.limits.fits == rounds.budget
        solution = self._solve(limited, warm_start=counted.warm_start, proves=proves)
        if proves:
            rounds.bound = max(rounds.bound, solution.bound)
        if solution.choice is not None:
            self._record(rounds, counted, limited, solution)

    def _record(
        self, rounds: Rounds, counted: CountedProblem, limited: Problem, solution: Solution
    ) -> None:
        """Build the plan of a solution; keep it if it fits, else adjust time points or limits."""
        assert solution.choice is not None
        plan = self.build(counted.decisions(solution.choice))
        if plan.memory.peak <= rounds.budget:
            if rounds.best is None or plan.costs.total < rounds.best[0].objective:
                rounds.best = replace(solution, objective=plan.costs.total), plan
        elif rounds.add_points(self._peak_points(plan)):
            return
        rounds.limits.record(limited.peak_usage(solution.choice), plan.memory.peak)

    def _outcome(self, rounds: Rounds, relaxed: Solution) -> Outcome:
        """The result of the search; if no plan fits yet, plans with little memory are tried.

        Args:
            rounds: the final state.
            relaxed: the last solution with the budget as the usage limit.
        """
        has_plan = rounds.best is not None or rounds.first is not None
        if not has_plan and relaxed.status is not SolveStatus.INFEASIBLE:
            fitting = (p for p in self._small_plans() if p and p.memory.peak <= rounds.budget)
            plan = next(fitting, None)
            if plan is not None:
                status = SolveStatus.FEASIBLE
                rounds.best = replace(relaxed, status=status, objective=plan.costs.total), plan
        counted = rounds.counted or self._count(0.0)
        if rounds.best is None:
            without = _without_plan(relaxed, rounds.bound)
            return Outcome(without, counted.problem, None, counted.variable_of)
        solution, plan = rounds.best
        solution = self._with_bound(solution, rounds.bound)
        return Outcome(solution, counted.problem, plan, counted.variable_of)

    def _small_plans(self) -> Iterator[StagePlan | None]:
        """Plans with little memory, regardless of their cost."""
        if self._formulation.prices.training:
            counted = self._count(0.0, recompute_all=True)
            solution = self._solve(counted.problem)
            if solution.choice is not None:
                yield self.build(counted.decisions(solution.choice))
        yield self.min_usage_plan()[1]

    def _count(
        self,
        negligible: float,
        points: Sequence[BackwardPoint] = (),
        *,
        recompute_all: bool = False,
    ) -> CountedProblem:
        """The problem that counts memory as usage.

        Args:
            negligible: maximum total bytes of the small values that are not counted.
            points: time points of backward at which memory is counted.
            recompute_all: True to recompute as much as the options allow.
        """
        formulation = self._formulation
        if not formulation.prices.training:
            return CountedProblem(formulation.problem, Decisions, lambda v: v)

        def allowed(option: Recomputing) -> Recomputing:
            return "always" if recompute_all and option == "auto" else option

        with collection_paused():
            memory = MemoryProblem(
                formulation,
                reshard_after_forward=allowed(self._options.reshard_after_forward),
                activation_checkpointing=allowed(self._options.activation_checkpointing),
                negligible=negligible,
                points=points,
            )
            return CountedProblem(
                memory.problem, memory.decisions, memory.variable_of, memory.nodes_with
            )

    def _min_usage(self, problem: Problem) -> float:
        return minimum_usage(problem, time_limit=self._remaining, cancel=self._cancel)

    def _solve(
        self,
        problem: Problem,
        *,
        gap: float | None = None,
        warm_start: WarmStart | None = None,
        seconds: float | None = None,
        proves: bool = False,
    ) -> Solution:
        """Solve a problem; `proves` if its bound is one of all plans that fit."""

        def report(progress: Progress) -> None:
            if proves:
                self._bound = max(self._bound, progress.bound)
            if self._on_progress is not None:
                self._on_progress(replace(progress, bound=self._bound))

        solution = solve_problem(
            with_equal_groups(problem) if self._alike else problem,
            time_limit=seconds or self._remaining,
            relative_gap=self._options.relative_gap if gap is None else gap,
            seed=self._options.seed,
            on_progress=report,
            cancel=self._cancel,
            solver=self._options.solver,
            block_cache=self._block_cache,
            warm_start=warm_start,
        )
        self._cut_short = self._cut_short or solution.reached_time_limit
        return solution

    @property
    def _remaining(self) -> float:
        return max(self._deadline - time.perf_counter(), _MIN_SECONDS)

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() > self._deadline

    @property
    def _loose_gap(self) -> float:
        return _LOOSE_GAP * self._options.relative_gap

    def _peak_points(self, plan: StagePlan) -> Iterator[BackwardPoint]:
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

    def _block_points(self) -> Iterator[BackwardPoint]:
        """The time points at which the backward of each block that may be checkpointed starts."""
        formulation = self._formulation
        # With several micro-batches, gradients of parameters do not grow during backward.
        grows = formulation.prices.training and formulation.prices.micro_batches == 1
        if grows and self._options.activation_checkpointing != "never":
            for nodes in formulation.checkpoint_units:
                yield BackwardPoint(variable=formulation.first_of(nodes), starts_block=True)

    def _candidates(self, rounds: Rounds) -> list[BoolArray] | None:
        """Masks of promising strategies of each variable, shape [S] each.

        The problem that counts memory is several times larger than the one without. Strategies
        that are good in the latter with a price on memory are mostly good in the former too.
        They only guide the solver: the bound is proven over all strategies.

        Returns:
            None if the solver considers all strategies at first. If the problem without memory has
            so few strategies that the solver considers all of them there, the strategies of its
            best plan.
        """
        formulation, first = self._formulation, self._unlimited.strategy_bounds
        if not formulation.prices.training or rounds.unlimited is None:
            return None
        if self._first_layouts is not None:
            return self._only(self._first_layouts)
        if not first:
            choice = rounds.unlimited[0].choice
            return None if choice is None else self._only(choice)
        masks = [_cheapest(bounds) for bounds in first]
        for elasticity in _ELASTICITIES:
            warm_start = WarmStart()
            self._priced(elasticity * rounds.bound / rounds.budget, warm_start)
            if warm_start.strategy_bounds:
                more = map(_cheapest, warm_start.strategy_bounds)
                masks = [mask | new for mask, new in zip(masks, more, strict=True)]
        return masks

    def _priced(self, cost: float, warm_start: WarmStart | None = None) -> Solution:
        """The solution with a price per byte of memory, and without recomputation."""
        usage = SavedTensors(self._formulation, checkpoints=False, negligible=0.0).bytes_as_made()
        priced = _with_memory_cost(self._formulation.problem, usage, cost)
        return self._solve(priced, gap=self._loose_gap, warm_start=warm_start)

    def _is_over(self, rounds: Rounds) -> bool:
        """True if the search is cancelled, the plan is good enough, or time is up with a plan."""
        if self._cancel is not None and self._cancel.is_set():
            return True
        if self._is_good(rounds):
            return True
        if rounds.best is None:
            return self._is_late and rounds.first is not None
        rounds.num_improvements += 1
        return self._is_late or rounds.num_improvements > _MAX_IMPROVEMENTS

    def _is_good(self, rounds: Rounds) -> bool:
        """True if the best plan that fits has at most the requested gap."""
        plans = (found[1] for found in (rounds.best, rounds.first) if found is not None)
        objective = min((plan.costs.total for plan in plans), default=float("inf"))
        return objective - rounds.bound <= self._options.relative_gap * objective < np.inf

    def _faster(self, one: Outcome, other: Outcome) -> Outcome:
        """The outcome with the faster plan, with the better of both bounds."""
        bound = max(one.solution.bound, other.solution.bound)
        totals = [np.inf if x.plan is None else x.plan.costs.total for x in (one, other)]
        faster = one if totals[0] <= totals[1] else other
        return replace(faster, solution=self._with_bound(faster.solution, bound))

    def _with_bound(self, solution: Solution, bound: float) -> Solution:
        """A solution with another bound and the corresponding status."""
        bound = min(bound, solution.objective)
        close = solution.objective - bound <= self._options.relative_gap * solution.objective
        status = solution.status
        if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            status = SolveStatus.OPTIMAL if close else SolveStatus.FEASIBLE
        return replace(solution, status=status, bound=bound)


def _without_plan(solution: Solution, bound: float) -> Solution:
    """A solution whose plan does not fit, as a result without a choice."""
    if solution.choice is None:
        return solution
    cancelled = solution.status is SolveStatus.CANCELLED
    return replace(
        solution,
        status=SolveStatus.CANCELLED if cancelled else SolveStatus.TIMED_OUT,
        choice=None,
        objective=float("inf"),
        bound=bound,
        statistics={**solution.statistics, "unfit": 1.0},
    )


def _with_memory_cost(problem: Problem, usage: Sequence[FloatArray], cost: float) -> Problem:
    """The problem with a price per byte of usage added to the costs, and no usage."""
    known: dict[tuple[int, int], Node] = {}
    nodes = []
    for node, nbytes in zip(problem.nodes, usage, strict=True):
        key = (id(node.cost), id(nbytes))
        if key not in known:
            known[key] = Node(node.cost + cost * nbytes, np.zeros_like(nbytes))
        nodes.append(known[key])
    return replace(problem, nodes=tuple(nodes))


def _cheapest(bounds: FloatArray) -> BoolArray:
    mask = np.zeros(len(bounds), dtype=np.bool_)
    mask[np.argsort(bounds, kind="stable")[:_NUM_CANDIDATES]] = True
    return mask
