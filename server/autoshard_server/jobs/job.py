"""A job as it is seen from outside of its row, and the states that it goes through."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autoshard_server.store.cursor import Cursor


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def done(self) -> bool:
        """Whether the job will not change any more."""
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
"""Which state may follow which."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a row says, without its large columns.

    Attributes:
        id: 32 hex digits.
        kind: what it makes: a plan, unless its request says otherwise.
        plan_id: id of the plan that the job makes, or the digest of whatever else was asked.
        caller: who asked first; None where callers are not told apart.
        state: where it stands.
        attempts: how often it was started.
        created_at: seconds since 1970.
        started_at: the same, of the last start.
        finished_at: the same.
        progress: phase, incumbent, bound and gap, as the solver last reported them.
        error: problem details, where it failed or was cancelled.
    """

    id: str
    kind: str
    plan_id: str
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
        """Seconds since it was started for the last time; 0 before."""
        if self.started_at is None:
            return 0.0
        end = time.time() if self.finished_at is None else self.finished_at
        return max(0.0, end - self.started_at)

    @property
    def cursor(self) -> Cursor:
        """Its place in a list."""
        return Cursor(self.created_at, self.id)


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has taken: what to solve, and as whom to report.

    Attributes:
        id: of the job.
        kind: what to make.
        plan_id: id that the plan must get.
        owner: the worker.
        request: JSON text with mesh, options and limits.
        graph: the uploaded bytes.
        context: what logs and traces of the work should carry, such as `request_id`.
    """

    id: str
    kind: str
    plan_id: str
    owner: str
    request: str
    graph: bytes
    context: Mapping[str, str]
