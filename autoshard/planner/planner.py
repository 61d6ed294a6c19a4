"""`make_stage_plan`: makes a plan of one stage; also the size of the problem."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import isfinite

from autoshard.base.collection import collection_of_new, collection_paused
from autoshard.base.limits import LimitReached
from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.errors import OptionError
from autoshard.graph import RULES_VERSION, Graph, graph_digest
from autoshard.lowering.instructions import summed_collectives
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.ops import has_rule
from autoshard.plan.certificate import with_statement
from autoshard.plan.document import (
    PLAN_VERSION,
    Conflict,
    GraphSummary,
    Plan,
    Provenance,
    RepeatedBlock,
)
from autoshard.plan.options import PlanOptions
from autoshard.plan.predictions import Certificate
from autoshard.plan.problem_size import ProblemSize
from autoshard.plan.stage import Stage
from autoshard.planner.budget.rounds import Outcome
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.conflicts import conflict_text, find_conflict
from autoshard.planner.formulation.formulating import (
    check_mode,
    formulated,
    unfinished_reason,
    work_limits,
)
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory.least_memory import LeastMemory
from autoshard.solve import CancelToken, KeyValueStore, Progress

_DEPENDENCIES = ("autoshard", "highspy", "numpy")
_MAX_SEARCHED_NODES = 500
"""Number of operators up to which the smallest feasible budget is searched, although it is known at
once that no plan fits."""
_LEAST_SHARE = 0.5
"""Share of the time limit that the solver has at least, however long the formulation took."""


@dataclass(frozen=True, slots=True)
class GraphIdentity:
    """All that the id of a plan needs to know of the graph.

    Attributes:
        digest: of the graph, 64 hex digits.
        lacks_rules: true if it has operators without a rule, which may be discovered.
    """

    digest: str
    lacks_rules: bool


def identity_of(graph: Graph) -> GraphIdentity:
    """The identity of a graph with its rules."""
    return GraphIdentity(graph_digest(graph), _lacks_rules(graph))


def plan_id(graph: Graph | GraphIdentity, mesh: Mesh, options: PlanOptions) -> str:
    """The digest that identifies the plan of a request, 64 hex digits.

    It includes the version of torch if rules are discovered by running operators.
    """
    identity = identity_of(graph) if isinstance(graph, Graph) else graph
    discovery = {"torch": torch_version(), "rules_version": RULES_VERSION}
    request = {
        **(discovery if identity.lacks_rules else {}),
        "graph": identity.digest,
        "mesh": mesh_to_json(mesh),
        "options": options.model_dump(mode="json"),
        "plan_version": PLAN_VERSION,
        "autoshard": _version("autoshard"),
    }
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def torch_version() -> str | None:
    """Version of the installed torch, which discovers rules; None if it is not installed."""
    try:
        return _version("torch")
    except PackageNotFoundError:
        return None


@cache
def _version(package: str) -> str:
    """The version of an installed package, whose metadata takes milliseconds to read."""
    return version(package)


def make_stage_plan(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: int | None = None,
    quick: bool = False,
    proves: bool = True,
) -> Plan:
    """Find the fastest way to run a graph as one stage on a mesh.

    Args:
        graph: the normalised program, from `load_graph`.
        mesh: the devices and the links between them.
        options: mode, optimizer, memory budget, limits of the solver.
        on_progress: called with phase, incumbent and bound while the solver runs.
        cancel: an event; setting it stops the solver.
        block_cache: a store of solved blocks, read and written. Only the time of planning and
            `provenance.blocks` depend on it.
        max_strategies: maximum total number of strategies of all variables.
        quick: True for the first plan that fits the memory budget, which is the fastest one if it
            is optimal; if there is none, the reason is not looked for.
        proves: False to leave out the bound of all plans that fit the memory for a quick plan.

    Returns:
        A plan with its certificate. If none was found, a document without stages, whose
        status and reason explain that.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid, or the problem has more than `max_strategies`.
    """
    options = options or PlanOptions()
    seconds: dict[str, float] = {}
    if on_progress is not None:
        on_progress(Progress("formulate", float("inf"), -float("inf"), 0.0))
    check_mode(graph, options)
    least = LeastMemory.of(graph, mesh, options)
    if not least.fits and len(graph.nodes) > _MAX_SEARCHED_NODES:
        return without_memory(graph, mesh, options, least)
    start = time.perf_counter()
    limits = work_limits(options.solver.time_limit, cancel)
    try:
        with _timed(seconds, "formulate"):
            formulation = formulated(graph, mesh, options, limits, max_strategies)
    except LimitReached as reached:
        status = reached.status or SolveStatus.TIMED_OUT
        reason = unfinished_reason(reached, mesh)
        return plan_without_stages(
            graph, mesh, options, reason=reason, status=status, seconds=seconds
        )
    taken = time.perf_counter() - start
    remaining = max(options.solver.time_limit - taken, _LEAST_SHARE * options.solver.time_limit)
    with _timed(seconds, "solve"), collection_of_new():
        search = BudgetSearch(
            formulation,
            options,
            seconds=remaining,
            on_progress=on_progress,
            cancel=cancel,
            block_cache=block_cache,
        )
        outcome = search.run(formulation.prices.memory_budget, quick=quick, proves=quick and proves)
    conflict = None
    if outcome.is_conflict and not quick:
        with _timed(seconds, "find conflict"):
            conflict = find_conflict(formulation, options, cancel=cancel)
    return plan_document(formulation, outcome, conflict, options, seconds)


def stage_problem_size(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    max_strategies: int | None = None,
) -> ProblemSize:
    """The size of the problem of a plan of one stage, without solving it.

    Args:
        graph: the normalised program.
        mesh: the devices and the links between them.
        options: as for `make_plan`.
        max_strategies: as for `make_plan`.

    Raises:
        GraphError: the graph cannot be planned in this mode.
        OptionError: an option is invalid or forbids all strategies of a variable, the problem has
            more than `max_strategies`, or the time limit ended before they were listed.
    """
    options = options or PlanOptions()
    check_mode(graph, options)
    limits = work_limits(options.solver.time_limit)
    try:
        formulation = formulated(graph, mesh, options, limits, max_strategies)
    except LimitReached as reached:
        raise OptionError(unfinished_reason(reached, mesh)) from None
    variables, budget = formulation.variables, formulation.prices.memory_budget
    bound = formulation.min_input_bytes
    return ProblemSize(
        num_nodes=len(variables),
        num_edges=len(formulation.uses),
        num_strategies=sum(len(variable.strategies) for variable in variables),
        memory_bound=bound,
        memory_budget=budget,
        feasible=False if bound > budget else None,
    )


def _lacks_rules(graph: Graph) -> bool:
    return any(
        node.inputs and not has_rule(node.operator) and graph.rule_of(node) is None
        for node in graph.nodes
    )


def without_memory(graph: Graph, mesh: Mesh, options: PlanOptions, least: LeastMemory) -> Plan:
    """The document of a request that needs more than the memory of all devices."""
    conflict = Conflict(
        options=(),
        minimal=True,
        budget=least.budget,
        least_budget=None,
        least_budget_bound=least.least_per_device,
    )
    found = plan_without_stages(
        graph, mesh, options, reason=least.reason, status=SolveStatus.INFEASIBLE, seconds={}
    )
    return found.model_copy(update={"conflict": conflict})


def plan_without_stages(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions,
    *,
    reason: str,
    status: SolveStatus,
    seconds: Mapping[str, float],
) -> Plan:
    """The document that says why there is no plan, if no problem was solved.

    Args:
        graph: the program.
        mesh: the devices.
        options: of the request.
        reason: why there is no plan, and what to change.
        status: infeasible, timed out or cancelled.
        seconds: of each phase.
    """
    return Plan(
        id=plan_id(graph, mesh, options),
        certificate=Certificate(status=status, objective=None, bound=None, gap=None),
        reason=reason,
        graph=GraphSummary.of(graph),
        mesh=mesh,
        options=options,
        costs=None,
        memory=None,
        collectives=(),
        stages=(),
        provenance=provenance(seconds),
    )


def provenance(
    seconds: Mapping[str, float],
    *,
    statistics: Mapping[str, float] | None = None,
    blocks: tuple[RepeatedBlock, ...] = (),
) -> Provenance:
    """Provenance of a plan: installed versions, seconds of each phase, the solver's statistics."""
    return Provenance(
        versions={name: _version(name) for name in _DEPENDENCIES},
        wall_time=dict(seconds),
        statistics=dict(statistics or {}),
        blocks=blocks,
    )


