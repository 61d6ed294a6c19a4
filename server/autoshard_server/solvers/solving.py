"""The solver process, which runs one job."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from threading import Event
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autoshard.errors import InputError, TooManyStrategiesError
from autoshard.graph import ArchiveLimits, Graph
from autoshard.mesh import Mesh, mesh_from_json, topology_from_json
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import Explanation, plan_id
from autoshard.requests import running
from autoshard.requests.results import JobProgress
from autoshard.solve import KeyValueStore
from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.projects import DEFAULT_PROJECT, stored_namespace
from autoshard_server.settings import Settings
from autoshard_server.solvers.child_program import Report, run_job
from autoshard_server.solvers.messages import Solved, SolverInput
from autoshard_server.store.caches import open_cache
from autoshard_server.store.jobs import JobKind
from autoshard_solver_cache import (
    NamespacedCache,
    StoreUnavailableError,
    open_engine,
)

_log = logging.getLogger(__name__)

BLOCKS = "blocks"
"""Namespace of solved blocks in the cache."""

RULES = "rules"
"""Namespace of discovered rules in the cache."""

_DISCOVERY_SECONDS = 20.0
"""Time limit of rule discovery, for all operators of a program."""

_MAX_STRATEGIES: int = Settings.model_fields["max_strategies"].default
"""For jobs that were submitted to a release without this limit."""

_BUSY_TIMEOUT = 1.0
"""Seconds to wait for another writer; solving without the cache is faster than a longer wait."""

_EXPLANATION = TypeAdapter(Explanation)


@dataclass(frozen=True, slots=True)
class _Task:
    """A job, as it was checked when it was submitted."""

    request: Mapping[str, Any]
    payload: bytes
    report: Report
    cancel: Event
    resources: running.Resources
    plans: KeyValueStore | None

    def graph(self) -> Graph:
        # A parser process has counted the values before the job was submitted.
        limits = ArchiveLimits(**self.request["limits"], values=sys.maxsize)
        return running.load_request_graph(self.payload, self.request["rules"], limits)

    def mesh_and_options(self) -> tuple[Mesh, PlanOptions]:
        """The mesh and options, which were valid for the release that accepted the job."""
        try:
            mesh = mesh_from_json(json.dumps(self.request["mesh"]))
            return mesh, PlanOptions.model_validate(self.request["options"])
        except (InputError, ValidationError) as error:
            raise _other_release() from error

    def report_progress(self, progress: JobProgress) -> None:
        self.report(progress.model_dump(exclude={"elapsed"}))


def solve(
    work: SolverInput,
    on_progress: Report,
    cancel: Event,
    resources: running.Resources | None = None,
    plans: KeyValueStore | None = None,
) -> Solved:
    """Run a job.

    Args:
        work: the job, as it was checked when it was submitted.
        on_progress: called with phase, incumbent, bound and gap; null where not yet known.
        cancel: set it to stop.
        resources: caches that are shared with other jobs; none if left out.
        plans: store of plan documents under their ids, for the plans of a search.

    Raises:
        InputError: the request cannot be planned.
        ServerError: OTHER_RELEASE, if the job was submitted to another release.
    """
    request = json.loads(work.request)
    try:
        # The first release made only plans, and its jobs have no kind.
        kind = JobKind(request.get("kind", JobKind.PLAN))
    except ValueError:
        raise _other_release() from None
    limited = replace(
        resources or running.Resources(),
        discovery_seconds=_DISCOVERY_SECONDS,
        max_strategies=request.get("max_strategies", _MAX_STRATEGIES),
        num_workers=1,
    )
    task = _Task(request, work.graph, on_progress, cancel, limited, plans)
    try:
        document, is_final = _RUNNERS[kind](task)
    except TooManyStrategiesError as error:
        kind_of_problem, limit = ProblemType.OPTIONS, request.get("max_strategies", _MAX_STRATEGIES)
        raise limit_error(kind_of_problem, str(error), "max_strategies", limit) from None
    return Solved(document, cacheable=is_final)


def _plan(task: _Task) -> tuple[bytes, bool]:
    graph = task.graph()
    task.report({"phase": "formulate"})
    mesh, options = task.mesh_and_options()
    if plan_id(graph, mesh, options) != task.request["plan_id"]:
        raise _other_release()
    made, is_final = running.plan(
        graph,
        mesh,
        options,
        task.resources,
        on_progress=task.report_progress,
        cancel=task.cancel,
    )
    return made.to_json().encode(), is_final


def _validate(task: _Task) -> tuple[bytes, bool]:
    mesh, options = task.mesh_and_options()
    graph = task.graph()
    task.report({"phase": "formulate"})
    made, is_final = running.validate(graph, mesh, options, task.resources)
    return made.model_dump_json().encode(), is_final


def _coverage(task: _Task) -> tuple[bytes, bool]:
    graph = task.graph()
    task.report({"phase": "list operators"})
    made, is_final = running.coverage(graph, task.request["axis_sizes"], task.resources)
    return made.model_dump_json().encode(), is_final


def _explain(task: _Task) -> tuple[bytes, bool]:
    made = Plan.from_json(task.payload)
    task.report({"phase": "explain"})
    names = ("name", "value", "time_limit")
    found, is_final = running.explain(made, **{name: task.request[name] for name in names})
    return _EXPLANATION.dump_json(found), is_final


def _search(task: _Task) -> tuple[bytes, bool]:
    plans = task.plans

    def keep(made: Plan, is_final: bool) -> bool:  # noqa: FBT001  as the core calls it
        if plans is None or not is_final:
            return False
        plans.put(made.id, made.to_json().encode())
        # `put` does not raise if the cache fails.
        return plans.get(made.id) is not None

    graph = task.graph()
    task.report({"phase": "plan meshes"})
    found, is_final = running.search(
        graph,
        task.request["num_devices"],
        topology=topology_from_json(json.dumps(task.request["topology"])),
        max_axes=task.request["max_axes"],
        total_time_limit=task.request.get("total_time_limit"),
        options=PlanOptions.model_validate(task.request["options"]),
        resources=task.resources,
        on_progress=task.report_progress,
        cancel=task.cancel,
        keep=None if plans is None else keep,
    )
    return found.model_dump_json().encode(), is_final


_RUNNERS: Mapping[JobKind, Callable[[_Task], tuple[bytes, bool]]] = {
    JobKind.PLAN: _plan,
    JobKind.VALIDATION: _validate,
    JobKind.COVERAGE: _coverage,
    JobKind.EXPLANATION: _explain,
    JobKind.SEARCH: _search,
}


def _other_release() -> ServerError:
    return ServerError(
        ProblemType.OTHER_RELEASE,
        f"the job was submitted to another release than {version('autoshard')}, which runs it; "
        "repeat the request",
    )


def main() -> None:
    """Run the job that arrives on stdin."""
    run_job(_prepare)


def _prepare() -> Callable[[SolverInput, Report], Solved]:
    # Opened before a job arrives, to save time later.
    open_caches = _cache_opener(Settings())
    return lambda work, report: solve(work, report, Event(), *open_caches(work))


_Caches = tuple[running.Resources, KeyValueStore | None]


def _cache_opener(settings: Settings) -> Callable[[SolverInput], _Caches]:
    """Open the service's database; return a function that opens the caches of a job's project.

    They have its solved blocks and rules, and its plans; none if the database is unavailable.
    """
    try:
        engine = open_engine(settings.store_url, busy_timeout=_BUSY_TIMEOUT)
        cache = open_cache(engine, settings)
    except StoreUnavailableError as error:
        _log.warning("solving without the cache: %s", error)
        return lambda _work: (running.Resources(), None)

    def open_caches(work: SolverInput) -> _Caches:
        # Jobs of releases without projects belong to the default one.
        project = json.loads(work.request).get("project", DEFAULT_PROJECT)
        plans, blocks, rules = (
            NamespacedCache(cache, stored_namespace(project, kind))
            for kind in (JobKind.PLAN.namespace, BLOCKS, RULES)
        )
        # The service could not read plans in the memory of this process.
        kept = None if settings.is_in_memory else plans
        return running.Resources(blocks=blocks, rules=rules), kept

    return open_caches


if __name__ == "__main__":
    main()
