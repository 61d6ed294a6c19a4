"""Executors: run solves in processes, which can be killed, or in threads."""

import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from typing import Any, Protocol

import psutil
import structlog

from autoshard_server.problems import ProblemType, limit_error, problem_document, problem_of
from autoshard_server.solvers.children import Child, SpawnedChild, fork
from autoshard_server.solvers.messages import (
    Died,
    Failed,
    FrameKind,
    Message,
    Progressed,
    Solved,
    SolverInput,
    decode,
    read_frame,
    write_frame,
)

_log = structlog.get_logger(__name__)

SOLVER_COMMAND = (sys.executable, "-X", "faulthandler", "-m", "autoshard_server.solvers.solving")
"""Runs a solver in a process of its own, without a fork server."""

_MEMORY_INTERVAL = 0.05
"""Seconds between checks of a process's memory; it may exceed its limit for as long."""

_CHILDREN_INTERVAL = 1.0
"""Seconds between checks for child processes, which take longer."""


class Solver(Protocol):
    """Solves one job."""

    def start(self, work: SolverInput) -> None:
        """Start; called once."""

    def receive(self, timeout: float) -> Message | None:
        """The next message; None after `timeout` seconds without one.

        Every message but `Progressed` is the last one, and there always is a last one unless the
        solver is stopped.
        """

    def is_alive(self) -> bool:
        """True if it can still be started, as far as is known; does not block."""

    def stop(self) -> None:
        """Stop immediately and release all resources; may be called again."""


class Executor(Protocol):
    """Makes solvers."""

    def prepare(self) -> Solver:
        """Make a solver; a process on this machine imports its modules before it is started."""


@dataclass(frozen=True)
class ProcessExecutor:
    """One process per solve, started before it is needed and killed to stop it.

    Attributes:
        command: of the process; it exchanges frames of `autoshard_server.solvers.messages` on
            stdin and stdout. None forks the solver, which takes much less time.
        environment: additional environment variables.
        max_bytes: limit of the resident memory of the process and its children, beyond which they
            are killed; None for no limit.
    """

    command: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    max_bytes: int | None = None

    def prepare(self) -> Solver:
        """Start a process, which then waits for its job.

        Raises:
            OSError: it cannot be started.
        """
        limit = None if self.max_bytes is None else MemoryLimit(self.max_bytes, _out_of_memory)
        return ProcessSolver(self._start, limit)

    def _start(self) -> Child:
        if self.command is not None:
            return SpawnedChild(self.command, self.environment)
        child = fork("solve", self.environment)
        # Waits for the fork server's own start: a worker that has claimed a job sends heartbeats.
        if child.pid is None:
            _log.warning("solver_not_started", reason="the fork server has ended")
        return child


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of the memory of a process and its children.

    Attributes:
        max_bytes: of resident memory; beyond it, they are killed.
        problem: makes the problem details, from the used bytes and the limit.
    """

    max_bytes: int
    problem: Callable[[int, int], Mapping[str, Any]]


class ProcessSolver:
    """A solver that runs one job in a child process.

    Args:
        make: starts the process.
        limit: of its memory; None for none.
        name: of the process, for messages.
    """

    def __init__(
        self, make: Callable[[], Child], limit: MemoryLimit | None, *, name: str = "solver"
    ) -> None:
        self._make = make
        self._process = make()
        self._limit = limit
        self._name = name
        self._excess = 0
        self._was_ready = False
        self._stopped = Event()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._threads: list[Thread] = []

    def start(self, work: SolverInput) -> None:
        """Start; called once."""
        if self._process.poll() is not None:
            # It was killed while it waited, which was not caused by this job.
            self._process.close()
            self._process = self._make()
        _log.info(f"{self._name}_process", pid=self._process.pid)
        # Written in a thread: a large graph fills the pipe until the process reads it.
        targets: list[Callable[[], None]] = [partial(self._send, work), self._listen]
        if self._limit is not None:
            targets.append(partial(self._limit_memory, self._limit.max_bytes))
        self._threads = [Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def receive(self, timeout: float) -> Message | None:
        """The next message; None after `timeout` seconds without one."""
        return _next(self._messages, timeout)

    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the process and its children, and release all resources."""
        # Killing is safe: a solver writes entries of the cache in transactions.
        self._stopped.set()
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        self._process.close()

    def _send(self, work: SolverInput) -> None:
        # The listener reports a process that has died.
        with suppress(OSError):
            write_frame(self._process.stdin, FrameKind.REQUEST, work.request.encode())
            write_frame(self._process.stdin, FrameKind.GRAPH, work.graph)

    def _listen(self) -> None:
        try:
            while frame := read_frame(self._process.stdout):
                if frame[0] is FrameKind.READY:
                    self._was_ready = True
                    continue
                message = decode(*frame)
                self._messages.put(message)
                if not isinstance(message, Progressed):
                    return
        except ValueError as error:
            self._process.kill()
            detail = f"bad {self._name} output: {error}"
            self._messages.put(Failed(problem_document(ProblemType.INTERNAL, detail)))
            return
        code = self._process.wait()
        if self._limit is not None and self._excess:
            problem = self._limit.problem(self._excess, self._limit.max_bytes)
            self._messages.put(Failed(problem))
        else:
            detail = _exit_detail(self._name, code)
            died = problem_document(ProblemType.SOLVER_CRASHED, detail)
            self._messages.put(Died(died, self._was_ready))

    def _limit_memory(self, max_bytes: int) -> None:
        pid = self._process.pid
        processes: list[psutil.Process] = []
        checked_at = time.monotonic()
        while pid is not None and self._process.poll() is None:
            now = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                if not processes:
                    processes = [psutil.Process(pid)]
                elif now - checked_at > _CHILDREN_INTERVAL:
                    processes = [processes[0], *processes[0].children(recursive=True)]
                    checked_at = now
            used = sum(map(_resident, processes))
            if used > max_bytes:
                self._excess = used
                self._process.kill()
                return
            if self._stopped.wait(_MEMORY_INTERVAL):
                return


