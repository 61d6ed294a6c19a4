"""The solver process: reads its work from stdin, answers on stdout, and solves once.

It ends when the service does: whoever waits for its answer holds the other end of stdin.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from math import isfinite
from threading import Event, Thread
from typing import IO, Any

from autoshard.graph import ArchiveLimits, load_graph
from autoshard.mesh import mesh_from_json
from autoshard.plan import PlanOptions, make_plan
from autoshard.solve import Progress, Status, TableStore
from autoshard_server.executor import Solved, Work
from autoshard_server.frames import FrameKind, read_frame, write_frame
from autoshard_server.problems import INTERNAL, ServerError, problem_of, problem_type_of
from autoshard_server.settings import Settings
from autoshard_solver_cache import Shelf, SolverCache, StoreUnavailableError, open_engine

_UNFINISHED = frozenset({Status.TIMED_OUT, Status.CANCELLED})

_log = logging.getLogger(__name__)


BLOCKS = "blocks"
"""Namespace of solved blocks in the cache."""

_BUSY_TIMEOUT = 1.0
"""Seconds to wait for another writer: then solving without the cache is quicker."""


def solve(
    work: Work,
    on_progress: Callable[[Mapping[str, Any]], None],
    cancel: Event,
    tables: TableStore | None = None,
) -> Solved:
    """Make the plan of a job.

    Args:
        work: the request and the graph, as they were checked when they arrived.
        on_progress: called with phase, incumbent, bound and gap; null where not yet known.
        cancel: set it to stop.
        tables: keeps solved blocks for other jobs.

    Raises:
        InputError: the graph cannot be planned as asked.
    """
    request = json.loads(work.request)
    graph = load_graph(work.graph, limits=ArchiveLimits(**request["limits"]))
    plan = make_plan(
        graph,
        mesh_from_json(json.dumps(request["mesh"])),
        PlanOptions.model_validate(request["options"]),
        on_progress=lambda progress: on_progress(_report(progress)),
        cancel=cancel,
        tables=tables,
    )
    if plan.id != request["plan_id"]:
        raise ServerError(
            INTERNAL, "the worker and the service that took the job run different versions"
        )
    return Solved(plan.to_json().encode(), keep=plan.certificate.status not in _UNFINISHED)


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
    tables = _open_tables(Settings())
    request, graph = _expect(source, FrameKind.WORK), _expect(source, FrameKind.GRAPH)
    Thread(target=_end_with_service, daemon=True).start()

    def report(progress: Mapping[str, Any]) -> None:
        write_frame(answers, FrameKind.PROGRESS, json.dumps(progress).encode())

    try:
        solved = solve(Work(request.decode(), graph), report, Event(), tables)
    except Exception as error:  # noqa: BLE001  whatever it is becomes the answer
        if problem_type_of(error) is INTERNAL:
            _log.exception("solving failed")
        write_frame(answers, FrameKind.PROBLEM, json.dumps(problem_of(error)).encode())
        return
    kind = FrameKind.PLAN if solved.keep else FrameKind.UNFINISHED
    write_frame(answers, kind, solved.plan)


def _open_tables(settings: Settings) -> TableStore | None:
    """The solved blocks of the service's cache; None where it cannot be had."""
    try:
        engine = open_engine(settings.store_url, busy_timeout=_BUSY_TIMEOUT)
        return Shelf(SolverCache(engine, max_bytes=settings.cache_max_bytes), BLOCKS)
    except StoreUnavailableError as error:
        _log.warning("solving without the cache: %s", error)
        return None


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
