"""The cheapest plan whose peak obeys the memory budget.

A problem counts what choices hold at some moments of a step. The timeline of a finished plan
knows all of them. So a plan is made and looked at. If it does not fit, the moment at which it
takes most is counted too; where a problem cannot count that, the plan is made again with that
much less room. What a problem counts at a moment is there in any case, so with the budget
itself as the limit its bound holds for every plan that fits.

In training, a plan that holds everything that backward needs is tried first. If it fits, it
is also the best of all plans that may compute or reshard something once more.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite

from autoshard.arrays import BoolArray
from autoshard.collection import collection_paused
from autoshard.outcome import SolveStatus
from autoshard.plan.memory.timeline import timeline
from autoshard.plan.options import PlanOptions, Recomputing
from autoshard.planner.formulation.assemble import Assembly
from autoshard.planner.formulation.decisions import Decisions, use_of
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory_budget.candidate_strategies import likely_strategies
from autoshard.planner.memory_budget.checkpoints import Backward
from autoshard.planner.memory_budget.memory_problem import MemoryProblem
from autoshard.planner.memory_budget.search import Counted, Draft, Rounds, without_plan
from autoshard.solve import (
    CancelToken,
    KeyValueStore,
    Problem,
    Progress,
    Solution,
    WarmStart,
    minimum_usage,
    solve_problem,
)

_MOST_ROUNDS = 8
_MOST_BETTER = 2
"""Looks for a cheaper plan once one fits."""
_NEGLIGIBLE = 0.005
"""Share of the budget that small values may take without being counted one by one."""
_LOOSE = 6.0
"""How much larger gaps may be while limits and moments are tried out."""
_LOOK_SHARE = 0.3
"""Share of the time that is left for one look under a limit."""
_LEAST_SECONDS = 1.0
"""What a single look may take even where the time is over."""


@dataclass(frozen=True)
class Outcome:
    """What looking for a plan under a budget came to.

    Attributes:
        solution: status, objective, bound and statistics; the choice is one of `problem`.
        problem: what was solved last.
        plan: the plan that was found, if any.
        variable_of: the formulation's variable that a node of `problem` stands for.
    """

    solution: Solution
    problem: Problem
    plan: Draft | None
    variable_of: Callable[[int], int]

    @property
    def is_conflict(self) -> bool:
        """Whether what is asked for, and not the time, is why there is no plan."""
        unfit = (
            self.solution.status is SolveStatus.TIMED_OUT and "unfit" in self.solution.statistics
        )
        return self.solution.status is SolveStatus.INFEASIBLE or unfit


class Planning:
    """Looks for plans of one formulation.

    Args:
        formulation: what there is to choose from.
        options: limits of the solver, and what may be recomputed.
        seconds: time for all of it; that of the options if None.
        on_progress: called while the solver runs.
        cancel: an event; setting it stops the solver.
        block_cache: keeps solved blocks for other plans.
    """

    def __init__(
        self,
        formulation: Formulation,
        options: PlanOptions,
        *,
        seconds: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: CancelToken | None = None,
        block_cache: KeyValueStore | None = None,
    ) -> None:
        self._formulation = formulation
        self._options = options
        self._deadline = time.perf_counter() + (seconds or options.time_limit)
        self._on_progress = on_progress
        self._cancel = cancel
        self._block_cache = block_cache
        self._warm_start = WarmStart()  # of the problem without a limit

    def within(self, budget: int) -> Outcome:
        """The cheapest plan that fits a budget in bytes per device."""
        if not self._formulation.prices.training or not self._may_hold_everything:
            return self._fit(budget)
        outcome = self._unlimited()
        if outcome.plan is None or outcome.plan.memory.peak <= budget:
            return outcome
        return self._fit(budget, outcome.solution.bound, [outcome.plan])

    @property
    def _may_hold_everything(self) -> bool:
        return "always" not in (
            self._options.reshard_after_forward,
            self._options.activation_checkpointing,
        )

    def _thrifty(self) -> Iterator[Draft | None]:
        """Plans that hold little, whatever they cost."""
        if self._formulation.prices.training:
            counted = self._counted(0.0, everything_again=True)
            solution = self._solve(counted.problem)
            if solution.choice is not None:
                yield self.made(counted.decisions(solution.choice))
        yield self.with_least()

    def with_least(self) -> Draft | None:
        """The plan that holds least, whatever its peak; the cheapest of these."""
        counted = self._counted(0.0)
        least = minimum_usage(counted.problem, time_limit=self._share, cancel=self._cancel)
        if not isfinite(least):
            return None
        solution = self._solve(replace(counted.problem, usage_limit=least))
        return None if solution.choice is None else self.made(counted.decisions(solution.choice))

    def least_usage(self) -> float:
        """Bytes that every plan holds at least at once; inf where there is no plan at all."""
        return minimum_usage(
            self._counted(0.0).problem, time_limit=self._share, cancel=self._cancel
        )

    def _counted(
        self,
        negligible: float,
        backward: Sequence[Backward] = (),
        *,
        everything_again: bool = False,
    ) -> Counted:
        """The problem that counts what choices hold.

        Args:
            negligible: bytes that need not be counted, of small values all together.
            backward: moments of backward at which memory is counted too.
            everything_again: whether everything is recomputed that the options allow.
        """
        plain = self._formulation
        if not plain.prices.training:
            return Counted(plain.problem, Decisions, lambda v: v)
        with collection_paused():
            memory = MemoryProblem(
                plain,
                reshard_after_forward=_most(self._options.reshard_after_forward, everything_again),
                activation_checkpointing=_most(
                    self._options.activation_checkpointing, everything_again
                ),
                negligible=negligible,
                backward=backward,
            )
            return Counted(memory.problem, memory.decisions, memory.variable_of, memory.nodes_with)

    @property
    def _remaining(self) -> float:
        return max(self._deadline - time.perf_counter(), _LEAST_SECONDS)

    @property
    def _share(self) -> float:
        """Seconds for one look of several."""
        return max(_LOOK_SHARE * self._remaining, _LEAST_SECONDS)

    def _unlimited(self) -> Outcome:
        """The cheapest plan that holds everything that backward needs."""
        problem = self._formulation.problem
        solution = self._solve(problem, warm_start=self._warm_start)
        plan = None if solution.choice is None else self.made(Decisions(solution.choice))
        return Outcome(solution, problem, plan, lambda v: v)

    def _solve(
        self, problem: Problem, *, gap: float | None = None, warm_start: WarmStart | None = None
    ) -> Solution:
        # Inference counts nearly all there is, so that the first look is mostly the last.
        several = self._formulation.prices.training and isfinite(problem.usage_limit)
        return solve_problem(
            problem,
            time_limit=self._share if several else self._remaining,
            relative_gap=self._options.relative_gap if gap is None else gap,
            seed=self._options.seed,
            on_progress=self._on_progress,
            cancel=self._cancel,
            block_cache=self._block_cache,
            warm_start=warm_start,
        )

    @collection_paused()
    def made(self, decisions: Decisions) -> Draft:
        """A plan of some decisions, without reshardings again that nothing needs."""
        formulation = self._formulation
        assembly = Assembly(formulation, decisions)
        stage = assembly.stage()
        memory = timeline(
            stage,
            formulation.graph,
            training=formulation.prices.training,
            optimizer=formulation.prices.optimizer,
        )
        if memory.idle:
            # Where a tensor is cut decides whether a view of it is a copy, and then nothing
            # holds what was viewed; choices do not know that.
            arcs = formulation.arcs
            idle = {i for i in decisions.again if use_of(formulation, arcs[i]) in memory.idle}
            return self.made(replace(decisions, again=decisions.again - idle))
        return Draft(stage, assembly.costs(stage), assembly.memory(memory))

    def _fit(
        self, budget: int, known: float = -float("inf"), seen: Sequence[Draft] = ()
    ) -> Outcome:
        """Make plans until one fits, counting more or leaving more room each time.

        Args:
            budget: bytes per device.
            known: a lower bound of every plan's price.
            seen: plans that do not fit.
        """
        rounds = Rounds(budget, known)
        rounds.count(chain(*map(self._moments_of, seen), self._starts_of_blocks()))
        likely = self._likely(budget, known)
        whole: Solution | None = None
        for _ in range(_MOST_ROUNDS):
            if rounds.counted is None:
                rounds.counted = self._counted(self._negligible(budget), rounds.backward)
                rounds.counted.warm_start.unlimited_bound = known if seen else None
                rounds.counted.warm_start.candidates = (
                    rounds.counted.nodes_with(likely) if likely else []
                )
            limit = rounds.search.limit
            limited = replace(rounds.counted.problem, usage_limit=limit)
            gap = _LOOSE * self._options.relative_gap
            solution = self._solve(limited, gap=gap, warm_start=rounds.counted.warm_start)
            if whole is None or limit == budget:
                whole = solution
                rounds.bound = max(rounds.bound, solution.bound)
            if solution.choice is not None:
                self._learn(rounds, solution, limited)
            elif solution is whole:
                break
            else:
                rounds.search.fails()
            if rounds.search.is_over or self._is_over(rounds):
                break
        assert whole is not None
        self._polish(rounds)
        return self._outcome(rounds, whole)

    def _polish(self, rounds: Rounds) -> None:
        """Look once more where the best plan was found, if it is not good enough."""
        if rounds.best is None or rounds.counted is None or self._is_good(rounds):
            return
        limited = replace(rounds.counted.problem, usage_limit=rounds.search.enough)
        solution = self._solve(limited, warm_start=rounds.counted.warm_start)
        if rounds.search.enough == rounds.budget:
            rounds.bound = max(rounds.bound, solution.bound)
        if solution.choice is not None:
            self._learn(rounds, solution, limited)

    def _learn(self, rounds: Rounds, solution: Solution, limited: Problem) -> None:
        """Look at a solution's plan: does it fit, and if not, what was left out."""
        assert rounds.counted is not None
        choice = solution.choice
        assert choice is not None
        plan = self.made(rounds.counted.decisions(choice))
        solution = replace(solution, objective=plan.costs.total)
        if plan.memory.peak <= rounds.budget:
            best = rounds.best
            if best is None or solution.objective < best[0].objective:
                rounds.best = solution, plan
        elif rounds.count(self._moments_of(plan)):
            return
        rounds.search.sees(limited.peak_usage(choice), plan.memory.peak)

    def _outcome(self, rounds: Rounds, whole: Solution) -> Outcome:
        """The best plan that fits; if there is none yet, perhaps the one that holds least.

        Args:
            rounds: what was found.
            whole: the last solution with the budget itself as the limit.
        """
        best = rounds.best
        if best is None and whole.status is not SolveStatus.INFEASIBLE:
            for plan in self._thrifty():
                if plan is not None and plan.memory.peak <= rounds.budget:
                    best = (
                        replace(whole, status=SolveStatus.FEASIBLE, objective=plan.costs.total),
                        plan,
                    )
                    break
        counted = rounds.counted or self._counted(0.0)
        if best is None:
            unfit = without_plan(whole, rounds.bound)
            return Outcome(unfit, counted.problem, None, counted.variable_of)
        graded = self._graded(best[0], rounds.bound)
        return Outcome(graded, counted.problem, best[1], counted.variable_of)

    def _negligible(self, budget: int) -> float:
        """Bytes that need not be counted; what is asked for is done with small values too."""
        return _NEGLIGIBLE * budget if self._may_hold_everything else 0.0

    def _moments_of(self, plan: Draft) -> Iterator[Backward]:
        """What of backward takes most, if the problem can count it."""
        formulation = self._formulation
        if plan.memory.phase not in ("backward", "recompute"):
            return
        for i, variable in enumerate(formulation.variables):
            if (variable.role, variable.name) == (Role.OPERATOR, plan.memory.at):
                instance = formulation.instance_of.get(i)
                if instance is None:
                    yield Backward(i)
                else:
                    yield Backward(formulation.first_of(instance), reaches=True)
        resharded = {c.use for c in plan.stage.reshardings if c.value == plan.memory.at}
        inside = formulation.inside_blocks
        for i, arc in enumerate(formulation.arcs if resharded else ()):
            ends_inside = arc.source in inside or arc.target in inside
            if not ends_inside and use_of(formulation, arc) in resharded:
                yield Backward(arc=i)

    def _likely(self, budget: int, price: float) -> list[BoolArray] | None:
        """Strategies that are likely to be good, of each variable; None where all may be."""
        plain, gap = self._formulation, _LOOSE * self._options.relative_gap
        if not plain.prices.training:
            return None
        return likely_strategies(
            plain,
            self._warm_start,
            lambda problem, warm_start: self._solve(problem, gap=gap, warm_start=warm_start),
            price=price,
            budget=budget,
        )

    def _starts_of_blocks(self) -> Iterator[Backward]:
        """When backward reaches each instance of a block that may be checkpointed."""
        formulation = self._formulation
        if formulation.prices.training and self._options.activation_checkpointing != "never":
            for nodes in dict.fromkeys(formulation.instance_of.values()):
                yield Backward(formulation.first_of(nodes), reaches=True)

    def _is_over(self, rounds: Rounds) -> bool:
        """Whether nothing better is wanted, or there is no time to look for it."""
        if self._cancel is not None and self._cancel.is_set():
            return True
        if rounds.best is None:
            return False
        rounds.num_better += 1
        late = time.perf_counter() > self._deadline
        return late or rounds.num_better > _MOST_BETTER or self._is_good(rounds)

    def _is_good(self, rounds: Rounds) -> bool:
        """Whether a plan that fits is as close to the bound as was asked for."""
        if rounds.best is None:
            return False
        found = rounds.best[0].objective
        return found - rounds.bound <= self._options.relative_gap * found

    def _graded(self, solution: Solution, bound: float) -> Solution:
        """A solution against another bound."""
        bound = min(bound, solution.objective)
        close = solution.objective - bound <= self._options.relative_gap * solution.objective
        status = solution.status
        if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            status = SolveStatus.OPTIMAL if close else SolveStatus.FEASIBLE
        return replace(solution, status=status, bound=bound)


def _most(allowed: Recomputing, everything: bool) -> Recomputing:  # noqa: FBT001  both in one
    """What may be recomputed, or must be as far as it may."""
    return "always" if everything and allowed == "auto" else allowed
