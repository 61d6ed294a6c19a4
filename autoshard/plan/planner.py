"""Planning: graph, mesh and options in, plan out."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from math import isfinite

from autoshard.errors import GraphError
from autoshard.graph import Graph, graph_digest
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.plan.active import ActiveAxes
from autoshard.plan.assemble import Assembly
from autoshard.plan.conflicts import conflict_text, find_conflict
from autoshard.plan.document import (
    PLAN_VERSION,
    Certificate,
    Conflict,
    GraphSummary,
    Plan,
    Provenance,
    Stage,
    count_collectives,
)
from autoshard.plan.formulate import Formulation
from autoshard.plan.options import PlanOptions
from autoshard.plan.pricing import Prices
from autoshard.plan.steering import Steering
from autoshard.solve import CancelToken, Progress, Solution, Status, solve_problem

_DEPENDENCIES = ("autoshard", "highspy", "numpy")


def plan_id(graph: Graph, mesh: Mesh, options: PlanOptions) -> str:
    """The digest under which the plan of this request is kept, 64 hex digits."""
    request = {
        "graph": graph_digest(graph),
        "mesh": mesh_to_json(mesh),
        "options": options.model_dump(mode="json"),
        "plan_version": PLAN_VERSION,
        "autoshard": version("autoshard"),
    }
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def make_plan(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
) -> Plan:
    """Find the cheapest way to run a graph on a mesh.

    Args:
        graph: the normalised program, as `load_graph` gives it.
        mesh: the devices and what communication over them costs.
        options: mode, optimizer, memory budget, limits of the solver.
        on_progress: called with phase, incumbent and bound while the solver runs.
        cancel: an event; setting it stops the solver.

    Returns:
        A plan with its certificate. Where none was found, the same document without
        stages; its status and reason say why.

    Raises:
        GraphError: the graph cannot be planned in the mode asked for.
        OptionError: an option makes no sense.
    """
    options = options or PlanOptions()
    _check_mode(graph, options)
    clock = _Clock()
    with clock.phase("formulate"):
        prices = Prices(mesh, options)
        steering = Steering.of(graph, mesh, options)
        formulation = Formulation(graph, ActiveAxes.of(mesh), prices, steering=steering)
        problem = formulation.problem
    with clock.phase("solve"):
        solution = solve_problem(
            problem,
            time_limit=options.time_limit,
            relative_gap=options.relative_gap,
            seed=options.seed,
            on_progress=on_progress,
            cancel=cancel,
        )
    conflict = None
    if solution.status is Status.INFEASIBLE:
        with clock.phase("find conflict"):
            conflict = find_conflict(formulation, seconds=options.time_limit, cancel=cancel)
    return _document(formulation, solution, conflict, options, clock)


def _check_mode(graph: Graph, options: PlanOptions) -> None:
    if options.mode == "training" and not any(
        graph.values[p.name].requires_grad for p in graph.parameters
    ):
        raise GraphError(
            "the graph has no parameter that requires a gradient, so there is nothing to train; "
            "plan with mode 'inference', or export the model with its parameters"
        )


def _document(
    formulation: Formulation,
    solution: Solution,
    conflict: Conflict | None,
    options: PlanOptions,
    clock: "_Clock",
) -> Plan:
    graph, mesh = formulation.graph, formulation.axes.mesh
    assembly = Assembly(formulation, solution.choice) if solution.choice is not None else None
    stages: tuple[Stage, ...] = (assembly.stage(),) if assembly else ()
    return Plan(
        id=plan_id(graph, mesh, options),
        certificate=_certificate(solution),
        reason="" if assembly else _reason(solution, conflict),
        conflict=conflict,
        graph=GraphSummary(
            digest=graph_digest(graph),
            num_nodes=len(graph.nodes),
            num_parameters=sum(graph.values[p.name].numel for p in graph.parameters),
        ),
        mesh=mesh,
        options=options,
        costs=assembly.costs(stages[0]) if assembly else None,
        memory=assembly.memory() if assembly else None,
        collectives=count_collectives(stages),
        stages=stages,
        provenance=Provenance(
            versions={name: version(name) for name in _DEPENDENCIES},
            wall_time=clock.seconds,
            statistics=_statistics(formulation, solution),
        ),
    )


def _certificate(solution: Solution) -> Certificate:
    found = solution.choice is not None
    return Certificate(
        status=solution.status,
        objective=solution.objective if found else None,
        bound=solution.bound if isfinite(solution.bound) else None,
        gap=solution.gap if isfinite(solution.gap) else None,
    )


def _reason(solution: Solution, conflict: Conflict | None) -> str:
    if conflict is not None:
        return conflict_text(conflict)
    if solution.status is Status.CANCELLED:
        return "planning was cancelled before a plan was found"
    return "the time limit ended before a plan was found; raise time_limit"


def _statistics(formulation: Formulation, solution: Solution) -> dict[str, float]:
    problem = formulation.problem
    sizes = {
        "nodes": float(len(problem.nodes)),
        "edges": float(len(problem.edges)),
        "strategies": float(sum(node.num_strategies for node in problem.nodes)),
    }
    return {**sizes, **solution.statistics}


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 6)
