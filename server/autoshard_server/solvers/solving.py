"""The solver process: reads its work from stdin, answers on stdout, and solves once.

It ends when the service does: whoever waits for its answer holds the other end of stdin.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from math import isfinite
from threading import Event, Thread
from typing import IO, Any

from pydantic import ValidationError

from autoshard.errors import InputError
from autoshard.graph import Graph
from autoshard.mesh import Mesh, mesh_from_json
from autoshard.ops import has_rule
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan, plan_id, torch_version
from autoshard.solve import KeyValueStore, Progress
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.problems import (
    INTERNAL,
    OTHER_RELEASE,
    ServerError,
    problem_of,
    problem_type_of,
)
from autoshard_server.settings import Settings
from autoshard_server.solvers.executor import Solved, Work
from autoshard_server.solvers.frames import FrameKind, read_frame, write_frame
from autoshard_server.solvers.tasks import UNFINISHED, Assignment, requested_graph, run_task
from autoshard_solver_cache import NamespacedCache, SolverCache, StoreUnavailableError, open_engine

_log = logging.getLogger(__name__)


BLOCKS = "blocks"
"""Namespace of solved blocks in the cache."""

RULES = "rules"
"""Namespace of rules that were found, in the cache."""

_DISCOVERY_SECONDS = 20.0
"""For all operators of a program."""

_MOST_STRATEGIES: int = Settings.model_fields["max_strategies"].default
"""For jobs whose release knew no limit."""

_BUSY_TIMEOUT = 1.0
"""Seconds to wait for another writer: then solving without the cache is quicker."""


def solve(
    work: Work,
    on_progress: Callable[[Mapping[str, Any]], None],
    cancel: Event,
    block_cache: KeyValueStore | None = None,
    rules: KeyValueStore | None = None,
    *,
    plans: KeyValueStore | None = None,
) -> Solved:
    """Do a job: make its plan, or what else its request asks for.

    Args:
        work: the request and the graph, as they were checked when they arrived.
        on_progress: called with phase, incumbent, bound and gap; null where not yet known.
        cancel: set it to stop.
        block_cache: keeps solved blocks for other jobs.
        rules: keeps rules that were found for other jobs.
        plans: keeps plans that a search makes.

    Raises:
        InputError: the graph cannot be planned as asked.
        ServerError: OTHER_RELEASE, where this release would have asked something else.
    """
    request = json.loads(work.request)
    if _kind(request) is not JobKind.PLAN:
        find_rules = partial(_with_found_rules, store=rules)
        assigned = Assignment(
            request, work.graph, on_progress, cancel, block_cache, plans, find_rules
        )
        return run_task(assigned)
    graph = requested_graph(request, work.graph)
    mesh, options = _mesh_and_options(request)
    asked = plan_id(graph, mesh, options)
    if asked != request["plan_id"]:
        raise _other_release()
    found, is_complete = _with_found_rules(graph, rules)
    plan = make_plan(
        found,
        mesh,
        options,
        on_progress=lambda progress: on_progress(_report(progress)),
        cancel=cancel,
        block_cache=block_cache,
        max_strategies=request.get("max_strategies", _MOST_STRATEGIES),
    )
    # What we find ourselves follows from the request, and so does not change its id.
    plan = plan if plan.id == asked else plan.model_copy(update={"id": asked})
    is_final = is_complete and plan.certificate.status not in UNFINISHED
    return Solved(plan.to_json().encode(), keep=is_final)


def _kind(request: Mapping[str, Any]) -> JobKind:
    try:
        # The first release made plans only, and did not say so.
        return JobKind(request.get("kind", JobKind.PLAN))
    except ValueError:
        raise _other_release() from None


def _mesh_and_options(request: Mapping[str, Any]) -> tuple[Mesh, PlanOptions]:
    """What to plan for: the service has checked it, so what cannot be read is not of ours."""
    try:
        mesh = mesh_from_json(json.dumps(request["mesh"]))
        return mesh, PlanOptions.model_validate(request["options"])
    except (InputError, ValidationError) as error:
        raise _other_release() from error


def _other_release() -> ServerError:
    return ServerError(
        OTHER_RELEASE,
        f"the job was asked of another release than {version('autoshard')}, which was to run it; "
        "ask again",
    )


def _with_found_rules(graph: Graph, store: KeyValueStore | None) -> tuple[Graph, bool]:
    """The program with rules for operators of ATen that have none; no others run here.

    Without torch they stay as they are: their work is done whole, by every rank.

    Returns:
        it, and whether there was time to try all of them.
    """
    if all(has_rule(node.operator) for node in graph.nodes if node.operator.startswith("aten.")):
        return graph, True
    if torch_version() is None:
        _log.warning("operators without a rule run whole: torch is not installed here")
        return graph, True
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    found = discover(graph, custom=False, store=store, time_limit=_DISCOVERY_SECONDS)
    return found.graph, found.is_complete


def _report(progress: Progress) -> dict[str, Any]:
    figures = {
        "incumbent": progress.incumbent,
        "bound": progress.bound,
        "gap": progress.gap,
    }
    known = {name: value if isfinite(value) else None for name, value in figures.items()}
    return {"phase": progress.phase, **known}


def main() -> None:
    """Solve what arrives on stdin."""
    source = sys.stdin.buffer
    answers = _claim_stdout()
    # Opened before there is work, as everything is imported before.
    block_cache, rules, plans = _open_caches(Settings())
    with suppress(OSError):
        # Where nobody is there any more, the end of stdin says so.
        write_frame(answers, FrameKind.READY, b"")
    request, graph = _expect(source, FrameKind.WORK), _expect(source, FrameKind.GRAPH)
    Thread(target=_end_with_service, daemon=True).start()

    def report(progress: Mapping[str, Any]) -> None:
        write_frame(answers, FrameKind.PROGRESS, json.dumps(progress).encode())

    try:
        solved = solve(
            Work(request.decode(), graph), report, Event(), block_cache, rules, plans=plans
        )
    except Exception as error:  # noqa: BLE001  whatever it is becomes the answer
        if problem_type_of(error) is INTERNAL:
            _log.exception("solving failed")
        write_frame(answers, FrameKind.PROBLEM, json.dumps(problem_of(error)).encode())
        return
    kind = FrameKind.PLAN if solved.keep else FrameKind.UNFINISHED
    write_frame(answers, kind, solved.plan)


def _open_caches(
    settings: Settings,
) -> tuple[NamespacedCache | None, NamespacedCache | None, NamespacedCache | None]:
    """Solved blocks, found rules and plans in the service's cache; None where it is not there."""
    try:
        engine = open_engine(settings.store_url, busy_timeout=_BUSY_TIMEOUT)
        cache = SolverCache(engine, max_bytes=settings.cache_max_bytes)
    except StoreUnavailableError as error:
        _log.warning("solving without the cache: %s", error)
        return None, None, None
    plans = None if settings.is_in_memory else NamespacedCache(cache, JobKind.PLAN.namespace)
    return NamespacedCache(cache, BLOCKS), NamespacedCache(cache, RULES), plans


def _claim_stdout() -> IO[bytes]:
    """Keep stdout for answers: whatever else is printed, by C libraries too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _expect(source: IO[bytes], kind: FrameKind) -> bytes:
    frame = read_frame(source)
    if frame is None:
        # The service had no work for us before it ended.
        sys.exit(0)
    if frame[0] is not kind:
        raise ValueError(f"expected a frame of kind {kind.name}, got {frame[0].name}")
    return frame[1]


def _end_with_service() -> None:
    # Not through sys.stdin: its lock, held by a daemon thread, would abort a normal exit.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
