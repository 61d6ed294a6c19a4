"""Parser processes: a few, started before they are needed, each for one graph, plan or config."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

from autoshard_server.problems import (
    ProblemType,
    ServerError,
    limit_error,
    problem_of,
    server_error_of,
)
from autoshard_server.settings import Settings
from autoshard_server.solvers.children import Child, Program, fork
from autoshard_server.solvers.executor import MemoryLimit, ProcessSolver
from autoshard_server.solvers.messages import Died, Failed, Solved, SolverInput

if TYPE_CHECKING:  # only the processes import what reads graphs and plans
    from autoshard_server.solvers.parsing import ParserTask

_CHECK_SECONDS = 0.25
"""Seconds after which a process is stopped of which nobody waits for the result."""


@dataclass(frozen=True)
class _Limits:
    """Limits of a task.

    Attributes:
        seconds: setting of its time.
        nbytes: setting of its memory.
        work: the task in words.
        remedy: another way.
    """

    seconds: str
    nbytes: str
    work: str
    remedy: str

    def error(self, settings: Settings, setting: str, unit: str) -> ServerError:
        """The error of a task that takes more than a setting allows."""
        limit = getattr(settings, setting)
        detail = f"{self.work} takes more than {unit}; {self.remedy}, or raise the limit"
        return limit_error(ProblemType.LIMIT, detail, setting, limit)


_LIMITS: Mapping[Program, _Limits] = {
    "parse": _Limits(
        "max_parse_seconds", "max_parse_bytes", "reading it", "send a smaller program"
    ),
    "export": _Limits(
        *("max_export_seconds", "max_export_bytes"),
        *("making the model of the config", "send its graph"),
    ),
}


class Parsers:
    """Runs tasks in parser processes, whose time and memory are limited.

    Args:
        settings: with the limits.
        program: of the processes.
    """

    def __init__(self, settings: Settings, program: Program = "parse") -> None:
        self._settings = settings
        self._limits = _LIMITS[program]
        self._seconds: float = getattr(settings, self._limits.seconds)
        self._make: Callable[[], Child] = partial(fork, program, settings.environment)
        self._limit = MemoryLimit(getattr(settings, self._limits.nbytes), self._out_of_memory)
        self._spare: SimpleQueue[ProcessSolver] = SimpleQueue()
        self._is_closed = False

    def start(self) -> None:
        """Prepare a process for each task that may run at the same time."""
        for _ in range(self._settings.num_parsers):
            self._prepare()

    def close(self) -> None:
        """Stop the processes that wait for a task; none waits from now on."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                self._spare.get_nowait().stop()

    def run(
        self,
        task: "ParserTask",
        request: Mapping[str, Any],
        payload: bytes,
        stop: Event | None = None,
    ) -> bytes:
        """Do a task; blocks until it is done.

        Args:
            task: to do.
            request: its other arguments, as JSON.
            payload: the graph, plan or config.
            stop: ends the process when it is set.

        Raises:
            ServerError: the problem of the task; LIMIT if it takes too much time or memory.
        """
        work, stop = SolverInput(json.dumps({"task": task, **request}), payload), stop or Event()
        message = self._run(work, stop)
        if isinstance(message, Died) and not stop.is_set():
            # Perhaps with the fork server, and not because of this task.
            message = self._run(work, stop)
        if isinstance(message, Solved):
            return message.document
        raise server_error_of(message.problem)

    def _run(self, work: SolverInput, stop: Event) -> Solved | Failed | Died:
        try:
            parser = self._spare.get_nowait()
        except Empty:
            parser = self._new()
        else:
            self._prepare()
        try:
            parser.start(work)
            # It has been forked, also by a fork server that had to be started first.
            deadline = time.monotonic() + self._seconds
            while not stop.is_set():
                left = max(0.0, deadline - time.monotonic())
                message = parser.receive(min(left, _CHECK_SECONDS))
                if isinstance(message, Solved | Failed | Died):
                    return message
                if message is None and left <= _CHECK_SECONDS:
                    break
            return Failed(problem_of(self._too_slow()))
        finally:
            parser.stop()

    def _prepare(self) -> None:
        # Without one, the next task starts its own process.
        with suppress(OSError):
            self._spare.put(self._new())
        if self._is_closed:  # while this one was made
            self.close()

    def _new(self) -> ProcessSolver:
        return ProcessSolver(self._make, self._limit, name="parser")

    def _too_slow(self) -> Exception:
        unit = f"{self._seconds:g} seconds"
        return self._limits.error(self._settings, self._limits.seconds, unit)

    def _out_of_memory(self, _used: int, limit: int) -> Mapping[str, Any]:
        unit = f"{limit / 2**20:,.0f} MiB of memory"
        return problem_of(self._limits.error(self._settings, self._limits.nbytes, unit))
