"""Solves on a Ray cluster: one actor per solve, which holds one solver process.

The actor is only a place: the process in it is the one that `ProcessExecutor` starts, with the
same limits, and it ends with its actor. The job's row stays the truth. An actor that is lost
counts as a solver that died, so the job is tried again.

Ray moves Python objects between its processes, and whoever reaches a cluster can run code
there, so it must be trusted as the database is. What we send and get is text and bytes.
"""

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import current_thread, main_thread
from typing import Any

import ray
import structlog
from ray.exceptions import GetTimeoutError, RayError

from autoshard_server.problems import CRASHED, problem_document
from autoshard_server.solvers.executor import (
    Advanced,
    Died,
    Failed,
    Message,
    ProcessExecutor,
    Solved,
    Solver,
    Work,
)

_POLL = 0.5
"""Seconds that an actor waits for a message before it says that there is none."""

_STOP_PATIENCE = 0.5
"""Seconds that an actor gets to kill its process before it is killed itself."""

_THREADS = 3
"""Calls that an actor serves at once: it must be able to stop while it waits."""

_log = structlog.get_logger(__name__)

Answer = tuple[str, str, bytes]
"""What an actor says: a word for the kind of message, JSON text, and a document."""


class RayExecutor:
    """One Ray actor per solve, made before it is needed and killed when it is not wanted.

    Args:
        address: of the cluster; one of this machine's own is started if it is empty.
        environment: variables that the processes get.
        max_bytes: resident memory of a solve.
        command: what to run on the cluster's machines; the solver of the autoshard that is
            installed there if left out.
        cpus: processors that the cluster sets aside for a solve.
        **options: passed on to `ray.init`.
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
        self._host = ray.remote(
            num_cpus=cpus, max_restarts=0, max_task_retries=0, max_concurrency=_THREADS
        )(Host)
        self._arguments = (command, dict(environment or {}), max_bytes)

    def prepare(self) -> Solver:
        """Ask for an actor; it starts its process as soon as the cluster has room."""
        return _RaySolver(self._host, self._arguments)


class Host:
    """What runs on the cluster: holds a solver process, and passes messages on."""

    def __init__(
        self, command: Sequence[str] | None, environment: Mapping[str, str], max_bytes: int | None
    ) -> None:
        given = {} if command is None else {"command": command}
        executor = ProcessExecutor(**given, environment=environment, max_bytes=max_bytes)
        self._solver = executor.prepare()

    def start(self, request: str, graph: bytes) -> None:
        """Begin."""
        self._solver.start(Work(request, graph))

    def receive(self) -> Answer | None:
        """The next message, or None if there is none for a while."""
        message = self._solver.receive(_POLL)
        return None if message is None else _packed(message)

    def lives(self) -> bool:
        """Whether the process that waits is still there."""
        return self._solver.is_alive()

    def stop(self) -> None:
        """Kill the process."""
        self._solver.stop()


class _RaySolver:
    def __init__(self, host: Any, arguments: tuple[Any, ...]) -> None:
        self._make = host
        self._arguments = arguments
        self._actor = self._make.remote(*arguments)
        self._work: Work | None = None
        self._started: Any = None
        self._pending: Any = None
        self._looking: Any = None

    def start(self, work: Work) -> None:
        self._work = work
        self._started = self._actor.start.remote(work.request, work.graph)

    def receive(self, timeout: float) -> Message | None:
        failure = _failure(self._started)
        if failure is not None:
            return self._lost(failure)
        if self._pending is None:
            self._pending = self._actor.receive.remote()
        ready, _ = ray.wait([self._pending], timeout=timeout)
        if not ready:
            return None
        answer, self._pending = self._pending, None
        try:
            found = ray.get(answer)
        except RayError as error:
            return self._lost(error)
        return None if found is None else _unpacked(found)

    def is_alive(self) -> bool:
        # What was asked the last time; an actor that the cluster has no room for yet is no loss.
        if self._looking is None:
            self._looking = self._actor.lives.remote()
        if not _has_ended(self._looking):
            return True
        looked, self._looking = self._looking, None
        try:
            return bool(ray.get(looked))
        except RayError:
            return False

    def stop(self) -> None:
        # Killing an actor does not wait; its process would see the end of its input.
        with suppress(RayError, GetTimeoutError):
            ray.get(self._actor.stop.remote(), timeout=_STOP_PATIENCE)
        with suppress(RayError, ValueError):
            ray.kill(self._actor)

    def _lost(self, error: RayError) -> Message | None:
        began = self._started is None or _has_ended(self._started)
        began = began and _failure(self._started) is None
        if self._work is not None and not began:
            # It was lost before it got the work, which says nothing about the work.
            work, self._work = self._work, None
            self._actor = self._make.remote(*self._arguments)
            self._started = self._actor.start.remote(work.request, work.graph)
            self._pending = None
            return None
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        detail = f"the Ray worker of the job was lost: {first}"
        return Died(problem_document(CRASHED, detail), was_ready=began)


def _connect(address: str, options: Mapping[str, Any]) -> None:
    if ray.is_initialized():
        return
    # Ray wants SIGTERM for itself, but it is the service that decides how it ends.
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


def _failure(reference: Any) -> RayError | None:
    """What a call has raised; None where it has not, or not yet, or was never made."""
    if reference is None or not _has_ended(reference):
        return None
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _packed(message: Message) -> Answer:
    if isinstance(message, Solved):
        return ("keep" if message.keep else "once", "", message.plan)
    if isinstance(message, Advanced):
        return ("advanced", json.dumps(message.progress), b"")
    word = "failed"
    if isinstance(message, Died):
        word = "died" if message.was_ready else "stillborn"
    return (word, json.dumps(message.problem), b"")


def _unpacked(answer: Answer) -> Message:
    word, text, body = answer
    if word in {"keep", "once"}:
        return Solved(body, keep=word == "keep")
    told = json.loads(text)
    if word == "advanced":
        return Advanced(told)
    return Failed(told) if word == "failed" else Died(told, was_ready=word == "died")
