"""Data classes of jobs: kinds, states, rows, claims and events."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import BaseModel, Field


class JobClass(StrEnum):
    """Classes of jobs, which wait in separate queues."""

    QUICK = "quick"
    """Questions about a graph or a plan, which are answered without solving."""
    SOLVE = "solve"
    """Plans and searches."""

    @classmethod
    def of(cls, kind: str) -> "JobClass":
        """The class of the jobs of a kind, which may be one of a newer release."""
        quick = (JobKind.VALIDATION, JobKind.EXPLANATION, JobKind.COVERAGE)
        return cls.QUICK if kind in quick else cls.SOLVE


class JobKind(StrEnum):
    """Kinds of results."""

    PLAN = "plan"
    VALIDATION = "validation"
    SEARCH = "search"
    EXPLANATION = "explanation"
    COVERAGE = "coverage"

    @property
    def namespace(self) -> str:
        """Namespace of the results in the cache, by their id."""
        return "searches" if self is JobKind.SEARCH else f"{self.value}s"


def known_kind(name: str) -> JobKind | None:
    """The kind of a job; None for one of a newer release that shares the database."""
    return JobKind(name) if name in JobKind.__members__.values() else None


class JobState(StrEnum):
    """States of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def done(self) -> bool:
        """True if the state is final."""
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.QUEUED}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""The states that may follow each state."""


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table of jobs, without its large columns.

    Attributes:
        id: 32 hex digits.
        kind: of the result, as text: it may be a kind of a newer release.
        plan_id: id of the plan, or of the other result, that the job makes.
        project: of the caller; the job is shared with other callers of the project only.
        caller: name of the key that submitted it first; None without keys.
        state: of the job.
        attempts: number of starts.
        created_at: seconds since 1970.
        started_at: time of the last start, in seconds since 1970.
        finished_at: time of the end, in seconds since 1970.
        progress: phase, incumbent, bound and gap, as the solver last reported them.
        error: problem details of a failed or cancelled job.
    """

    id: str
    kind: str
    plan_id: str
    project: str
    caller: str | None
    state: JobState
    attempts: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    progress: Mapping[str, Any]
    error: Mapping[str, Any] | None

    @property
    def elapsed(self) -> float:
        """Seconds since the last start; 0 before the first."""
        if self.started_at is None:
            return 0.0
        end = time.time() if self.finished_at is None else self.finished_at
        return max(0.0, end - self.started_at)


@dataclass(frozen=True, slots=True)
class PolledJob:
    """State of a job, and the number of its last event.

    Attributes:
        state: of the job.
        last_event: number of its last event; 0 if it has none.
    """

    state: JobState
    last_event: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has claimed.

    Attributes:
        id: of the job.
        kind: of the result.
        plan_id: id of the result.
        project: of the caller.
        owner: the worker.
        request: JSON text with mesh, options and limits.
        graph: the uploaded bytes.
        context: fields for logs and traces of the job, such as `request_id`.
        waited: seconds since the job was submitted; None if it was started before.
    """

    id: str
    kind: str
    plan_id: str
    project: str
    owner: str
    request: str
    graph: bytes
    context: Mapping[str, str]
    waited: float | None = field(default=None, compare=False)


class EventKind(StrEnum):
    """Kinds of events of a job."""

    STATE = "state"
    """The job entered a state: `state`, and `attempt` or `error` if there is one."""
    PROGRESS = "progress"
    """The solver reported: phase, incumbent, bound and gap."""


class JobEvent(BaseModel):
    """An event of a job: the data of a server-sent event."""

    number: int = Field(ge=1, description="1, 2, 3, ... within the job; the event's id")
    kind: EventKind = Field(description="state or progress; the event's name")
    created_at: datetime
    data: dict[str, Any] = Field(description="state, or phase, incumbent, bound and gap")

    @cached_property
    def text(self) -> str:
        """The event as JSON, as it is sent to all followers."""
        return self.model_dump_json()

    @property
    def is_last(self) -> bool:
        """True if the job entered a final state."""
        return self.kind is EventKind.STATE and JobState(str(self.data["state"])).done