@collection_paused()
def plan_document(
    formulation: Formulation,
    outcome: Outcome,
    conflict: Conflict | None,
    options: PlanOptions,
    seconds: dict[str, float],
) -> Plan:
    """The document of a search's outcome."""
    graph, mesh, plan = formulation.graph, formulation.mesh, outcome.plan
    stages: tuple[Stage, ...] = (plan.stage,) if plan else ()
    return Plan(
        id=plan_id(graph, mesh, options),
        certificate=outcome_certificate(outcome, options, mesh),
        reason="" if plan else _reason(outcome.solution.status, conflict),
        conflict=conflict,
        graph=GraphSummary.of(graph),
        mesh=mesh,
        options=options,
        costs=plan.costs if plan else None,
        memory=plan.memory if plan else None,
        collectives=summed_collectives([plan.lowering] if plan else []),
        stages=stages,
        provenance=provenance(
            seconds,
            statistics={**outcome.sizes, **outcome.solution.statistics},
            blocks=tuple(_blocks(formulation, outcome)),
        ),
    )


def outcome_certificate(outcome: Outcome, options: PlanOptions, mesh: Mesh) -> Certificate:
    """The certificate of a search's outcome."""
    # The solution may have an objective although its plan does not fit the budget.
    solution = outcome.solution
    objective = solution.objective if outcome.plan else None
    bound = solution.bound if isfinite(solution.bound) else None
    gap = None
    if objective is not None and bound is not None:
        gap = relative_gap(objective, bound)
    found = Certificate(status=solution.status, objective=objective, bound=bound, gap=gap)
    return with_statement(found, options, mesh, late=solution.reached_time_limit)


def _reason(status: SolveStatus, conflict: Conflict | None) -> str:
    if conflict is not None:
        return conflict_text(conflict, proven=status is SolveStatus.INFEASIBLE)
    if status is SolveStatus.CANCELLED:
        return "planning was cancelled before a plan was found"
    return "the time limit ended before a plan was found; raise time_limit"


def _blocks(formulation: Formulation, outcome: Outcome) -> Iterator[RepeatedBlock]:
    for block in outcome.solution.blocks:
        numbers = (outcome.variable_of(v) for v in block.nodes)
        variables = (formulation.variables[v] for v in numbers if v >= 0)
        nodes = [variable.name for variable in variables if variable.role is Role.OPERATOR]
        yield RepeatedBlock(
            first=nodes[0],
            num_nodes=len(nodes),
            num_repetitions=block.num_groups,
            key=block.key,
            num_reused=block.num_reused,
            num_solved=block.num_solved,
        )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = round(time.perf_counter() - start, 6)
