"""Where solves run: behind one seam, in processes that can be killed, or in a thread."""

import json
import os
import queue
import signal
import subprocess
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

from autoshard_server.problems import CRASHED, INTERNAL, MEMORY, problem_document, problem_of
from autoshard_server.solvers.frames import FrameKind, read_frame, write_frame

_log = structlog.get_logger(__name__)

_SOLVER = (sys.executable, "-X", "faulthandler", "-m", "autoshard_server.solvers.solving")

_MEMORY_TICK = 0.05
"""Seconds between looks at a process's memory; what it can fill meanwhile is its overshoot."""

_FAMILY_TICK = 1.0
"""Seconds between looks for processes that it has started, which takes longer."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to solve.

    Attributes:
        request: JSON text with plan id, mesh, options and limits.
        graph: the uploaded bytes.
    """

    request: str
    graph: bytes


@dataclass(frozen=True, slots=True)
class Advanced:
    """The solver reports: phase, incumbent, bound and gap."""

    progress: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Solved:
    """The solver is done.

    Attributes:
        plan: the plan document.
        keep: whether the same request may be answered with it again: not where a time limit
            ended before anything was found, or before all operators without a rule were tried.
    """

    plan: bytes
    keep: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no plan document, but problem details."""

    problem: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Died:
    """The solver is gone without an answer, which may not be the fault of its work.

    Attributes:
        problem: details, for when it has been tried often enough.
        was_ready: whether it had said that it is ready; where not, all of them may be so.
    """

    problem: Mapping[str, Any]
    was_ready: bool


Message = Advanced | Solved | Failed | Died


class Solver(Protocol):
    """Something that is ready to solve once."""

    def start(self, work: Work) -> None:
        """Begin; called once."""

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after so many seconds without one.

        Anything but `Advanced` is the last; it always comes, unless the solver is stopped
        before.
        """

    def is_alive(self) -> bool:
        """Whether it can still be given work, as far as is known; never waits."""

    def stop(self) -> None:
        """Stop at once if it runs, and give everything back; may be called again."""


class Executor(Protocol):
    """Makes solvers."""

    def prepare(self) -> Solver:
        """A solver, warmed up while there is nothing to do."""


@dataclass(frozen=True)
class ProcessExecutor:
    """One process per solve, started before it is needed and killed when it is not wanted.

    Attributes:
        command: what to run; it speaks `autoshard_server.solvers.frames` on stdin and stdout.
        environment: variables that it gets besides those of this process.
        max_bytes: resident memory of the process and those that it starts; with more they are
            killed. None watches nothing.
    """

    command: Sequence[str] = _SOLVER
    environment: Mapping[str, str] = field(default_factory=dict)
    max_bytes: int | None = None

    def prepare(self) -> Solver:
        """Start a process; it imports what it needs and then waits for its work."""
        return _ProcessSolver(self.command, self.environment, self.max_bytes)


