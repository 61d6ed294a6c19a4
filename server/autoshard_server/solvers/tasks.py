"""What solver processes do besides making plans; none of it waits for the service."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from threading import Event
from typing import Any

from pydantic import TypeAdapter

from autoshard.errors import PlanError
from autoshard.graph import ArchiveLimits, Graph, graph_from_json, load_graph, rules_from_json
from autoshard.mesh import mesh_from_json, topology_from_json
from autoshard.ops import with_rules
from autoshard.outcome import SolveStatus
from autoshard.plan import Plan, PlanOptions, operator_coverage
from autoshard.planner import (
    Candidate,
    Explanation,
    SearchProgress,
    explain,
    plan_id,
    problem_size,
    search_meshes,
)
from autoshard.solve import KeyValueStore
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.solvers.executor import Solved
from autoshard_server.solvers.results import MeshSearch, SearchedMesh, Validation

UNFINISHED = frozenset({SolveStatus.TIMED_OUT, SolveStatus.CANCELLED})
"""Outcomes that say nothing about the next time."""

_EXPLANATION = TypeAdapter(Explanation)

_SEARCHERS = 1
"""Processes of a search: the service decides how many jobs run at once."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One job, as its process sees it.

    Attributes:
        asked: the work's JSON.
        payload: the bytes that came with it.
        report: called with phase, incumbent, bound and gap.
        cancel: set to stop.
        block_cache: keeps solved blocks for other jobs.
        plans: keeps plan documents under their ids.
        find_rules: gives a graph the rules that this process can find, and says whether there
            was time to try all.
    """

    asked: Mapping[str, Any]
    payload: bytes
    report: Callable[[Mapping[str, Any]], None]
    cancel: Event
    block_cache: KeyValueStore | None
    plans: KeyValueStore | None
    find_rules: Callable[[Graph], tuple[Graph, bool]]


def requested_graph(asked: Mapping[str, Any], payload: bytes) -> Graph:
    """The graph of a job, with the rules that came with the request.

    Raises:
        GraphError: the graph cannot be read, or a rule does not fit it.
    """
    program = load_graph(payload, limits=ArchiveLimits(**asked["limits"]))
    return with_rules(program, rules_from_json(asked["rules"]))


def run_task(task: Assignment) -> Solved:
    """Do what a job asks for.

    Returns:
        the document, and whether it may be kept.

    Raises:
        InputError: it cannot be done as asked.
    """
    document, keep = _RUNNERS[JobKind(task.asked["kind"])](task)
    return Solved(document, keep=keep)


def _validate(task: Assignment) -> tuple[bytes, bool]:
    mesh = mesh_from_json(json.dumps(task.asked["mesh"]))
    options = PlanOptions.model_validate(task.asked["options"])
    task.report({"phase": "formulate"})
    most = task.asked.get("max_strategies")
    # What is refused, and how large it is, follows from the rules that planning would find.
    graph, is_complete = task.find_rules(requested_graph(task.asked, task.payload))
    size = problem_size(graph, mesh, options, max_strategies=most)
    made = Validation(plan_id=task.asked["plan_id"], size=size)
    return made.model_dump_json().encode(), is_complete


def _cover(task: Assignment) -> tuple[bytes, bool]:
    graph, is_complete = task.find_rules(requested_graph(task.asked, task.payload))
    coverage = operator_coverage(graph, axis_sizes=task.asked["axis_sizes"])
    return coverage.model_dump_json().encode(), is_complete


def _explain(task: Assignment) -> tuple[bytes, bool]:
    plan = Plan.from_json(task.payload)
    if not plan.found:
        raise PlanError(f"there is no plan to explain: {plan.reason}")
    graph = graph_from_json(plan.stages[0].program)
    task.report({"phase": "explain"})
    found = explain(
        graph,
        plan,
        task.asked["name"],
        value=task.asked["value"],
        time_limit=task.asked["time_limit"],
    )
    # What time ran out on may come out better where there is more of it.
    is_final = all(alternative.exact for alternative in found.alternatives)
    return _EXPLANATION.dump_json(found), is_final


def _search(task: Assignment) -> tuple[bytes, bool]:
    graph = requested_graph(task.asked, task.payload)
    options = PlanOptions.model_validate(task.asked["options"])
    complete, is_complete = task.find_rules(graph)
    found = search_meshes(
        complete,
        task.asked["num_devices"],
        topology=topology_from_json(json.dumps(task.asked["topology"])),
        options=options,
        max_axes=task.asked["max_axes"],
        num_workers=_SEARCHERS,
        on_progress=lambda progress: task.report(_searched(progress)),
        cancel=task.cancel,
        block_cache=task.block_cache,
        max_strategies=task.asked.get("max_strategies"),
    )
    keep = task.plans if is_complete else None
    ids = [plan_id(graph, candidate.mesh, options) for candidate in found]
    meshes = tuple(_searched_mesh(c, i, keep) for c, i in zip(found, ids, strict=True))
    is_final = all(c.plan is None or _is_final(c.plan) for c in found)
    # Where plans could not be put away, who asks again gets them.
    are_kept = keep is None or all(m.plan_id for m in meshes if not m.error)
    document = MeshSearch(meshes=meshes).model_dump_json().encode()
    return document, is_complete and is_final and are_kept


def _searched(progress: SearchProgress) -> dict[str, Any]:
    best = progress.latest.objective
    return {
        "phase": progress.phase,
        "incumbent": best if isfinite(best) else None,
    }


def _is_final(plan: Plan) -> bool:
    return plan.certificate.status not in UNFINISHED


def _searched_mesh(candidate: Candidate, known: str, keep: KeyValueStore | None) -> SearchedMesh:
    """A mesh of the answer; its plan is kept, so that it can be had under its id."""
    plan = candidate.plan
    if plan is None:
        return SearchedMesh(mesh=candidate.mesh, error=candidate.error)
    is_kept = False
    if keep is not None and _is_final(plan):
        keep.put(known, plan.model_copy(update={"id": known}).to_json().encode())
        # A store in trouble says nothing.
        is_kept = keep.get(known) is not None
    return SearchedMesh(
        mesh=candidate.mesh,
        plan_id=known if is_kept else None,
        certificate=plan.certificate,
        peak_memory=None if plan.memory is None else plan.memory.peak,
        reason=plan.reason,
    )


_RUNNERS: Mapping[JobKind, Callable[[Assignment], tuple[bytes, bool]]] = {
    JobKind.VALIDATION: _validate,
    JobKind.COVERAGE: _cover,
    JobKind.EXPLANATION: _explain,
    JobKind.SEARCH: _search,
}
