"""Planning: graph, mesh and options in, plan out."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import isfinite

from autoshard.collection import collection_of_new, collection_paused
from autoshard.errors import GraphError, OptionError
from autoshard.graph import RULES_VERSION, Graph, graph_digest
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.ops import has_rule
from autoshard.outcome import SolveStatus, relative_gap
from autoshard.plan.constraints import plan_constraints
from autoshard.plan.document import (
    PLAN_VERSION,
    Certificate,
    Conflict,
    GraphSummary,
    Plan,
    Provenance,
    RepeatedBlock,
    Stage,
)
from autoshard.plan.gradients import Gradients
from autoshard.plan.memory.counting import count_collectives
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.options import PlanOptions
from autoshard.plan.pricing import Prices
from autoshard.planner.conflicts import conflict_text, find_conflict
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory_budget.planning import Outcome, Planning
from autoshard.solve import CancelToken, KeyValueStore, Progress, Solution

_DEPENDENCIES = ("autoshard", "highspy", "numpy")


def plan_id(graph: Graph, mesh: Mesh, options: PlanOptions) -> str:
    """The digest under which the plan of this request is kept, 64 hex digits.

    Which rules are found for operators that have none depends on what torch makes of them.
    """
    found_by = {"torch": torch_version(), "rules_version": RULES_VERSION}
    request = {
        **(found_by if _lacks_rules(graph) else {}),
        "graph": graph_digest(graph),
        "mesh": mesh_to_json(mesh),
        "options": options.model_dump(mode="json"),
        "plan_version": PLAN_VERSION,
        "autoshard": version("autoshard"),
    }
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def torch_version() -> str | None:
    """Of the torch that finds rules by running operators; None where planning does without it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _lacks_rules(graph: Graph) -> bool:
    return any(
        node.inputs and not has_rule(node.operator) and graph.rule_of(node) is None
        for node in graph.nodes
    )


def make_plan(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    block_cache: KeyValueStore | None = None,
    max_strategies: int | None = None,
) -> Plan:
    """Find the cheapest way to run a graph on a mesh.

    Args:
        graph: the normalised program, as `load_graph` gives it.
        mesh: the devices and what communication over them costs.
        options: mode, optimizer, memory budget, limits of the solver.
        on_progress: called with phase, incumbent and bound while the solver runs.
        cancel: an event; setting it stops the solver.
        block_cache: keeps solved blocks for other plans. What it has is not worked out again;
            `provenance.blocks` says what that was, and nothing else in the plan depends on it.
        max_strategies: of all choices together; a larger problem is refused, not solved.

    Returns:
        A plan with its certificate. Where none was found, the same document without
        stages; its status and reason say why.

    Raises:
        GraphError: the graph cannot be planned in the mode asked for.
        OptionError: an option makes no sense, or the problem is larger than allowed.
    """
    options = options or PlanOptions()
    check_mode(graph, options)
    clock = _Clock()
    with clock.phase("formulate"), collection_paused():
        prices = Prices(mesh, options)
        constraints = plan_constraints(graph, mesh, options)
        formulation = Formulation(graph, NontrivialAxes.of(mesh), prices, constraints=constraints)
        check_size(formulation, max_strategies)
    with clock.phase("solve"), collection_of_new():
        planning = Planning(
            formulation, options, on_progress=on_progress, cancel=cancel, block_cache=block_cache
        )
        outcome = planning.within(prices.memory_budget)
    conflict = None
    if outcome.is_conflict:
        with clock.phase("find conflict"):
            conflict = find_conflict(formulation, options, cancel=cancel)
    return _document(formulation, outcome, conflict, options, clock)


def check_mode(graph: Graph, options: PlanOptions) -> None:
    """Refuse what the mode cannot plan.

    Raises:
        GraphError: nothing to train, or a rule that came with the graph has no backward.
    """
    if options.mode == "training" and not any(
        graph.values[p.name].requires_grad for p in graph.parameters
    ):
        raise GraphError(
            "the graph has no parameter that requires a gradient, so there is nothing to train; "
            "plan with mode 'inference', or export the model with its parameters"
        )
    if options.mode == "training" and graph.rules:
        _check_rules(graph)


def check_size(formulation: Formulation, most: int | None) -> None:
    """Refuse a problem with more strategies than that; None allows any number.

    Raises:
        OptionError: it has more.
    """
    number = sum(len(variable.strategies) for variable in formulation.variables)
    if most is not None and number > most:
        raise OptionError(
            f"the problem has {number:,} strategies, and at most {most:,} are allowed; plan for "
            "fewer axes or a smaller graph"
        )


def _check_rules(graph: Graph) -> None:
    """Rules that came with the graph must hold for gradients where these flow."""
    gradients = Gradients(graph, training=True)
    for node in graph.nodes:
        rule = graph.rule_of(node)
        if rule is not None and not rule.differentiable and gradients.flows(node):
            raise GraphError(
                f"node {node.name!r}: backward needs a gradient of {node.operator}, and none was "
                "found when it was tried; give it one with register_autograd, or plan with mode "
                "'inference'"
            )


@collection_paused()
def _document(
    formulation: Formulation,
    outcome: Outcome,
    conflict: Conflict | None,
    options: PlanOptions,
    clock: "_Clock",
) -> Plan:
    graph, mesh, plan = formulation.graph, formulation.axes.mesh, outcome.plan
    stages: tuple[Stage, ...] = (plan.stage,) if plan else ()
    return Plan(
        id=plan_id(graph, mesh, options),
        certificate=_certificate(outcome),
        reason="" if plan else _reason(outcome.solution, conflict),
        conflict=conflict,
        graph=GraphSummary(
            digest=graph_digest(graph),
            num_nodes=len(graph.nodes),
            num_parameters=sum(graph.values[p.name].numel for p in graph.parameters),
        ),
        mesh=mesh,
        options=options,
        costs=plan.costs if plan else None,
        memory=plan.memory if plan else None,
        collectives=count_collectives(stages, [graph] * len(stages)),
        stages=stages,
        provenance=Provenance(
            versions={name: version(name) for name in _DEPENDENCIES},
            wall_time=clock.seconds,
            statistics=_statistics(outcome),
            blocks=tuple(_blocks(formulation, outcome)),
        ),
    )


def _certificate(outcome: Outcome) -> Certificate:
    # The plan that holds least may be the only one found, and not the solver's own choice.
    solution = outcome.solution
    objective = solution.objective if outcome.plan else None
    bound = solution.bound if isfinite(solution.bound) else None
    gap = None
    if objective is not None and bound is not None:
        gap = relative_gap(objective, bound)
    return Certificate(status=solution.status, objective=objective, bound=bound, gap=gap)


def _reason(solution: Solution, conflict: Conflict | None) -> str:
    if conflict is not None:
        return conflict_text(conflict, proven=solution.status is SolveStatus.INFEASIBLE)
    if solution.status is SolveStatus.CANCELLED:
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


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 6)