def _out_of_memory(used: int, limit: int) -> Mapping[str, Any]:
    return problem_of(
        limit_error(
            ProblemType.OUT_OF_MEMORY,
            f"the solver needed {used / 2**20:,.0f} MiB of memory, and the limit of a job is "
            f"{limit / 2**20:,.0f} MiB; plan a smaller graph or mesh, use a larger memory budget, "
            "or raise the limit",
            "max_job_bytes",
            limit,
        )
    )


class _ThreadSolver:
    def __init__(self, solve: "Solve") -> None:
        self._solve = solve
        self._cancel = Event()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def start(self, work: SolverInput) -> None:
        Thread(target=self._run, args=(work,), daemon=True).start()

    def receive(self, timeout: float) -> Message | None:
        return _next(self._messages, timeout)

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None:
        self._cancel.set()

    def _run(self, work: SolverInput) -> None:
        def report(progress: Mapping[str, Any]) -> None:
            self._messages.put(Progressed(progress))

        try:
            self._messages.put(self._solve(work, report, self._cancel))
        except Exception as error:  # noqa: BLE001  every error becomes the job's problem
            self._messages.put(Failed(problem_of(error)))


Solve = Callable[[SolverInput, Callable[[Mapping[str, Any]], None], Event], Solved]
"""A function of a job, a callback for progress, and an event that cancels."""


@dataclass(frozen=True)
class ThreadExecutor:
    """One thread per solve, for debugging and tests.

    A thread cannot be killed: a solve that ignores its cancel event continues.

    Attributes:
        solve: the function to run.
    """

    solve: Solve

    def prepare(self) -> Solver:
        """A solver whose thread starts with its job."""
        return _ThreadSolver(self.solve)


def _next(messages: "queue.SimpleQueue[Message]", timeout: float) -> Message | None:
    with suppress(queue.Empty):
        return messages.get(timeout=timeout)
    return None


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _exit_detail(name: str, code: int) -> str:
    if code < 0:
        cause = f"was ended by {signal.Signals(-code).name}"
    else:
        cause = f"ended with exit status {code}"
    return (
        f"the {name} process {cause} without a result; "
        "if memory ran out, plan a smaller graph or mesh, or give the service more"
    )
