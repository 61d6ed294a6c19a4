"""Jobs: rows in a database, with a state machine.

    queued ──> running ──> succeeded
      │  ^       │  │ └──> failed
      │  └───────┘  └────> cancelled
      └──> cancelled

A running job belongs to the worker that claimed it for as long as it renews its lease. A
worker that shuts down gives its job back to the queue; one that dies lets the lease run
out, and the job goes back too, until it has been started too often and fails. Every
transition is one UPDATE that names the states it may start from, so two processes can
never both make it. The row is the truth: a worker whose job is no longer its own stops.
"""

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    Update,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autoshard_server.problems import CANCELLED, CRASHED, TOO_MANY, ServerError, problem_document
from autoshard_solver_cache import create_tables, reader


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

_ACTIVE = tuple(state for state in JobState if not state.done)

_metadata = MetaData()

_jobs = Table(
    "jobs",
    _metadata,
    Column("id", String(32), primary_key=True),
    Column("plan_id", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("owner", String(64)),
    Column("lease_until", Float),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("progress", Text),
    Column("error", Text),
    Column("request", Text, nullable=False),
    Column("graph", LargeBinary),
    Column("result", LargeBinary),
)
Index("jobs_by_state", _jobs.c.state, _jobs.c.created_at)
Index(
    "jobs_active_plan",
    _jobs.c.plan_id,
    unique=True,
    sqlite_where=_jobs.c.state.in_(_ACTIVE),
    postgresql_where=_jobs.c.state.in_(_ACTIVE),
)

_SUMMARY = (
    _jobs.c.id,
    _jobs.c.plan_id,
    _jobs.c.state,
    _jobs.c.created_at,
    _jobs.c.started_at,
    _jobs.c.finished_at,
    _jobs.c.progress,
    _jobs.c.error,
)


@dataclass(frozen=True, slots=True)
class Job:
    """What a row says, without its large columns.

    Attributes:
        id: 32 hex digits.
        plan_id: id of the plan that the job makes.
        state: where it stands.
        progress: phase, incumbent, bound and gap, as the solver last reported them.
        error: problem details, where it failed or was cancelled.
        elapsed: seconds since it was started for the last time; 0 before.
    """

    id: str
    plan_id: str
    state: JobState
    progress: Mapping[str, Any]
    error: Mapping[str, Any] | None
    elapsed: float


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a worker has taken: what to solve, and as whom to report.

    Attributes:
        id: of the job.
        plan_id: id that the plan must get.
        owner: the worker.
        request: JSON text with mesh, options and limits.
        graph: the uploaded bytes.
    """

    id: str
    plan_id: str
    owner: str
    request: str
    graph: bytes


class JobStore:
    """Jobs in a database; safe to share between threads, processes and hosts.

    Args:
        engine: as `open_engine` gives it.
        lease: seconds that a claim lasts unless it is renewed.
        max_attempts: times that a job is started before it fails for good.
    """

    def __init__(self, engine: Engine, *, lease: float, max_attempts: int) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._lease = lease
        self._max_attempts = max_attempts
        create_tables(engine, _metadata)

    def submit(self, plan_id: str, request: str, graph: bytes, *, max_queued: int) -> Job:
        """The job that makes this plan: the one under way, else a new one.

        Raises:
            ServerError: TOO_MANY, where `max_queued` jobs wait already.
        """
        row: dict[str, Any] = {
            "id": uuid4().hex,
            "plan_id": plan_id,
            "state": JobState.QUEUED,
            "attempts": 0,
            "created_at": time.time(),
            "request": request,
            "graph": zlib.compress(graph, 1),
        }
        while True:
            active = (_jobs.c.plan_id == plan_id) & _jobs.c.state.in_(_ACTIVE)
            try:
                with self._engine.begin() as connection:
                    found = _one(connection, active)
                    if found is not None:
                        return found
                    _check_room(connection, max_queued)
                    connection.execute(insert(_jobs).values(row))
                    return Job(row["id"], plan_id, JobState.QUEUED, {}, None, 0.0)
            except IntegrityError:
                # Where writers run side by side, somebody else inserted it: look again.
                continue

    def get(self, job_id: str) -> Job | None:
        """A job, or None: never existed, or long forgotten."""
        with self._reader.begin() as connection:
            return _one(connection, _jobs.c.id == job_id)

    def result(self, job_id: str) -> bytes | None:
        """The plan document of a job that succeeded."""
        with self._reader.begin() as connection:
            query = select(_jobs.c.result).where(_jobs.c.id == job_id)
            packed = connection.execute(query).scalar_one_or_none()
        return None if packed is None else zlib.decompress(packed)

    def claim(self, owner: str) -> Claim | None:
        """Take the job that has waited longest, or None."""
        now = time.time()
        oldest = (
            select(_jobs.c.id)
            .where(_jobs.c.state == JobState.QUEUED)
            .order_by(_jobs.c.created_at, _jobs.c.id)
            .limit(1)
            .scalar_subquery()
        )
        statement = (
            _transition(JobState.RUNNING, JobState.QUEUED, where=_jobs.c.id == oldest)
            .values(
                owner=owner,
                lease_until=now + self._lease,
                started_at=now,
                attempts=_jobs.c.attempts + 1,
            )
            .returning(_jobs.c.id, _jobs.c.plan_id, _jobs.c.request, _jobs.c.graph)
        )
        with self._engine.begin() as connection:
            row = connection.execute(statement).one_or_none()
        if row is None:
            return None
        return Claim(row.id, row.plan_id, owner, row.request, zlib.decompress(row.graph))

    def renew(self, claim: Claim, progress: Mapping[str, Any] | None = None) -> bool:
        """Renew a claim, and report progress; False where the job is no longer the worker's."""
        values: dict[str, Any] = {"lease_until": time.time() + self._lease}
        if progress is not None:
            values["progress"] = json.dumps(progress)
        with self._engine.begin() as connection:
            statement = update(_jobs).where(_is_held(claim)).values(values)
            return connection.execute(statement).rowcount == 1

    def holds(self, claim: Claim) -> bool:
        """Whether the job is still the worker's."""
        with self._reader.begin() as connection:
            return bool(connection.execute(select(_jobs.c.id).where(_is_held(claim))).all())

    def succeed(self, claim: Claim, result: bytes) -> bool:
        """Finish a job with its plan document; False where it is no longer the worker's."""
        packed = zlib.compress(result)
        return self._finish(JobState.SUCCEEDED, _is_held(claim), result=packed)

    def fail(self, claim: Claim, problem: Mapping[str, Any]) -> bool:
        """Finish a job with problem details; False where it is no longer the worker's."""
        return self._finish(JobState.FAILED, _is_held(claim), error=json.dumps(problem))

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits or runs; False where it is done or unknown."""
        problem = problem_document(CANCELLED, "the job was cancelled before it was done")
        where = _jobs.c.id == job_id
        return self._finish(JobState.CANCELLED, where, error=json.dumps(problem))

    def release(self, claim: Claim) -> bool:
        """Give a job back to the queue, as if it had never been started."""
        statement = _transition(JobState.QUEUED, JobState.RUNNING, where=_is_held(claim)).values(
            owner=None, lease_until=None, attempts=_jobs.c.attempts - 1
        )
        with self._engine.begin() as connection:
            return connection.execute(statement).rowcount == 1

    def recover(self) -> int:
        """Put jobs whose worker died back into the queue, or fail them; how many there were."""
        lost = _jobs.c.lease_until < time.time()
        retry = lost & (_jobs.c.attempts < self._max_attempts)
        statement = _transition(JobState.QUEUED, JobState.RUNNING, where=retry)
        with self._engine.begin() as connection:
            again = connection.execute(statement.values(owner=None, lease_until=None)).rowcount
        problem = problem_document(
            CRASHED, f"the worker of the job died {self._max_attempts} times; see the service's log"
        )
        statement = _finishing(JobState.FAILED, lost, JobState.RUNNING, error=json.dumps(problem))
        with self._engine.begin() as connection:
            return again + connection.execute(statement).rowcount

    def purge(self, older_than: float) -> int:
        """Forget jobs that finished more than so many seconds ago; how many there were."""
        old = _jobs.c.finished_at < time.time() - older_than
        with self._engine.begin() as connection:
            return connection.execute(delete(_jobs).where(old)).rowcount

    def ping(self) -> None:
        """Read something; raises whatever the database raises."""
        with self._reader.begin() as connection:
            connection.execute(select(_jobs.c.id).limit(1))

    def _finish(self, target: JobState, where: ColumnElement[bool], **values: Any) -> bool:
        sources = [s for s in JobState if target in TRANSITIONS[s]]
        with self._engine.begin() as connection:
            statement = _finishing(target, where, *sources, **values)
            return connection.execute(statement).rowcount == 1


def _transition(target: JobState, *sources: JobState, where: ColumnElement[bool]) -> Update:
    """An UPDATE from any of the sources to the target."""
    if not all(target in TRANSITIONS[source] for source in sources):
        raise AssertionError(f"no transition leads from {sources} to {target}")
    return update(_jobs).where(where, _jobs.c.state.in_(sources)).values(state=target)


def _finishing(
    target: JobState, where: ColumnElement[bool], *sources: JobState, **values: Any
) -> Update:
    """The transition to a final state, which also drops what only the solver needed."""
    return _transition(target, *sources, where=where).values(
        finished_at=time.time(), owner=None, lease_until=None, graph=None, **values
    )


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """The job is still the worker's: it may have been cancelled, or given to another."""
    held = (_jobs.c.owner == claim.owner) & (_jobs.c.state == JobState.RUNNING)
    return (_jobs.c.id == claim.id) & held


def _check_room(connection: Connection, max_queued: int) -> None:
    query = select(func.count()).where(_jobs.c.state == JobState.QUEUED)
    waiting = connection.execute(query).scalar_one()
    if waiting >= max_queued:
        raise ServerError(
            TOO_MANY,
            f"{waiting} jobs are waiting, and the limit is {max_queued}; come back later",
            headers={"Retry-After": "10"},
        )


def _one(connection: Connection, where: ColumnElement[bool]) -> Job | None:
    row = connection.execute(select(*_SUMMARY).where(where)).mappings().one_or_none()
    if row is None:
        return None
    end = row["finished_at"] or time.time()
    return Job(
        id=row["id"],
        plan_id=row["plan_id"],
        state=JobState(row["state"]),
        progress=json.loads(row["progress"] or "{}"),
        error=json.loads(row["error"] or "null"),
        elapsed=max(0.0, end - row["started_at"]) if row["started_at"] else 0.0,
    )
