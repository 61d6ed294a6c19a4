"""Why a plan does what it does: every alternative of one choice, with its price."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph, graph_digest
from autoshard.layouts import Layout
from autoshard.ops import Strategy
from autoshard.outcome import SolveStatus
from autoshard.plan.constraints import Constraint, PlanConstraints, plan_constraints
from autoshard.plan.document import Plan
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.pricing import Prices
from autoshard.planner.formulation.decisions import Decisions, decisions_of
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role, Variable
from autoshard.planner.memory_budget.planning import Planning
from autoshard.solve import MinMarginals

_EXACT = 1e-6
"""Relative gap of the plans that a regret is measured with."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Alternative:
    """One strategy of a choice.

    Attributes:
        layouts: the strategy as a pin takes it: a layout, or `inputs -> outputs`.
        chosen: whether the plan has it.
        time: seconds of its own, compute or the optimizer's update; None where forbidden.
        memory: bytes per device that it holds itself.
        total: seconds of the best plan that has it; None where there is none, or where
            the time ended before one was found, and the plan at hand cannot be changed to it.
        regret: seconds that this costs over the plan at hand; None where `total` is.
        exact: whether `total` is proven best; if not, it is the best that was found.
        override: seconds that it costs over the plan at hand if everything else stays as it
            is; None where that is impossible.
        forbidden: the steering options that forbid it.
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
    """Every alternative of one choice of a plan.

    Attributes:
        name: of the node, the input, the value, or the position of the output.
        kind: input, operator, shared (the layout that several consumers share) or output.
        operator: what the node calls; empty for other kinds.
        module: dotted path of the module that the node belongs to; empty for other kinds.
        objective: seconds of the plan at hand.
        alternatives: by regret; those that are impossible last.
    """

    name: str
    kind: str
    operator: str
    module: str
    objective: float
    alternatives: tuple[Alternative, ...]


def explain(
    graph: Graph, plan: Plan, name: str, *, value: bool = False, time_limit: float = 60.0
) -> Explanation:
    """Price every alternative of one choice of a plan.

    Args:
        graph: the program that was planned.
        plan: its plan.
        name: a node, an input (by argument or dotted name), a value, or the position of an
            output (`0`).
        value: whether a name that is both a node and a value means the value: the layout
            that its consumers share.
        time_limit: seconds for plans that must be made anew, because the budget binds or
            the problem is too large for one pass; afterwards totals are not exact.

    Raises:
        PlanError: there is no plan, or it is one of another graph.
        OptionError: nothing has this name.
    """
    if not plan.found or plan.certificate.objective is None:
        raise PlanError(f"there is no plan to explain: {plan.reason}")
    if graph_digest(graph) != plan.graph.digest:
        raise PlanError("the plan was made for another graph; explain it with its own")
    axes = NontrivialAxes.of(plan.mesh)
    formulation = Formulation(
        graph,
        axes,
        Prices(plan.mesh, plan.options),
        constraints=plan_constraints(graph, plan.mesh, plan.options),
    )
    number = _find(formulation, name, value=value)
    return _Explainer(formulation, plan, time_limit).explanation(number)


def _find(formulation: Formulation, name: str, *, value: bool) -> int:
    """Index of the choice that a name means."""
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
        f"{name!r} is no node, value, input or output of the graph"
        + (f"; there is {close}" if close else "")
    )


class _Explainer:
    def __init__(self, formulation: Formulation, plan: Plan, time_limit: float) -> None:
        assert plan.certificate.objective is not None
        assert plan.costs is not None
        self._total = plan.costs.total
        self._formulation = formulation
        self._objective = plan.certificate.objective
        gap = plan.certificate.gap
        self._is_optimal = gap is not None and gap <= _EXACT
        self._problem = formulation.problem
        self._options = plan.options.model_copy(update={"relative_gap": _EXACT})
        self._deadline = time.perf_counter() + time_limit
        self._decisions = decisions_of(formulation, plan.stages[0])
        self._choice = self._decisions.choice
        self._planning = Planning(formulation, self._options)

    def explanation(self, number: int) -> Explanation:
        variable = self._formulation.variables[number]
        totals, exact = self._totals(number)
        alternatives = [
            self._alternative(number, s, total=float(totals[s]), exact=bool(exact[s]))
            for s in range(len(variable.strategies))
        ]
        alternatives.sort(key=lambda a: (a.total is None, a.total or 0.0, not a.chosen))
        nodes = self._formulation.graph.nodes if variable.role is Role.OPERATOR else ()
        node = next((n for n in nodes if n.name == variable.name), None)
        return Explanation(
            name=variable.name,
            kind=variable.role.value,
            operator=node.operator if node else "",
            module=node.module if node else "",
            objective=self._objective,
            alternatives=tuple(alternatives),
        )

    def _alternative(self, number: int, s: int, *, total: float, exact: bool) -> Alternative:
        variable = self._formulation.variables[number]
        strategy = variable.strategies[s]
        place = (variable.role, variable.name)
        return Alternative(
            layouts=self._text(variable, strategy),
            chosen=bool(self._choice[number] == s),
            time=_finite(float(variable.time[s])),
            memory=round(sum(float(use[s]) for use in variable.usage.values())),
            total=_finite(total),
            regret=_finite(self._difference(total)),
            exact=exact,
            override=_finite(self._override(number, s)),
            forbidden=self._formulation.constraints.violated(place, strategy),
        )

    def _difference(self, total: float) -> float:
        """Seconds over the plan at hand, without the rounding of two sums."""
        same = abs(total - self._objective) <= _ROUNDING * abs(self._objective)
        return 0.0 if same else total - self._objective

    def _text(self, variable: Variable, strategy: Strategy) -> str:
        """A strategy over the whole mesh, as a pin takes it."""
        graph = self._formulation.graph
        if variable.role is Role.OPERATOR:
            node = next(n for n in graph.nodes if n.name == variable.name)
            inputs = self._widened(node.inputs, strategy.inputs)
            return f"{inputs} -> {self._widened(node.outputs, strategy.outputs)}".strip()
        if variable.role is Role.OUTPUT:
            value = graph.outputs[int(variable.name)].name
            assert value is not None
            return self._widened((value,), strategy.inputs)
        return self._widened((variable.name,), strategy.outputs)

    def _widened(self, values: Iterable[str], layouts: Iterable[Layout]) -> str:
        gradients = self._formulation.gradients
        return " ".join(
            str(self._formulation.axes.widen(layout, differentiable=gradients.exists(value)))
            for value, layout in zip(values, layouts, strict=True)
        )

    def _totals(self, number: int) -> tuple[FloatArray, BoolArray]:
        """Seconds of the best plan with each strategy, shape [S], and whether that is proven."""
        marginals = MinMarginals.of(self._problem)
        size = self._problem.nodes[number].num_strategies
        exact = np.ones(size, dtype=np.bool_)
        known = np.array([self._objective + self._override(number, s) for s in range(size)])
        least = known if marginals is None else marginals.least[number]
        totals = np.full(size, np.inf)
        for s in np.argsort(least, kind="stable").tolist():
            if marginals is not None and (
                not isfinite(least[s]) or self._fits(marginals, number, s)
            ):
                totals[s] = least[s]
            elif self._is_optimal and s == self._choice[number]:
                totals[s] = self._objective
            else:
                total, exact[s] = self._forced(number, s)
                totals[s] = total if exact[s] else min(total, known[s])
        return totals, exact

    def _fits(self, marginals: MinMarginals, number: int, s: int) -> bool:
        """Whether a best plan with a strategy, made without the budget, obeys it anyway."""
        if self._remaining <= 0 or not self._holds_everything:
            return False
        return self._obeys(Decisions(marginals.choice(number, s)))

    @property
    def _holds_everything(self) -> bool:
        return "always" not in (
            self._options.reshard_after_forward,
            self._options.activation_checkpointing,
        )

    @property
    def _remaining(self) -> float:
        return self._deadline - time.perf_counter()

    def _obeys(self, decisions: Decisions) -> bool:
        peak = self._planning.made(decisions).memory.peak
        return peak <= self._formulation.prices.memory_budget

    def _forced(self, number: int, s: int) -> tuple[float, bool]:
        """Seconds of the best plan with a strategy, and whether that is proven."""
        if self._remaining <= 0:
            return float("inf"), False
        old, variable = self._formulation, self._formulation.variables[number]
        wanted = variable.strategies[s]
        place = variable.role.value, variable.name
        only = Constraint("the alternative", {place: lambda strategy: strategy == wanted})
        constraints = PlanConstraints([*old.constraints.constraints, only])
        formulation = Formulation(old.graph, old.axes, old.prices, constraints=constraints)
        planning = Planning(formulation, self._options, seconds=self._remaining)
        found = planning.within(old.prices.memory_budget).solution
        return found.objective, found.status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE)

    def _override(self, number: int, s: int) -> float:
        """Seconds over the plan at hand if this alone changes."""
        if self._choice[number] == s:
            return 0.0
        new = self._choice.copy()
        new[number] = s
        if not self._is_possible(number, new):
            return float("inf")
        changed = self._planning.made(replace(self._decisions, choice=new))
        if changed.memory.peak > self._formulation.prices.memory_budget:
            return float("inf")
        return changed.costs.total - self._total

    def _is_possible(self, number: int, choice: IntArray) -> bool:
        """Whether a choice breaks no rule around one of its nodes."""
        problem = self._problem
        around = (e for e in problem.edges if number in (e.source, e.target))
        costs = (e.cost[e.rows[choice[e.source]], e.cols[choice[e.target]]] for e in around)
        return isfinite(problem.nodes[number].cost[choice[number]] + sum(costs))


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
