"""Phases of requests and jobs, such as parse and solve: spans, and seconds for the log."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import StrEnum

from opentelemetry import trace

_current: ContextVar["PhaseTimes | None"] = ContextVar("phases", default=None)


class WorkPhase(StrEnum):
    """Phases of a request or a job."""

    PARSE = "parse"
    """Reading a graph or a plan; in a request with the wait for a parser process."""
    FORMULATE = "formulate"
    """Stating the optimization problem."""
    SOLVE = "solve"
    """Solving it; in a search, planning all meshes; in other jobs, what follows the reading."""
    STORE = "store"
    """Reading and writing the database."""
    WAIT = "wait"
    """Of a request: waiting for its job (`Prefer: wait=N`)."""

    @classmethod
    def of_progress(cls, reported: str) -> "WorkPhase":
        """The phase of a job whose solver reports a step of this name."""
        return cls.FORMULATE if reported == cls.FORMULATE else cls.SOLVE


class PhaseTimes:
    """Seconds of each phase of one request or job; each is also a span while it runs.

    Attributes:
        seconds: by the phase, also of those that have run several times.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._entered = ExitStack()
        self._phase: WorkPhase | None = None

    @contextmanager
    def running(self, phase: WorkPhase) -> Iterator[None]:
        """Be in a phase within the block."""
        started = time.monotonic()
        try:
            with trace.get_tracer("autoshard_server").start_as_current_span(phase):
                yield
        finally:
            taken = time.monotonic() - started
            self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + taken

    def enter(self, phase: WorkPhase) -> None:
        """Be in a phase from now on, until another one is entered, or `leave` is called."""
        if phase is not self._phase:
            self.leave()
            self._phase = phase
            self._entered.enter_context(self.running(phase))

    def leave(self) -> None:
        """End the phase that was entered, if there is one."""
        self._phase = None
        self._entered.close()

    @property
    def rounded(self) -> dict[str, float]:
        """The seconds as they are logged."""
        return {name: round(seconds, 4) for name, seconds in self.seconds.items()}


@contextmanager
def timing(times: PhaseTimes) -> Iterator[None]:
    """Count the phases of the current request within the block."""
    token = _current.set(times)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def phase(name: WorkPhase) -> Iterator[None]:
    """Be in a phase of the current request within the block."""
    with (_current.get() or PhaseTimes()).running(name):
        yield
