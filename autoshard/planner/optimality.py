"""Check of a plan's certificate: its problem is solved once more, with a plain solver.

The plain solver gets the integer program of the problem as it is formulated. Nothing of the solver
that made the plan is used: no reduction, no table of a repeated block, no bound.
"""

from dataclasses import dataclass, replace
from math import isfinite

from autoshard.base.arguments import Seconds, check_arguments
from autoshard.base.limits import LimitReached
from autoshard.base.outcome import OWN_SOLVER, PLAIN_SOLVER, relative_gap
from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph, GraphLike, graph_digest, graph_from_json, to_graph
from autoshard.plan.certificate import milliseconds, percent
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.plan.stage_plans import stage_plan
from autoshard.planner.budget.rounds import Outcome
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.formulation.formulating import formulated, unfinished_reason, work_limits
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import ProgramSize, ProgramTooLargeError, program_size, with_equal_groups

_GAP = 1e-6
"""Relative gap of the plain solver."""
_ROUNDING = 1e-6
"""Relative difference of two solvers' results that counts as rounding."""


@dataclass(frozen=True, slots=True)
class OptimalityCheck:
    """Result of a plain solver for a plan, beside the plan's certificate.

    Attributes:
        solver: the plain solver.
        is_whole: True if it got the whole problem; False if only that of plans whose repeated
            blocks are all alike, because the whole problem is too large.
        size: of the integer program, without memory.
        whole_size: of the integer program of the whole problem, without memory.
        objective: seconds of the plan.
        certified: lower bound of the plan's certificate, seconds; None if it has none.
        found: seconds of the best plan that the plain solver found; None if it found none.
        bound: lower bound that the plain solver proved; None if it proved none.
        stage: number of the pipeline stage; None for a plan of one stage.
    """

    solver: str
    is_whole: bool
    size: ProgramSize
    whole_size: ProgramSize
    objective: float
    certified: float | None
    found: float | None
    bound: float | None
    stage: int | None = None

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Reasons why plan and plain solver cannot both be right; empty if they can."""
        texts = []
        certified = -float("inf") if self.certified is None else self.certified
        if self.found is not None and self.found < certified - _ROUNDING * self.objective:
            texts.append(
                f"{self._place}{self.solver} found a plan of {milliseconds(self.found)}, but the "
                f"certificate says that none takes less than {milliseconds(certified)}"
            )
        proven = self.bound if self.is_whole else None
        if proven is not None and proven > self.objective * (1 + _ROUNDING):
            texts.append(
                f"{self._place}{self.solver} proved that no plan takes less than "
                f"{milliseconds(proven)}, but this one takes {milliseconds(self.objective)}"
            )
        return tuple(texts)

    @property
    def is_confirmed(self) -> bool:
        """True if the plain solver proved a bound that is as good as the certificate's."""
        if not self.is_whole or self.contradictions or self.bound is None:
            return False
        certified = -float("inf") if self.certified is None else self.certified
        return self.bound >= certified - _ROUNDING * self.objective

    @property
    def statement(self) -> str:
        """Statement of what is proven."""
        if self.contradictions:
            return f"{self._place}the certificate is contradicted."
        if self.is_whole:
            return f"{self._place}{self._whole_statement}"
        found = "found no plan" if self.found is None else f"found one of {_text(self.found)}"
        return (
            f"{self._place}the whole integer program has {self.whole_size}: too many for "
            f"{self.solver}. It got that of the plans whose repeated blocks are all alike "
            f"({self.size}), proved that none of them takes less than {_text(self.bound)}, and "
            f"{found}. This does not contradict the certificate's bound of "
            f"{_text(self.certified)}, and proves nothing about plans whose blocks differ."
        )

    @property
    def _whole_statement(self) -> str:
        if self.bound is None:
            return f"{self.solver} proved no bound in the time limit: nothing is confirmed."
        gap = percent(relative_gap(self.objective, self.bound))
        text = (
            f"{self.solver} got the whole problem as one integer program ({self.size}) and proved "
            f"that no plan takes less than {milliseconds(self.bound)}: this plan, with "
            f"{milliseconds(self.objective)}, is within {gap} of the optimum."
        )
        if self.is_confirmed:
            return f"{text} The certificate is confirmed."
        return (
            f"{text} The certificate's bound of {_text(self.certified)} is higher and not "
            f"confirmed; nothing contradicts it."
        )

    @property
    def _place(self) -> str:
        return "" if self.stage is None else f"stage {self.stage}: "


