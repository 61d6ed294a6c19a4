"""Explanation of a plan: the costs of all alternative strategies of one variable."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite

import numpy as np

from autoshard.base.arguments import Seconds, check_arguments
from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.base.limits import LimitReached
from autoshard.base.outcome import SolveStatus
from autoshard.constraints import Constraint, PlanConstraints
from autoshard.errors import OptionError, PlanError
from autoshard.graph import GraphLike, graph_digest, graph_from_json, to_graph
from autoshard.layouts import Layout
from autoshard.ops import Strategy
from autoshard.plan.document import Plan
from autoshard.plan.stage_plans import stage_plan
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.formulation.formulating import formulated, unfinished_reason, work_limits
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.stage_builder import Decisions, decisions_of
from autoshard.planner.formulation.variables import Role, Variable
from autoshard.solve import MinMarginals

_EXACT = 1e-6
"""Relative gap of the plans from which regrets are computed."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Alternative:
    """One strategy of a variable.

    Attributes:
        layouts: the strategy in the syntax of pins: a layout, or `inputs -> outputs`.
        chosen: True if the explained plan has this strategy.
        time: its seconds of compute, or of the optimizer's update; None if forbidden.
        memory: its bytes per device.
        total: seconds of the best plan with this strategy; None if there is no such plan, or if
            the time limit was reached before one was found.
        regret: `total` minus the seconds of the explained plan; None if `total` is None.
        exact: True if `total` is proven optimal; otherwise it is the best that was found.
        override: additional seconds if only this variable of the explained plan is changed; None
            if that is impossible.
        forbidden: labels of the constraints that forbid it.
    """

    layouts: str
    chosen: bool
    time: float | None
    memory: int
    total: float | None
    regret: float | None
    exact: bool
    override: float | None
    forbidden: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All strategies of one variable of a plan.

    Attributes:
        name: name of the node, input or value, or position of the output.
        kind: input, operator, shared (the layout that several consumers share) or output.
        operator: the node's operator; empty for other kinds.
        module: dotted path of the node's module; empty for other kinds.
        objective: seconds of the explained plan; of a pipeline, of all micro-batches of the stage.
        alternatives: the strategies in order of their regret; impossible ones come last.
        stage: number of the pipeline stage, with the layouts of what it receives and sends; None
            for a plan of one stage.
    """

    name: str
    kind: str
    operator: str
    module: str
    objective: float
    alternatives: tuple[Alternative, ...]
    stage: int | None = None


@check_arguments
def explain(
    graph: "GraphLike | None",
    plan: Plan,
    name: str,
    *,
    value: bool = False,
    time_limit: Seconds = 60.0,
) -> Explanation:
    """Compute the cost of every strategy of one variable of a plan.

    In a pipeline, it is the variable of the first stage that has it, and costs are those of this
    stage by itself.

    Args:
        graph: the program that was planned, as for `make_plan`; None for the one in the plan.
        plan: its plan.
        name: a node, an input (by argument or dotted name), a value, or the position of an
            output (`0`).
        value: True if a name that is both a node and a value means the value, that is, the
            layout that its consumers share.
        time_limit: seconds for solving again, which is needed if the memory budget is binding or
            the problem is too large for one pass; after that, totals are not exact.

    Raises:
        PlanError: the document has no plan, or the plan is for another graph.
        OptionError: the name does not exist.
    """
    if not plan.found or plan.certificate.objective is None:
        raise PlanError(f"there is no plan to explain: {plan.reason}")
    known = None if graph is None else to_graph(graph)
    if known is not None and graph_digest(known) != plan.graph.digest:
        raise PlanError("the plan was made for another graph; pass the graph of the plan")
    if plan.pipeline is not None:
        stage = _stage_of(plan, name)
        own, program = stage_plan(plan, stage)
        found = explain(program, own, name, value=value, time_limit=time_limit)
        return replace(found, stage=stage)
    program = graph_from_json(plan.stages[0].program, known=known)
    try:
        limits = work_limits(time_limit)
        formulation = formulated(program, plan.mesh, plan.options, limits, keeps_forbidden=True)
    except LimitReached as reached:
        raise OptionError(unfinished_reason(reached, plan.mesh)) from None
    number = _find(formulation, name, value=value)
    return _Explainer(formulation, plan, number, time_limit).explanation()


def _stage_of(plan: Plan, name: str) -> int:
    """The first stage that has a name; the last one, which has the outputs, if none has it."""
    for number, stage in enumerate(plan.stages):
        program = graph_from_json(stage.program)
        known = {*program.numbers, *program.values}
        known |= {name for i in program.inputs for name in (i.target, *i.aliases)}
        if name in known:
            return number
    return len(plan.stages) - 1


def _find(formulation: Formulation, name: str, *, value: bool) -> int:
    """The index of the variable with a name."""
    graph = formulation.graph
    numbers = {(v.role, v.name): i for i, v in enumerate(formulation.variables)}
    makers = {made: node.name for node in graph.nodes for made in node.outputs}
    candidates = [(Role.OPERATOR, name), (Role.SHARED, name)]
    if value:
        candidates = [(Role.SHARED, name), (Role.OPERATOR, makers.get(name, ""))]
    candidates += [
        (Role.INPUT, i.name) for i in graph.inputs if name in (i.name, i.target, *i.aliases)
    ]
    candidates += [(Role.OPERATOR, makers.get(name, "")), (Role.OUTPUT, name)]
    for candidate in candidates:
        if candidate in numbers:
            return numbers[candidate]
    known = [*(n.name for n in graph.nodes), *(i.target for i in graph.inputs), *graph.values]
    close = ", ".join(get_close_matches(name, list(dict.fromkeys(known)), n=3))
    raise OptionError(
        f"no node, value, input or output is named {name!r}"
        + (f"; did you mean {close}?" if close else "")
    )


class _Explainer:
    """Finds the costs of the strategies of one variable of a plan."""

    def __init__(
        self, formulation: Formulation, plan: Plan, number: int, time_limit: float
    ) -> None:
        assert plan.certificate.objective is not None
        assert plan.costs is not None
        self._formulation = formulation
        self._number = number
        self._variable = formulation.variables[number]
        self._total = plan.costs.total
        self._objective = plan.certificate.objective
        gap = plan.certificate.gap
        self._is_optimal = gap is not None and gap <= _EXACT
        self._options = plan.options.with_values(relative_gap=_EXACT)
        self._deadline = time.perf_counter() + time_limit
        self._decisions = decisions_of(formulation, plan.stages[0])
        self._chosen = int(self._decisions.choice[number])
        self._search = BudgetSearch(formulation, self._options)

    def explanation(self) -> Explanation:
        variable = self._variable
        overrides = [self._override(s) for s in range(len(variable.strategies))]
        totals, exact = self._totals(overrides)
        alternatives = [
            self._alternative(s, float(totals[s]), override, exact=bool(exact[s]))
            for s, override in enumerate(overrides)
        ]
        alternatives.sort(key=lambda a: (a.total is None, a.total or 0.0, not a.chosen))
        node = self._formulation.node_of(variable) if variable.role is Role.OPERATOR else None
        return Explanation(
            name=variable.name,
            kind=variable.role.value,
            operator=node.operator if node else "",
            module=node.module if node else "",
            objective=self._objective,
            alternatives=tuple(alternatives),
        )

    def _alternative(self, s: int, total: float, override: float, *, exact: bool) -> Alternative:
        variable = self._variable
        strategy = variable.strategies[s]
        # Ignore rounding errors of the two sums.
        is_same = abs(total - self._objective) <= _ROUNDING * abs(self._objective)
        choice = (variable.role, variable.name)
        return Alternative(
            layouts=self._text(variable, strategy),
            chosen=s == self._chosen,
            time=_finite(float(variable.time[s])),
            memory=round(sum(float(use[s]) for use in variable.usage.values())),
            total=_finite(total),
            regret=0.0 if is_same else _finite(total - self._objective),
            exact=exact,
            override=_finite(override),
            forbidden=self._formulation.constraints.violated(choice, strategy),
        )

    def _text(self, variable: Variable, strategy: Strategy) -> str:
        """A strategy over the whole mesh, in the syntax of pins."""
        if variable.role is Role.OPERATOR:
            node = self._formulation.node_of(variable)
            inputs = self._widened(node.inputs, strategy.inputs)
            return f"{inputs} -> {self._widened(node.outputs, strategy.outputs)}".strip()
        if variable.role is Role.OUTPUT:
            value = self._formulation.graph.outputs[int(variable.name)].name
            assert value is not None
            return self._widened((value,), strategy.inputs)
        return self._widened((variable.name,), strategy.outputs)

    def _widened(self, values: Iterable[str], layouts: Iterable[Layout]) -> str:
        gradients = self._formulation.gradients
        return " ".join(
            str(self._formulation.axes.widen(layout, differentiable=gradients.exists(value)))
            for value, layout in zip(values, layouts, strict=True)
        )

    def _totals(self, overrides: list[float]) -> tuple[FloatArray, BoolArray]:
        """Seconds of the best plan with each strategy, and True where proven, shape [S] each."""
        marginals = MinMarginals.of(self._formulation.problem, self._number)
        known = self._objective + np.array(overrides)
        exact = np.ones(len(known), dtype=np.bool_)
        least = known if marginals is None else marginals.least
        totals = np.full(len(known), np.inf)
        for s in np.argsort(least, kind="stable").tolist():
            if marginals is not None and (not isfinite(least[s]) or self._fits(marginals, s)):
                totals[s] = least[s]
            elif self._is_optimal and s == self._chosen:
                totals[s] = self._objective
            else:
                total, exact[s] = self._searched(s)
                totals[s] = total if exact[s] else min(total, known[s])
        return totals, exact

    def _fits(self, marginals: MinMarginals, s: int) -> bool:
        """True if the best plan with a strategy, found without the budget, fits the budget."""
        if self._remaining <= 0 or self._search.must_recompute:
            return False
        plan = self._search.build(Decisions(marginals.choice(s)))
        return plan.memory.peak <= self._formulation.prices.memory_budget

    @property
    def _remaining(self) -> float:
        return self._deadline - time.perf_counter()

    def _searched(self, s: int) -> tuple[float, bool]:
        """Seconds of the best plan with a strategy, and True if it is proven optimal."""
        if self._remaining <= 0:
            return float("inf"), False
        formulation, wanted = self._formulation, self._variable.strategies[s]
        choice = self._variable.role.value, self._variable.name
        only = Constraint("the alternative", {choice: lambda strategy: strategy == wanted})
        constraints = PlanConstraints([*formulation.constraints.constraints, only])
        search = BudgetSearch(
            formulation.constrained(constraints), self._options, seconds=self._remaining
        )
        found = search.run(formulation.prices.memory_budget).solution
        return found.objective, found.status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE)

    def _override(self, s: int) -> float:
        """Additional seconds if only this variable of the plan changes; inf if impossible."""
        if s == self._chosen:
            return 0.0
        choice = self._decisions.choice.copy()
        choice[self._number] = s
        if not self._is_possible(choice):
            return float("inf")
        changed = self._search.build(replace(self._decisions, choice=choice))
        if changed.memory.peak > self._formulation.prices.memory_budget:
            return float("inf")
        return changed.costs.total - self._total

    def _is_possible(self, choice: IntArray) -> bool:
        """True if the costs of the variable and of its edges are finite."""
        problem = self._formulation.problem
        around = (e for e in problem.edges if self._number in (e.source, e.target))
        costs = (e.cost[e.rows[choice[e.source]], e.cols[choice[e.target]]] for e in around)
        return isfinite(problem.nodes[self._number].cost[choice[self._number]] + sum(costs))


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
