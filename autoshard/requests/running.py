"""Running requests in this process: plan, validate, search, coverage, explain.

The local client and the service's solver process call these functions; the remote client sends the
same requests to a service. Each result has a flag `is_final`: true if the same request would give
the same result. Results of runs that hit a time limit or were cancelled are not final and must not
be cached.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from autoshard import ops, planner, report
from autoshard.base.outcome import SolveStatus, relative_gap
from autoshard.errors import PlanError
from autoshard.graph import ArchiveLimits, Graph, load_graph, rules_from_json
from autoshard.mesh import Mesh, Topology
from autoshard.plan import Plan, PlanOptions
from autoshard.requests.results import JobProgress, MeshSearch, SearchedMesh, Validation

if TYPE_CHECKING:
    from autoshard.solve import CancelToken, KeyValueStore, Progress

ProgressListener = Callable[[JobProgress], None]
"""Called with each progress report of a running request."""

KeepPlan = Callable[[Plan, bool], bool]
"""Stores a plan of a search under its id. The flag is true if the plan is final; returns true if
the plan can now be looked up by its id."""

_UNFINISHED = frozenset({SolveStatus.TIMED_OUT, SolveStatus.CANCELLED})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resources:
    """Caches and limits of the process that runs requests.

    Attributes:
        blocks: cache of solved blocks; None solves every block anew.
        rules: cache of sharding rules that were found by running operators.
        discovery_seconds: time limit for finding rules, for all operators of a graph together.
        max_strategies: largest number of strategies of a problem; None for no limit.
        num_workers: processes that a mesh search plans with.
    """

    blocks: "KeyValueStore | None" = None
    rules: "KeyValueStore | None" = None
    discovery_seconds: float = 30.0
    max_strategies: int | None = None
    num_workers: int = 2


def load_request_graph(
    graph: bytes, rules: Sequence[Mapping[str, Any]], limits: ArchiveLimits | None = None
) -> Graph:
    """Read the graph of a request and add the rules that were sent with it.

    Raises:
        GraphError: the graph cannot be read, or a rule does not fit it.
    """
    return ops.with_rules(load_graph(graph, limits=limits), rules_from_json(rules))


def find_rules(graph: Graph, resources: Resources) -> tuple[Graph, bool]:
    """Add rules for the ATen operators that have none, found by running them on small tensors.

    The model's own operators are never run here. Without torch, operators without a rule stay
    replicated.

    Returns:
        the graph; true if there was time to try all operators.
    """
    if all(
        ops.has_rule(node.operator) for node in graph.nodes if node.operator.startswith("aten.")
    ):
        return graph, True
    if planner.torch_version() is None:
        _log.warning("operators without a rule are replicated: torch is not installed here")
        return graph, True
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    found = discover(
        graph, custom=False, store=resources.rules, time_limit=resources.discovery_seconds
    )
    for finding in found.findings:
        if finding.rule is None:
            _log.warning(
                "%s is replicated, as no rule was found: %s", finding.operator, finding.reason
            )
    return found.graph, found.is_complete


def plan(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions,
    resources: Resources,
    *,
    on_progress: ProgressListener | None = None,
    cancel: "CancelToken | None" = None,
    made: Plan | None = None,
    one_stage: "planner.OneStage | None" = None,
) -> tuple[Plan, bool]:
    """Plan a graph for a mesh.

    The plan's id is that of the request: rules that are found here do not change it.

    Args:
        graph: as `load_request_graph` returned it.
        mesh: to plan for.
        options: of planning.
        resources: caches and limits.
        on_progress: called with the solver's progress.
        cancel: set it to stop with the best plan so far, whose status is then `cancelled`.
        made: the plan of the same request without comparisons, if it is known.
        one_stage: what a pipeline is compared with, in micro-batches of its own.

    Returns:
        the plan; true if it is final.

    Raises:
        InputError: the request cannot be planned.
    """
    found, is_complete = find_rules(graph, resources)
    listener = None if on_progress is None else lambda p: on_progress(_solver_progress(p))
    limits: dict[str, Any] = {
        "on_progress": listener,
        "cancel": cancel,
        "block_cache": resources.blocks,
        "max_strategies": resources.max_strategies,
    }
    if made is None:
        alone = options.with_values(comparisons=False)
        made = planner.make_plan(found, mesh, alone, **limits)
    made = planner.compare_plan(made, found, options, **limits, one_stage=one_stage)
    if cancel is not None and cancel.is_set():
        made = _cut_short(made)
    return _with_id(made, planner.plan_id(graph, mesh, options)), is_complete and _is_final(made)


def validate(
    graph: Graph, mesh: Mesh, options: PlanOptions, resources: Resources
) -> tuple[Validation, bool]:
    """Measure the problem that a request poses, without planning it.

    Returns:
        the plan's id and the problem's size; true if they are final.

    Raises:
        InputError: planning would refuse the request.
    """
    found, is_complete = find_rules(graph, resources)
    size = planner.problem_size(found, mesh, options, max_strategies=resources.max_strategies)
    return Validation(plan_id=planner.plan_id(graph, mesh, options), size=size), is_complete


def coverage(
    graph: Graph, axis_sizes: Collection[int], resources: Resources
) -> "tuple[report.Coverage, bool]":
    """List the operators that can be sharded, and the reasons why others cannot.

    Args:
        graph: as `load_request_graph` returned it.
        axis_sizes: an operator counts as sharded if an axis of one of these sizes can shard it;
            empty for any size.
        resources: caches and limits.

    Returns:
        the coverage; true if it is final.
    """
    found, is_complete = find_rules(graph, resources)
    return report.operator_coverage(found, axis_sizes=axis_sizes), is_complete


def load_planned_graph(graph: bytes, made: Plan) -> Graph:
    """Read a graph and add the rules that its plan was made with.

    Raises:
        GraphError: the graph or the plan's rules cannot be read.
    """
    rules = (rules_from_json(stage.program.get("rules", [])) for stage in made.stages)
    # Several stages may have the same rule.
    distinct = dict.fromkeys(rule for found in rules for rule in found)
    return ops.with_rules(load_graph(graph), [*distinct])


def plan_coverage(graph: bytes, made: Plan) -> "report.Coverage":
    """List the operators that can be sharded, with the time that each takes under a plan.

    Raises:
        GraphError: the graph cannot be read.
        PlanError: the plan is not one of this graph.
    """
    return report.operator_coverage(load_planned_graph(graph, made), made)


def explain(
    made: Plan, name: str, *, value: bool = False, time_limit: float = 60.0
) -> "tuple[planner.Explanation, bool]":
    """Price every alternative of one choice of a plan; as `autoshard.explain`.

    Returns:
        the explanation; true if it is final, because no alternative ran out of time.

    Raises:
        PlanError: planning ended without a plan.
        OptionError: the plan has nothing of that name.
    """
    if not made.found:
        raise PlanError(f"there is no plan to explain: {made.reason}")
    found = planner.explain(None, made, name, value=value, time_limit=time_limit)
    return found, all(alternative.exact for alternative in found.alternatives)


def search(
    graph: Graph,
    num_devices: int,
    *,
    topology: str | Topology | None,
    max_axes: int,
    total_time_limit: float | None = None,
    options: PlanOptions,
    resources: Resources,
    on_progress: ProgressListener | None = None,
    cancel: "CancelToken | None" = None,
    keep: KeepPlan | None = None,
) -> tuple[MeshSearch, bool]:
    """Plan a graph on every mesh of a number of devices.

    Args:
        graph: as `load_request_graph` returned it.
        num_devices: of each mesh.
        topology: a built-in name, or a topology; the default one if None.
        max_axes: largest number of mesh axes.
        total_time_limit: seconds of all meshes together; None for those of the meshes alone.
        options: of planning, the same for all meshes.
        resources: caches and limits.
        on_progress: called after each mesh.
        cancel: set it to stop.
        keep: stores each plan under its id; None stores none.

    Returns:
        the meshes, best first; true if they are final. A mesh has a `plan_id` if `keep` has stored
        its plan.

    Raises:
        InputError: the request cannot be planned.
    """
    started = time.monotonic()
    complete, is_complete = find_rules(graph, resources)

    def report(progress: "planner.SearchProgress") -> None:
        if on_progress is not None:
            best, bound = _finite(progress.best), _finite(progress.bound)
            gap = None if best is None or bound is None else relative_gap(best, min(best, bound))
            elapsed = time.monotonic() - started
            on_progress(
                JobProgress(
                    phase=progress.phase, incumbent=best, bound=bound, gap=gap, elapsed=elapsed
                )
            )

    candidates = planner.search_meshes(
        complete,
        num_devices,
        topology=topology,
        options=options,
        max_axes=max_axes,
        total_time_limit=total_time_limit,
        num_workers=resources.num_workers,
        on_progress=report,
        cancel=cancel,
        block_cache=resources.blocks,
        max_strategies=resources.max_strategies,
    )
    found = []
    for candidate in candidates:
        known = planner.plan_id(graph, candidate.mesh, candidate.options)
        found.append(_searched_mesh(candidate, known, keep, is_complete=is_complete))
    plans = [candidate.plan for candidate in candidates if candidate.plan is not None]
    was_stopped = any(candidate.was_stopped for candidate in candidates)
    is_final = is_complete and not was_stopped and all(_is_final(made) for made in plans)
    # If a plan could not be stored, the result is not final, so the next request searches again.
    are_kept = keep is None or all(mesh.plan_id for mesh in found if not mesh.error)
    search = MeshSearch(
        meshes=tuple(found),
        bound=_finite(planner.search_bound(candidates)),
        statement=planner.search_statement(candidates),
    )
    return search, is_final and are_kept


def _searched_mesh(
    candidate: "planner.MeshCandidate", known: str, keep: KeepPlan | None, *, is_complete: bool
) -> SearchedMesh:
    made = candidate.plan
    if made is None:
        return SearchedMesh(
            mesh=candidate.mesh, error=candidate.error, bound=_finite(candidate.bound)
        )
    is_kept = keep is not None and keep(_with_id(made, known), is_complete and _is_final(made))
    return SearchedMesh(
        mesh=candidate.mesh,
        plan_id=known if is_kept else None,
        certificate=made.certificate,
        peak_memory=None if made.memory is None else made.memory.peak,
        performance=made.performance,
        reason=made.reason,
        bound=_finite(candidate.bound),
    )


def _cut_short(made: Plan) -> Plan:
    """A plan whose making was stopped: unless it is optimal, its status says so."""
    if made.certificate.status is not SolveStatus.FEASIBLE:
        return made
    certificate = made.certificate.model_copy(update={"status": SolveStatus.CANCELLED})
    return made.model_copy(update={"certificate": certificate})


def _is_final(made: Plan) -> bool:
    return made.certificate.status not in _UNFINISHED


def _with_id(made: Plan, known: str) -> Plan:
    return made if made.id == known else made.model_copy(update={"id": known})


def _solver_progress(progress: "Progress") -> JobProgress:
    return JobProgress(
        phase=progress.phase,
        incumbent=_finite(progress.incumbent),
        bound=_finite(progress.bound),
        gap=_finite(progress.gap),
        elapsed=progress.elapsed,
    )


def _finite(figure: float) -> float | None:
    return figure if isfinite(figure) else None