class _ProcessSolver:
    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], max_bytes: int | None
    ) -> None:
        self._spawn = partial(_spawn, command, environment)
        self._process = self._spawn()
        self._max_bytes = max_bytes
        self._excess = 0
        self._was_ready = False
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._threads: list[Thread] = []

    def start(self, work: Work) -> None:
        if self._process.poll() is not None:
            # It was killed while it waited, which says nothing about this work.
            self._close()
            self._process = self._spawn()
        _log.info("solver_process", pid=self._process.pid)
        # Writing in a thread: a large graph fills the pipe until the process reads it.
        targets = [lambda: self._send(work), self._listen]
        if self._max_bytes is not None:
            targets.append(partial(self._guard, self._max_bytes))
        for target in targets:
            thread = Thread(target=target, daemon=True)
            thread.start()
            self._threads.append(thread)

    def receive(self, timeout: float) -> Message | None:
        with suppress(queue.Empty):
            return self._messages.get(timeout=timeout)
        return None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        # At once: a solver leaves nothing half done, and its processor is wanted.
        self._kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        self._close()

    def _kill(self) -> None:
        # A session of its own: whatever it has started is in its group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _send(self, work: Work) -> None:
        assert self._process.stdin is not None
        # A process that is gone is noticed, and reported, by the listener.
        with suppress(OSError):
            write_frame(self._process.stdin, FrameKind.WORK, work.request.encode())
            write_frame(self._process.stdin, FrameKind.GRAPH, work.graph)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while frame := read_frame(self._process.stdout):
                if frame[0] is FrameKind.READY:
                    self._was_ready = True
                    continue
                message = _message(*frame)
                self._messages.put(message)
                if not isinstance(message, Advanced):
                    return
        except ValueError as error:
            self._kill()
            self._messages.put(Failed(problem_document(INTERNAL, f"bad solver output: {error}")))
            return
        code = self._process.wait()
        if self._excess:
            self._messages.put(Failed(problem_document(MEMORY, self._too_much())))
        else:
            problem = problem_document(CRASHED, _last_words(code))
            self._messages.put(Died(problem, self._was_ready))

    def _guard(self, max_bytes: int) -> None:
        family: list[psutil.Process] = []
        looked = float("-inf")
        while self._process.poll() is None:
            now = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                if now - looked > _FAMILY_TICK:
                    process = psutil.Process(self._process.pid)
                    family = [process, *process.children(recursive=True)]
                    looked = now
            used = sum(map(_resident, family))
            if used > max_bytes:
                self._excess = used
                self._kill()
                return
            time.sleep(_MEMORY_TICK)

    def _too_much(self) -> str:
        limit = self._max_bytes or 0
        return (
            f"the solver needed {self._excess / 2**20:,.0f} MiB of memory, and one job may have "
            f"{limit / 2**20:,.0f} MiB here (AUTOSHARD_MAX_JOB_BYTES); plan a smaller graph or "
            "mesh, give a memory budget that is less tight, or ask for more room"
        )


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _last_words(code: int) -> str:
    if code < 0:
        cause = f"was ended by {signal.Signals(-code).name}"
    else:
        cause = f"ended with exit status {code}"
    return (
        f"the solver process {cause} without an answer; "
        "if memory ran out, plan a smaller graph or mesh, or give the service more"
    )


def _spawn(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  the command is ours, never a client's
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        # Ctrl-C in a terminal is for the service, which then decides about its solves.
        start_new_session=True,
    )


def _message(kind: FrameKind, body: bytes) -> Message:
    if kind is FrameKind.PROGRESS:
        return Advanced(json.loads(body))
    if kind is FrameKind.PROBLEM:
        return Failed(json.loads(body))
    if kind in {FrameKind.PLAN, FrameKind.UNFINISHED}:
        return Solved(body, keep=kind is FrameKind.PLAN)
    raise ValueError(f"a frame of kind {kind.name} comes from the wrong side")


Solve = Callable[[Work, Callable[[Mapping[str, Any]], None], Event], Solved]
"""Work, what to call with progress, and what is set to cancel."""


@dataclass(frozen=True)
class ThreadExecutor:
    """The in-memory twin of `ProcessExecutor`: one thread per solve, for debugging.

    A thread cannot be killed: a solve that ignores its cancel event runs on.

    Attributes:
        solve: what to run.
    """

    solve: Solve

    def prepare(self) -> Solver:
        """A solver that starts its thread when it gets its work."""
        return _ThreadSolver(self.solve)


class _ThreadSolver:
    def __init__(self, solve: Solve) -> None:
        self._solve = solve
        self._cancel = Event()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def start(self, work: Work) -> None:
        Thread(target=self._run, args=(work,), daemon=True).start()

    def receive(self, timeout: float) -> Message | None:
        with suppress(queue.Empty):
            return self._messages.get(timeout=timeout)
        return None

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None:
        self._cancel.set()

    def _run(self, work: Work) -> None:
        def advance(progress: Mapping[str, Any]) -> None:
            self._messages.put(Advanced(progress))

        try:
            self._messages.put(self._solve(work, advance, self._cancel))
        except Exception as error:  # noqa: BLE001  whatever it is becomes the job's problem
            self._messages.put(Failed(problem_of(error)))
