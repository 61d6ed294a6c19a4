"""Solves on a Ray cluster: one actor per solve, which runs one solver process.

The process is one that `ProcessExecutor` spawns, with the same limits, and it ends with its
actor. The state of a job is only in the database. A lost actor counts as a solver that died, so the
job is retried.

Ray pickles Python objects, and everyone who can reach a cluster can run code there, so it must be
trusted like the database. Calls here only send and receive text and bytes.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import current_thread, main_thread
from typing import Any

import ray
import structlog
from ray.exceptions import GetTimeoutError, RayError

from autoshard_server.problems import ProblemType, problem_document
from autoshard_server.solvers.executor import SOLVER_COMMAND, ProcessExecutor, Solver
from autoshard_server.solvers.messages import (
    Died,
    FrameKind,
    Message,
    SolverInput,
    decode,
    encode,
)

_POLL = 0.5
"""Seconds that an actor waits for a message before it returns without one."""

_STOP_TIMEOUT = 0.5
"""Seconds for an actor to kill its process before it is killed itself."""

_THREADS = 3
"""Concurrent calls of an actor, so that it can stop while `receive` waits."""

_log = structlog.get_logger(__name__)


class RayExecutor:
    """One Ray actor per solve, made when the solve starts and killed to stop it.

    An actor reserves processors of the cluster. Actors that waited for jobs would keep those of
    jobs that wait for an actor.

    Args:
        address: of the cluster; one on this machine is started if it is empty.
        environment: additional environment variables of the processes.
        max_bytes: limit of the resident memory of a solve.
        command: to run on the cluster's machines; by default the solver of the release of
            autoshard that is installed there.
        cpus: processors that the cluster reserves for a solve.
        **options: of `ray.init`.
    """

    def __init__(
        self,
        address: str = "",
        *,
        environment: Mapping[str, str] | None = None,
        max_bytes: int | None = None,
        command: Sequence[str] | None = None,
        cpus: float = 1,
        **options: Any,
    ) -> None:
        _connect(address or "local", options)
        self._actor_class = ray.remote(
            num_cpus=cpus, max_restarts=0, max_task_retries=0, max_concurrency=_THREADS
        )(SolverActor)
        self._arguments = (command, dict(environment or {}), max_bytes)

    def prepare(self) -> Solver:
        """A solver that requests its actor when it starts, and waits for the cluster's capacity."""
        return _RaySolver(self._actor_class, self._arguments)


class SolverActor:
    """An actor on the cluster that runs a solver process and forwards its messages."""

    def __init__(
        self, command: Sequence[str] | None, environment: Mapping[str, str], max_bytes: int | None
    ) -> None:
        # An actor runs one process, for which a fork server would take longer.
        executor = ProcessExecutor(command or SOLVER_COMMAND, environment, max_bytes)
        self._solver = executor.prepare()

    def start(self, request: str, graph: bytes) -> None:
        """Start solving."""
        self._solver.start(SolverInput(request, graph))

    def receive(self) -> tuple[bytes, bytes] | None:
        """The frame of the next message; None if there is none within `_POLL` seconds."""
        message = self._solver.receive(_POLL)
        if message is None:
            return None
        kind, body = encode(message)
        return kind.value, body

    def stop(self) -> None:
        """Kill the process."""
        self._solver.stop()


class _RaySolver:
    def __init__(self, actor_class: Any, arguments: tuple[Any, ...]) -> None:
        self._make = actor_class
        self._arguments = arguments
        self._actor: Any = None
        self._work: SolverInput | None = None
        self._started: Any = None
        self._pending: Any = None

    def start(self, work: SolverInput) -> None:
        self._work = work
        self._request_actor(work)

    def receive(self, timeout: float) -> Message | None:
        error = _error_of(self._started)
        if error is not None:
            return self._lost(error)
        if self._pending is None:
            self._pending = self._actor.receive.remote()
        ready, _ = ray.wait([self._pending], timeout=timeout)
        if not ready:
            return None
        answer, self._pending = self._pending, None
        try:
            frame = ray.get(answer)
        except RayError as error:
            return self._lost(error)
        return None if frame is None else decode(FrameKind(frame[0]), frame[1])

    def is_alive(self) -> bool:
        # There is no actor yet that could be lost.
        return True

    def stop(self) -> None:
        if self._actor is None:
            return
        # If the actor does not respond, its process ends when its stdin is closed.
        with suppress(RayError, GetTimeoutError):
            ray.get(self._actor.stop.remote(), timeout=_STOP_TIMEOUT)
        with suppress(RayError, ValueError):
            ray.kill(self._actor)

    def _request_actor(self, work: SolverInput) -> None:
        self._actor = self._make.remote(*self._arguments)
        self._started = self._actor.start.remote(work.request, work.graph)

    def _lost(self, error: RayError) -> Message | None:
        has_started = _has_ended(self._started) and _error_of(self._started) is None
        if self._work is not None and not has_started:
            # It was lost before it received the job, which was not caused by the job.
            work, self._work = self._work, None
            self._request_actor(work)
            self._pending = None
            return None
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        detail = f"the Ray worker of the job was lost: {first}"
        problem = problem_document(ProblemType.SOLVER_CRASHED, detail)
        return Died(problem, was_ready=has_started)


def _connect(address: str, options: Mapping[str, Any]) -> None:
    if ray.is_initialized():
        return
    # Ray installs a handler of SIGTERM; the service's own is restored.
    is_main = current_thread() is main_thread()
    previous = signal.getsignal(signal.SIGTERM)
    if address == "local":
        options = {"include_dashboard": False, **options}
    ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    if is_main:
        signal.signal(signal.SIGTERM, previous)
    _log.info("ray_connected", address=address, python=sys.version.split()[0])


def _has_ended(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def _error_of(reference: Any) -> RayError | None:
    """The error of a call; None if it succeeded or is pending."""
    if not _has_ended(reference):
        return None
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None