@check_arguments
def check_optimality(
    plan: Plan,
    graph: "GraphLike | None" = None,
    *,
    solver: str = PLAIN_SOLVER,
    time_limit: Seconds = 600.0,
) -> tuple[OptimalityCheck, ...]:
    """Solve the problem of a plan once more, with a plain solver, and compare it with the plan.

    If the integer program of the whole problem is too large, that of the plans whose repeated
    blocks are all alike is solved.

    Args:
        plan: a plan; of a pipeline, each stage is checked by itself, between the layouts of what it
            receives and sends.
        graph: the program that was planned, as for `make_plan`; None for the one in the plan.
        solver: "ilp" for HiGHS, or the name of a solver of integer programs that cvxpy finds.
        time_limit: seconds of the plain solver, for each stage.

    Returns:
        one check, or one per stage of a pipeline.

    Raises:
        PlanError: the document has no plan, or the plan is for another graph.
        OptionError: the solver is not a plain one or is not installed, or the problem is too large.
    """
    if not plan.found or plan.certificate.objective is None:
        raise PlanError(f"there is no plan to check: {plan.reason}")
    if solver == OWN_SOLVER:
        raise OptionError(
            f"{OWN_SOLVER} is not a plain solver: use {PLAIN_SOLVER}, or one that cvxpy finds"
        )
    known = None if graph is None else to_graph(graph)
    if known is not None and graph_digest(known) != plan.graph.digest:
        raise PlanError("the plan was made for another graph; pass the graph of the plan")
    if plan.pipeline is None:
        program = graph_from_json(plan.stages[0].program, known=known)
        return (_checked(plan, program, solver, time_limit),)
    checks = []
    for number in range(len(plan.stages)):
        own, program = stage_plan(plan, number)
        checks.append(replace(_checked(own, program, solver, time_limit), stage=number))
    return tuple(checks)


def _checked(plan: Plan, program: Graph, solver: str, time_limit: float) -> OptimalityCheck:
    """The check of a plan of one stage."""
    update = {"solver": solver, "relative_gap": _GAP, "time_limit": time_limit}
    options = plan.options.with_values(**update)
    try:
        formulation = formulated(program, plan.mesh, options, work_limits(time_limit))
    except LimitReached as reached:
        raise OptionError(unfinished_reason(reached, plan.mesh)) from None
    outcome, is_whole = _solved(formulation, options)
    whole = formulation.problem
    problem = whole if is_whole else with_equal_groups(whole)
    assert plan.costs is not None
    return OptimalityCheck(
        solver=solver,
        is_whole=is_whole,
        size=program_size(problem),
        whole_size=program_size(whole),
        objective=plan.costs.total,
        certified=plan.certificate.bound,
        found=None if outcome.plan is None else outcome.plan.costs.total,
        bound=outcome.solution.bound if isfinite(outcome.solution.bound) else None,
    )


def _solved(formulation: Formulation, options: PlanOptions) -> tuple[Outcome, bool]:
    """The outcome of a search with the plain solver, and True if it is over all plans."""
    budget = formulation.prices.memory_budget
    try:
        return BudgetSearch(formulation, options).run(budget), True
    except ProgramTooLargeError:
        return BudgetSearch(formulation, options, alike=True).run(budget), False


def _text(seconds: float | None) -> str:
    return "none" if seconds is None else milliseconds(seconds)
