"""`make_stage_plan`: makes a plan of one stage; also the size of the problem."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import isfinite

from autoshard.collection import collection_of_new, collection_paused
from autoshard.errors import GraphError, OptionError
from autoshard.graph import RULES_VERSION, Graph, InputKind, graph_digest
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.ops import has_rule
from autoshard.outcome import SolveStatus, relative_gap
from autoshard.plan.certificate import with_statement
from autoshard.plan.document import (
    PLAN_VERSION,
    Conflict,
    GraphSummary,
    Plan,
    Provenance,
    RepeatedBlock,
    Stage,
)
from autoshard.plan.gradients import Gradients
from autoshard.plan.lowering import count_collectives
from autoshard.plan.options import PlanOptions
from autoshard.plan.predictions import Certificate
from autoshard.plan.problem_size import ProblemSize
from autoshard.planner.budget_search import BudgetSearch, Outcome
from autoshard.planner.conflicts import conflict_text, find_conflict
from autoshard.planner.formulation import Formulation, Role
from autoshard.solve import CancelToken, KeyValueStore, Progress

_DEPENDENCIES = ("autoshard", "highspy", "numpy")


def plan_id(graph: Graph, mesh: Mesh, options: PlanOptions) -> str:
    """The digest that identifies the plan of a request, 64 hex digits.

    It includes the version of torch if rules are discovered by running operators.
    """
    discovery = {"torch": torch_version(), "rules_version": RULES_VERSION}
    request = {
        **(discovery if _lacks_rules(graph) else {}),
        "graph": graph_digest(graph),
        "mesh": mesh_to_json(mesh),
        "options": options.model_dump(mode="json"),
        "plan_version": PLAN_VERSION,
        "autoshard": version("autoshard"),
    }
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def torch_version() -> str | None:
    """Version of the installed torch, which discovers rules; None if it is not installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def make_stage_plan(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: int | None = None,
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
    with _timed(seconds, "formulate"):
        formulation = _formulated(graph, mesh, options, max_strategies)
    with _timed(seconds, "solve"), collection_of_new():
        search = BudgetSearch(
            formulation, options, on_progress=on_progress, cancel=cancel, block_cache=block_cache
        )
        outcome = search.run(formulation.prices.memory_budget)
    conflict = None
    if outcome.is_conflict:
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
        OptionError: an option is invalid or forbids all strategies of a variable, or the problem
            has more than `max_strategies`.
    """
    formulation = _formulated(graph, mesh, options or PlanOptions(), max_strategies)
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


@collection_paused()
def _formulated(
    graph: Graph, mesh: Mesh, options: PlanOptions, max_strategies: int | None
) -> Formulation:
    if options.mode == "training":
        check_trainable(graph)
    elif options.micro_batches > 1:
        raise OptionError(
            "micro_batches is for training, where their gradients are summed; leave it out with "
            "mode 'inference'"
        )
    if options.in_flight > options.micro_batches:
        raise OptionError(
            f"in_flight is {options.in_flight}, but a step has {options.micro_batches} "
            f"micro-batches; give at most as many"
        )
    formulation = Formulation.of(graph, mesh, options)
    check_size(formulation, max_strategies)
    return formulation


def check_size(formulation: Formulation, max_strategies: int | None) -> None:
    """Check that a problem is not larger than allowed.

    Raises:
        OptionError: it has more strategies.
    """
    number = sum(len(variable.strategies) for variable in formulation.variables)
    if max_strategies is not None and number > max_strategies:
        raise OptionError(
            f"the problem has {number:,} strategies, but at most {max_strategies:,} are allowed; "
            "plan for fewer axes or a smaller graph"
        )


def check_trainable(graph: Graph) -> None:
    """Check that a parameter requires a gradient, and that custom rules have a needed backward.

    A part of a program, which receives or sends values, may be without such a parameter.

    Raises:
        GraphError: one of both does not hold.
    """
    is_part = any(i.kind is InputKind.RECEIVED for i in graph.inputs) or any(
        output.sent for output in graph.outputs
    )
    trained = any(graph.values[p.name].requires_grad for p in graph.parameters)
    if not trained and not is_part:
        raise GraphError(
            "the graph has no parameter that requires a gradient, so there is nothing to train; "
            "plan with mode 'inference', or export the model with its parameters"
        )
    if not graph.rules:
        return
    gradients = Gradients(graph, training=True)
    for node in graph.nodes:
        rule = graph.rule_of(node)
        if rule is not None and not rule.differentiable and gradients.flows(node):
            raise GraphError(
                f"node {node.name!r}: backward needs the gradient of {node.operator}, but the "
                "operator has none; register one with register_autograd, or plan with mode "
                "'inference'"
            )


def _lacks_rules(graph: Graph) -> bool:
    return any(
        node.inputs and not has_rule(node.operator) and graph.rule_of(node) is None
        for node in graph.nodes
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
        collectives=count_collectives(stages, [graph] * len(stages)),
        stages=stages,
        provenance=Provenance(
            versions={name: version(name) for name in _DEPENDENCIES},
            wall_time=seconds,
            statistics=_statistics(outcome),
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
    return with_statement(found, options, mesh)


def _reason(status: SolveStatus, conflict: Conflict | None) -> str:
    if conflict is not None:
        return conflict_text(conflict, proven=status is SolveStatus.INFEASIBLE)
    if status is SolveStatus.CANCELLED:
        return "planning was cancelled before a plan was found"
    return "the time limit ended before a plan was found; raise time_limit"


def _statistics(outcome: Outcome) -> dict[str, float]:
    problem = outcome.problem
    sizes = {
        "nodes": float(len(problem.nodes)),
        "edges": float(len(problem.edges)),
        "strategies": float(sum(node.num_strategies for node in problem.nodes)),
    }
    return {**sizes, **outcome.solution.statistics}


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
    yield
    seconds[phase] = round(time.perf_counter() - start, 6)
