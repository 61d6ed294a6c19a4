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
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import isfinite

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.base.limits import LimitReached, Limits, limited
from autoshard.base.outcome import TIME_LIMIT_REACHED, SolveStatus
from autoshard.costs import Frequency
from autoshard.planner.budget.rounds import (
    CountedProblem,
    Exceeding,
    FinishedPlan,
    Outcome,
    Rounds,
    problem_sizes,
)
from autoshard.planner.budget.solver import BudgetSolver
from autoshard.planner.formulation.edge_costs import local_bytes
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.frequencies import Frequencies, most_savings
from autoshard.planner.formulation.saved_tensors import SavedTensors
from autoshard.planner.formulation.stage_builder import Decisions
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory.time_points import BackwardPoint
from autoshard.solve import (
    Problem,
    ProblemNode,
    Solution,
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
_LOOSE_GAP, _MAX_LOOSE_GAP = 6.0, 0.5
"""Factor by which the relative gap is larger while limits and time points are searched, and the gap
up to which it is."""
_LATE_SECONDS = 30.0
"""Seconds after twice the time limit from which on no problem is formulated any more."""
_ELASTICITIES = (0.4, 3.0)
"""Costs of using the whole budget, relative to the time of a step, for which layouts are tried."""


class BudgetSearch(BudgetSolver):
    """Searches the best plan of a formulation under a memory budget; see `BudgetSolver`."""

    def run(
        self,
        memory_budget: int,
        *,
        quick: bool = False,
        proves: bool = False,
        bound: float = -float("inf"),
    ) -> Outcome:
        """Search the fastest plan whose peak is within a budget.

        Args:
            memory_budget: bytes per device.
            quick: True to return the first plan that fits, with the layouts of the fastest plan
                without recomputation, or others where those do not fit.
            proves: True to prove a bound of all plans within the budget for it, at good prices of
                memory; otherwise its bound is that of plans with any memory.
            bound: known lower bound of the time of all plans that fit.
        """
        self.bound = bound
        if self._formulation.min_input_bytes > memory_budget:
            return self._of_variables(Solution(SolveStatus.INFEASIBLE, None, np.inf, np.inf, 0.0))
        rounds = Rounds(memory_budget, bound, quick=quick, proves=proves)
        try:
            # The last solves may begin after the deadline, and so may the problems that they need.
            latest = time.perf_counter() + 2 * self.remaining + _LATE_SECONDS
            with limited(Limits(latest, self._cancel)):
                outcome = self._searched(rounds)
        except LimitReached as reached:
            return self._stopped(rounds, reached)
        if not (self.cut_short or self.is_late):
            return outcome
        statistics = {**outcome.solution.statistics, TIME_LIMIT_REACHED: 1.0}
        return replace(outcome, solution=replace(outcome.solution, statistics=statistics))

    def _stopped(self, rounds: Rounds, reached: LimitReached) -> Outcome:
        """The outcome of a search that was stopped while a problem was formulated."""
        if rounds.best is not None:
            return self._bounded(rounds.best, rounds.bound)
        status = reached.status or SolveStatus.TIMED_OUT
        return self._of_variables(Solution(status, None, np.inf, rounds.bound, 0.0))

    def _of_variables(self, solution: Solution, plan: FinishedPlan | None = None) -> Outcome:
        """An outcome whose nodes are the formulation's variables."""
        return Outcome(solution, problem_sizes(self._formulation.problem), plan, lambda v: v)

    def _searched(self, rounds: Rounds) -> Outcome:
        memory_budget = rounds.budget
        if not self._formulation.prices.training:
            return self._fit(rounds)
        problem = self._formulation.problem
        seconds = max(self.remaining - _FIRST_SECONDS, _FIRST_SECONDS)
        solution = self.solve(problem, warm_start=self._unlimited, seconds=seconds, proves=True)
        plan = None if solution.choice is None else self.build(Decisions(solution.choice))
        # Counting memory only takes choices away, so this bound holds for all plans that fit.
        rounds.bound = max(rounds.bound, solution.bound)
        if not self.must_recompute:
            # Recomputing and gathering again only add time, so no plan is better. Most requests end
            # here.
            if plan is None or plan.memory.peak <= memory_budget:
                return self._of_variables(solution, plan)
            rounds.unlimited = solution, plan
        return self._fit_after_first(rounds, solution)

    def _fit_after_first(self, rounds: Rounds, unlimited: Solution) -> Outcome:
        """The first plan that fits, or a faster one.

        Args:
            rounds: the initial state.
            unlimited: the solution without memory.
        """
        if unlimited.choice is not None:
            rounds.best = self._first_plan(unlimited, rounds)
        if rounds.best is not None:
            is_optimal = rounds.best.solution.status is SolveStatus.OPTIMAL
            if rounds.proves and rounds.layouts is not None and not (self.is_late or is_optimal):
                return self._bounded_within_budget(rounds.best, rounds)
            if rounds.quick or self.is_late or is_optimal:
                return rounds.best
        return self._fit(rounds)

    def _bounded_within_budget(self, outcome: Outcome, rounds: Rounds) -> Outcome:
        """The first plan with a bound of all plans that fit, at good prices of memory."""
        counted = self._prepared(rounds, rounds.bound, self._candidates(rounds))
        limited = counted.problem.with_limit(float(rounds.budget))
        solution = self.solve(limited, warm_start=counted.warm_start, proves=True, bounds_only=True)
        rounds.bound = max(rounds.bound, solution.bound)
        return self._bounded(outcome, rounds.bound)

    def _prepared(
        self, rounds: Rounds, unlimited: float, candidates: list[BoolArray]
    ) -> CountedProblem:
        """The problem that counts memory, with a start of its solver.

        Args:
            rounds: the state, which keeps it.
            unlimited: lower bound of the plans with any memory.
            candidates: masks of the strategies that the solver considers first.
        """
        counted = rounds.counted = self._counted(rounds)
        warm_start = counted.warm_start
        warm_start.unlimited_bound = unlimited if rounds.unlimited else None
        warm_start.candidates = counted.nodes_with(candidates) if candidates else []
        if rounds.common is not None:
            start = counted.completed(rounds.common)
            warm_start.known = [] if start is None else [start]
        return counted

    def _first_plan(self, unlimited: Solution, rounds: Rounds) -> Outcome | None:
        """A plan that fits with the layouts of the best plan, or of one that is small.

        Args:
            unlimited: the solution without memory.
            rounds: the initial state, which gets the layouts.
        """
        memory_budget, same_layouts = rounds.budget, None
        if self._formulation.prices.micro_batches > 1 and not self.must_recompute:
            same_layouts = self._with_frequencies(unlimited, memory_budget)
        elif rounds.quick and self._options.memory.reshard_after_forward == "auto":
            same_layouts = self._regathered(unlimited, memory_budget)
            if same_layouts is not None and _is_first(same_layouts, rounds.bound):
                solution = self._with_bound(same_layouts.solution, rounds.bound)
                return replace(same_layouts, solution=solution)
        assert unlimited.choice is not None
        layouts = unlimited.choice
        peaks = tuple(self.peak_points(rounds.unlimited[1])) if rounds.unlimited else ()
        # Only a search that goes on needs the memory of all strategies.
        is_last = rounds.quick and not rounds.proves
        given = self._with_layouts(layouts, memory_budget, points=peaks, is_last=is_last)
        # All strategies of a problem that is not wide take little more time than these layouts.
        tried = self._unlimited.strategy_bounds
        # Whatever is recomputed, the layouts of the fastest plan may not fit. With a price on
        # memory, others are best, which are smaller; what is kept is then optimized for these.
        for elasticity in _ELASTICITIES if tried else ():
            if same_layouts is not None or given.best is not None:
                break
            priced = self._priced(elasticity * unlimited.objective / memory_budget)
            if priced.choice is not None:
                layouts = priced.choice
                given = self._with_layouts(
                    layouts, memory_budget, points=given.points, is_last=is_last
                )
        outcomes = [outcome for outcome in (same_layouts, given.best) if outcome is not None]
        if not outcomes:
            return None
        first = min(outcomes, key=lambda outcome: outcome.solution.objective)
        rounds.layouts, rounds.common = layouts, given.common
        rounds.add_points(given.points)
        # Its blocks are those of the problem without memory, as its layouts.
        solution = self._with_bound(first.solution, rounds.bound)
        return self._of_variables(replace(solution, blocks=unlimited.blocks), first.plan)

    def _regathered(self, solution: Solution, memory_budget: int) -> Outcome | None:
        """The strategies of a solution, with every parameter gathered again, if that fits."""
        assert solution.choice is not None
        formulation = self._formulation
        uses = enumerate(formulation.uses)
        parameters = frozenset(i for i, use in uses if use.value in formulation.parameters)
        plan = self.build(Decisions(solution.choice, regathered=parameters))
        if plan.memory.peak > memory_budget:
            return None
        feasible = replace(solution, status=SolveStatus.FEASIBLE, objective=plan.costs.total)
        return self._of_variables(feasible, plan)

    def _with_layouts(
        self,
        strategies: IntArray,
        memory_budget: int,
        *,
        points: Sequence[BackwardPoint] = (),
        is_last: bool = False,
    ) -> Rounds:
        """The rounds of a search of a plan that fits with given strategies of all variables.

        Args:
            strategies: strategy index of each variable.
            memory_budget: bytes per device.
            points: time points of backward at which memory is counted from the start.
            is_last: True if no problem with other strategies is solved afterwards.
        """
        masks = self._only(strategies)
        # Rounds of their own: what these solves prove holds for plans with these layouts only.
        rounds = Rounds(memory_budget, -float("inf"))
        rounds.add_points(chain(points, self.block_points()))
        for _ in range(_FIRST_ROUNDS):
            if rounds.counted is None:
                negligible = self.negligible(memory_budget)
                rounds.counted = (
                    self.count_given(strategies, negligible, rounds.points)
                    if is_last
                    else self.count(negligible, rounds.points).restricted(masks)
                )
            solution = self._solve_round(
                rounds,
                gap=max(self._loose_gap, _FIRST_GAP),
                seconds=max(self.remaining, _FIRST_SECONDS),
            )
            if solution is None or rounds.limits.is_over:
                break
            if rounds.best is not None and (self.is_late or _is_first(rounds.best, rounds.bound)):
                break
        return rounds

    def _counted(self, rounds: Rounds) -> CountedProblem:
        """The problem that counts memory at the time points so far."""
        return self.count(self.negligible(rounds.budget), rounds.points)

    def _solve_round(
        self,
        rounds: Rounds,
        *,
        gap: float | None = None,
        seconds: float | None = None,
        proves: bool = False,
    ) -> Solution | None:
        """Solve under the current limit, and record the plan of the solution.

        Args:
            rounds: the state; its bound is raised if the limit is the budget.
            gap: relative gap that may be left; by default that of the options.
            seconds: time limit; by default what remains.
            proves: True if the bound is one of all plans that fit.

        Returns:
            the solution; None if there is none within the budget.
        """
        counted, limit = rounds.counted, rounds.limits.limit
        assert counted is not None
        # A smaller limit, which makes up for what the problem does not count, also excludes plans
        # that fit, so it proves nothing.
        is_budget = limit == rounds.budget
        limited = counted.problem.with_limit(limit)
        solution = self.solve(
            limited,
            gap=gap,
            warm_start=counted.warm_start,
            seconds=seconds,
            proves=proves and is_budget,
        )
        if is_budget:
            rounds.relaxed = solution
            rounds.bound = max(rounds.bound, solution.bound)
        if solution.choice is not None:
            self._record(rounds, counted, limited, solution)
        elif is_budget:
            return None
        else:
            rounds.limits.record_failure()
        return solution

    def _with_frequencies(self, solution: Solution, memory_budget: int) -> Outcome | None:
        """The strategies of a solution, with gathers and reductions as often as fits the budget."""
        assert solution.choice is not None
        choice = solution.choice
        plans: dict[tuple[tuple[int, Frequency], ...], FinishedPlan] = {}

        def fits(frequencies: Frequencies) -> bool:
            plan = self.build(Decisions(choice, frequencies=frequencies))
            plans[tuple(frequencies.items())] = plan
            return plan.memory.peak <= memory_budget

        found = most_savings(self._formulation, choice, fits)
        if found is None:
            return None
        plan = plans[tuple(found.items())]
        objective = plan.costs.total
        feasible = replace(solution, status=SolveStatus.FEASIBLE, objective=objective)
        return self._of_variables(feasible, plan)

    @cached_property
    def min_usage_plan(self) -> tuple[float, FinishedPlan | None]:
        """The minimum counted usage, and a fast plan with it, whose peak may be larger.

        Computed once. If time was short then, usage is an upper bound of the minimum.
        """
        counted = self.count(0.0)
        least = self.least_usage(counted.problem)
        if not isfinite(least):
            return least, None
        solution = self.solve(counted.problem.with_limit(least), gap=self._loose_gap)
        if solution.choice is None:
            return least, None
        return least, self.build(counted.decisions(solution.choice))

    def min_usage(self) -> float:
        """Lower bound of the peak memory of any plan, bytes; inf if there is no plan."""
        return self.least_usage(self.count(0.0).problem)

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
        points = self.peak_points(unlimited[1]) if unlimited else iter(())
        rounds.add_points(chain(points, self.block_points()))
        candidates, bound_of_unlimited = self._candidates(rounds), rounds.bound
        for _ in range(_MAX_ROUNDS):
            if rounds.counted is None:
                if candidates and rounds.exceeding is not None:
                    # With other memory choices, the layouts of the plan that exceeded the
                    # budget may fit.
                    pairs = zip(candidates, self._only(rounds.exceeding.layouts), strict=True)
                    candidates = [one | other for one, other in pairs]
                self._prepared(rounds, bound_of_unlimited, candidates)
            solution = self._solve_round(rounds, gap=self._loose_gap, proves=True)
            if solution is None or rounds.limits.is_over or self._is_over(rounds):
                break
        self.repair(rounds)
        if rounds.fits and rounds.counted is not None and not self._is_good(rounds):
            # Once more with the full gap: for the bound, or under the best limit for the plan.
            assert rounds.best is not None
            assert rounds.relaxed is not None
            objective = rounds.best.solution.objective
            is_bound = self._is_close(objective, rounds.relaxed.objective)
            rounds.limits.limit = float(rounds.budget) if is_bound else rounds.limits.fits
            self._solve_round(rounds, proves=True)
        return self._outcome(rounds)

    def repair(self, rounds: Rounds) -> None:
        """Change what the last plan recomputes, if it is faster than the best and does not fit.

        The time may end with a plan that exceeds the budget by little.
        """
        exceeding, best = rounds.exceeding, rounds.best
        if exceeding is None or self.is_cancelled:
            return
        if best is not None and self._is_close(best.solution.objective, exceeding.cost):
            return
        found = self._with_layouts(exceeding.layouts, rounds.budget, points=rounds.points).best
        if found is None or found.plan is None:
            return
        if best is None or found.solution.objective < best.solution.objective:
            # Its blocks are not those of the problem with all layouts.
            solution = self._with_bound(replace(found.solution, blocks=()), rounds.bound)
            rounds.best = self._of_variables(solution, found.plan)

    def _record(
        self, rounds: Rounds, counted: CountedProblem, limited: Problem, solution: Solution
    ) -> None:
        """Build the plan of a solution; keep it if it fits, else adjust time points or limits."""
        assert solution.choice is not None
        decisions = counted.decisions(solution.choice)
        plan = self.build(decisions)
        if plan.memory.peak <= rounds.budget:
            rounds.fits = True
            priced = replace(solution, objective=plan.costs.total)
            outcome = Outcome(priced, problem_sizes(limited), plan, counted.variable_of)
            rounds.keep(outcome, counted.whole(solution.choice)[: counted.num_common])
        else:
            rounds.exceeding = Exceeding(decisions.choice, plan.costs.total)
            if rounds.add_points(self.peak_points(plan)):
                return
        rounds.limits.record(limited.peak_usage(solution.choice), plan.memory.peak)

    def _outcome(self, rounds: Rounds) -> Outcome:
        """The result of the search; in time, without a plan, that of the least usage is tried."""
        relaxed = rounds.relaxed
        assert relaxed is not None
        is_open = rounds.best is None and relaxed.status is not SolveStatus.INFEASIBLE
        if is_open and not self.is_late:
            plan = self.min_usage_plan[1]
            if plan is not None and plan.memory.peak <= rounds.budget:
                status, objective = SolveStatus.FEASIBLE, plan.costs.total
                solution = replace(relaxed, status=status, objective=objective, blocks=())
                rounds.best = self._of_variables(solution, plan)
        if rounds.best is None:
            # Its blocks have nodes of the problem that counts memory.
            unfit = replace(_without_plan(relaxed, rounds.bound), blocks=())
            return self._of_variables(unfit)
        return self._bounded(rounds.best, rounds.bound)

    @property
    def _loose_gap(self) -> float:
        wanted = self._options.solver.relative_gap
        return max(wanted, min(_LOOSE_GAP * wanted, _MAX_LOOSE_GAP))

    def _candidates(self, rounds: Rounds) -> list[BoolArray]:
        """Masks of strategies of each variable that the solver considers first, shape [S] each.

        They are those of the first plan that fits, or else of the best plan without a limit. They
        only guide the solver: the bound is proven over all strategies.

        Returns:
            no masks if the solver considers all strategies at first.
        """
        if not self._formulation.prices.training or rounds.unlimited is None:
            return []
        layouts = rounds.layouts
        if layouts is None and not self._unlimited.strategy_bounds:
            layouts = rounds.unlimited[0].choice
        return [] if layouts is None else self._only(layouts)

    def _priced(self, cost: float) -> Solution:
        """The solution with a price per byte of memory, and without recomputation."""
        usage = _bytes_as_made(self._formulation)
        priced = _with_memory_cost(self._formulation.problem, usage, cost)
        return self.solve(priced, gap=self._loose_gap)

    def _is_over(self, rounds: Rounds) -> bool:
        """True if the search is cancelled, the plan is good enough, or time is up."""
        if self.is_cancelled or self.is_late or self._is_good(rounds):
            return True
        rounds.num_improvements += rounds.fits
        return rounds.num_improvements > _MAX_IMPROVEMENTS

    def _is_good(self, rounds: Rounds) -> bool:
        """True if the best plan that fits has at most the requested gap."""
        best = rounds.best
        return best is not None and self._is_close(best.solution.objective, rounds.bound)

    def _is_close(self, objective: float, bound: float) -> bool:
        """True if an objective is within the requested gap of a bound."""
        return objective - bound <= self._options.solver.relative_gap * objective

    def _bounded(self, outcome: Outcome, bound: float) -> Outcome:
        return replace(outcome, solution=self._with_bound(outcome.solution, bound))

    def _with_bound(self, solution: Solution, bound: float) -> Solution:
        """A solution with another bound and the corresponding status."""
        bound = min(bound, solution.objective)
        close = self._is_close(solution.objective, bound)
        status = solution.status
        if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            status = SolveStatus.OPTIMAL if close else SolveStatus.FEASIBLE
        return replace(solution, status=status, bound=bound)


def _is_first(outcome: Outcome, bound: float) -> bool:
    """True if a plan is good enough to be the first one."""
    objective = outcome.solution.objective
    return objective - bound <= _FIRST_GAP * objective


def _bytes_as_made(formulation: Formulation) -> list[FloatArray]:
    """Bytes until backward if tensors are saved in the layouts of their producers.

    Those of operators are counted for all micro-batches in flight.

    Returns:
        An array of shape [S] for each variable of the formulation.
    """
    graph, in_flight = formulation.graph, formulation.prices.in_flight
    saved = SavedTensors(formulation.prices, formulation.blocks)
    known: dict[tuple[int, bool], FloatArray] = {}
    found = []
    for variable in formulation.variables:
        values: tuple[str, ...] = ()
        if variable.role is Role.OPERATOR:
            number = graph.numbers[variable.name]
            values = () if saved.is_view[number] else graph.nodes[number].outputs
        needed = not saved.needed_in_backward.isdisjoint(values)
        key = (id(variable.strategies), needed)
        if key not in known:
            made = (
                local_bytes(
                    graph.values[value],
                    (s.outputs[i] for s in variable.strategies),
                    formulation.axes.sizes,
                )
                for i, value in enumerate(values)
            )
            counted = made if needed else variable.usage.values()
            nbytes = sum(counted, np.zeros(len(variable.strategies)))
            known[key] = in_flight * nbytes if variable.role is Role.OPERATOR else nbytes
        found.append(known[key])
    return found


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
    known: dict[tuple[int, int], ProblemNode] = {}
    nodes = []
    for node, nbytes in zip(problem.nodes, usage, strict=True):
        key = (id(node.cost), id(nbytes))
        if key not in known:
            known[key] = ProblemNode(node.cost + cost * nbytes, np.zeros_like(nbytes))
        nodes.append(known[key])
    return replace(problem, nodes=tuple(nodes))
