"""Jobs: rows in a database, with a state machine.

    queued ──> running ──> succeeded
      │  ^       │  │ └──> failed
      │  └───────┘  └────> cancelled
      └──> cancelled

A running job belongs to the worker that claimed it for as long as it shows signs of life:
each raises the row's `beat`. Who sees one number for the length of a lease, counted by its own
monotonic clock and only while it could look, takes the worker for dead and puts the job back
into the queue, until it has been started too often and fails. No clock is compared with another,
so none that jumps, and no two hosts that disagree, can take a job from a worker that lives.

A worker that shuts down gives its job back. Every transition is one UPDATE that names the
states it may start from, so two processes can never both make it, and writes an event in the
same transaction. The row is the truth: a worker whose job is no longer its own stops.
"""

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Update,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autoshard_server.jobs.admission import check_caller, check_queue
from autoshard_server.jobs.job import TRANSITIONS, Claim, Job, JobState
from autoshard_server.jobs.leases import Leases
from autoshard_server.problems import CANCELLED, CRASHED, problem_document
from autoshard_server.store.cursor import Cursor, beyond, newest_first
from autoshard_server.store.events import (
    Event,
    EventKind,
    append_event,
    forget_events,
    read_events,
)
from autoshard_server.store.tables import ACTIVE_STATES
from autoshard_server.store.tables import jobs as _jobs
from autoshard_solver_cache import reader

_log = logging.getLogger(__name__)

_SUMMARY = (
    _jobs.c.id,
    _jobs.c.kind,
    _jobs.c.plan_id,
    _jobs.c.caller,
    _jobs.c.state,
    _jobs.c.attempts,
    _jobs.c.created_at,
    _jobs.c.started_at,
    _jobs.c.finished_at,
    _jobs.c.progress,
    _jobs.c.error,
)


class JobStore:
    """Jobs in a database; safe to share between threads, processes and hosts.

    Args:
        engine: of a migrated database.
        lease: seconds without a sign of life after which a worker counts as dead.
        max_attempts: times that a job is started before it fails for good.
        clock: seconds by a clock that never jumps.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lease: float,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._leases = Leases(lease)
        self._clock = clock
        self._max_attempts = max_attempts

    def submit(
        self,
        plan_id: str,
        request: str,
        graph: bytes,
        *,
        max_queued: int,
        kind: str = "plan",
        caller: str | None = None,
        max_active: int | None = None,
        context: Mapping[str, str] | None = None,
    ) -> Job:
        """The job that makes this plan: the one under way, else a new one.

        Args:
            plan_id: id of what the job makes; jobs under way with the same id are the same.
            request: JSON text for the solver.
            graph: the uploaded bytes.
            max_queued: most jobs that may wait.
            kind: what the job makes.
            caller: who asks.
            max_active: most jobs of this caller that may wait or run.
            context: what logs and traces of the work should carry.

        Raises:
            ServerError: TOO_MANY, where a limit is reached.
        """
        row: dict[str, Any] = {
            "id": uuid4().hex,
            "kind": kind,
            "plan_id": plan_id,
            "caller": caller,
            "state": JobState.QUEUED,
            "attempts": 0,
            "created_at": time.time(),
            "context": json.dumps(dict(context or {})),
            "request": request,
            "graph": zlib.compress(graph, 1),
        }
        last = select(func.coalesce(func.max(_jobs.c.number), 0) + 1).scalar_subquery()
        while True:
            active = (_jobs.c.plan_id == plan_id) & _jobs.c.state.in_(ACTIVE_STATES)
            try:
                with self._engine.begin() as connection:
                    found = _one(connection, active)
                    if found is not None:
                        return found
                    check_queue(connection, max_queued)
                    check_caller(connection, caller, max_active)
                    connection.execute(insert(_jobs).values(row | {"number": last}))
                    _tell(connection, row["id"], JobState.QUEUED)
                    made = _one(connection, _jobs.c.id == row["id"])
                    assert made is not None
                    return made
            except IntegrityError:
                # Where writers run side by side, somebody else inserted it: look again.
                continue

    def get(self, job_id: str) -> Job | None:
        """A job, or None: never existed, or long forgotten."""
        with self._reader.begin() as connection:
            return _one(connection, _jobs.c.id == job_id)

    def page(
        self,
        *,
        after: Cursor | None = None,
        caller: str | None = None,
        states: tuple[JobState, ...] = (),
        limit: int = 50,
    ) -> list[Job]:
        """Jobs, newest first.

        Args:
            after: the `Job.cursor` of the last one that was seen.
            caller: only jobs of this one.
            states: only jobs in one of these; in any if left out.
            limit: most to return.
        """
        query = select(*_SUMMARY).order_by(*newest_first(_jobs)).limit(limit)
        if after is not None:
            query = query.where(beyond(_jobs, after))
        if caller is not None:
            query = query.where(_jobs.c.caller == caller)
        if states:
            query = query.where(_jobs.c.state.in_(states))
        with self._reader.begin() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def count(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        query = select(_jobs.c.state, func.count()).group_by(_jobs.c.state)
        with self._reader.begin() as connection:
            found = {JobState(state): int(n) for state, n in connection.execute(query)}
        return {state: found.get(state, 0) for state in JobState}

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """What happened to a job since the event with this number, in order.

        The last event of a job that is done has kind STATE and a state that is done.
        """
        with self._reader.begin() as connection:
            return read_events(connection, job_id, after, limit)

    def result(self, job_id: str) -> bytes | None:
        """The document that a job which succeeded has made; None where it is damaged."""
        with self._reader.begin() as connection:
            query = select(_jobs.c.result).where(_jobs.c.id == job_id)
            packed = connection.execute(query).scalar_one_or_none()
        try:
            return None if packed is None else zlib.decompress(packed)
        except zlib.error:
            _log.warning("the result of job %s is damaged", job_id)
            return None

    def claim(self, owner: str) -> Claim | None:
        """Take the job that has waited longest, or None."""
        oldest = (
            select(_jobs.c.id)
            .where(_jobs.c.state == JobState.QUEUED)
            .order_by(_jobs.c.number, _jobs.c.id)
            .limit(1)
            # Two that look at once get different jobs, and neither waits (PostgreSQL).
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        statement = (
            _transition(JobState.RUNNING, JobState.QUEUED, where=_jobs.c.id == oldest)
            .values(
                owner=owner,
                beat=_jobs.c.beat + 1,
                started_at=time.time(),
                attempts=_jobs.c.attempts + 1,
            )
            .returning(*(_jobs.c[name] for name in _CLAIMED))
        )
        with self._engine.begin() as connection:
            row = connection.execute(statement).mappings().one_or_none()
            if row is None:
                return None
            _tell(connection, row["id"], JobState.RUNNING, attempt=row["attempts"])
        graph = zlib.decompress(row["graph"])
        context = json.loads(row["context"] or "{}")
        return Claim(row["id"], row["kind"], row["plan_id"], owner, row["request"], graph, context)

    def renew(self, claim: Claim, progress: Mapping[str, Any] | None = None) -> bool:
        """Show a sign of life, and report progress; False where the job is no longer ours."""
        values: dict[str, Any] = {"beat": _jobs.c.beat + 1}
        if progress is not None:
            values["progress"] = json.dumps(progress)
        with self._engine.begin() as connection:
            statement = update(_jobs).where(_is_held(claim)).values(values)
            held = connection.execute(statement).rowcount == 1
            if held and progress is not None:
                append_event(connection, claim.id, EventKind.PROGRESS, progress)
            return held

    def holds(self, claim: Claim) -> bool:
        """Whether the job is still the worker's."""
        with self._reader.begin() as connection:
            return bool(connection.execute(select(_jobs.c.id).where(_is_held(claim))).all())

    def succeed(self, claim: Claim, result: bytes) -> bool:
        """Finish a job with its document; False where it is no longer the worker's."""
        packed = zlib.compress(result)
        return self._finish(claim.id, JobState.SUCCEEDED, _is_held(claim), {"result": packed})

    def fail(self, claim: Claim, problem: Mapping[str, Any]) -> bool:
        """Finish a job with problem details; False where it is no longer the worker's."""
        return self._finish(claim.id, JobState.FAILED, _is_held(claim), error=problem)

    def retry(self, claim: Claim, problem: Mapping[str, Any]) -> bool:
        """Give a job back whose solver died; it fails where it was started too often.

        Returns:
            whether it was still the worker's.
        """
        again = _jobs.c.attempts < self._max_attempts
        return self._give_back(claim.id, _is_held(claim) & again) or self.fail(claim, problem)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that waits or runs; False where it is done or unknown."""
        problem = problem_document(CANCELLED, "the job was cancelled before it was done")
        return self._finish(job_id, JobState.CANCELLED, _jobs.c.id == job_id, error=problem)

    def release(self, claim: Claim) -> bool:
        """Give a job back to the queue, as if it had never been started."""
        return self._give_back(claim.id, _is_held(claim), attempts=_jobs.c.attempts - 1)

    def recover(self) -> int:
        """Put jobs whose worker died back into the queue, or fail them; how many there were.

        Workers are given up by looking often: several times in the length of a lease.
        """
        query = select(_jobs.c.id, _jobs.c.beat).where(_jobs.c.state == JobState.RUNNING)
        with self._reader.begin() as connection:
            beats = {row.id: row.beat for row in connection.execute(query)}
        lost = self._leases.lost(beats, self._clock())
        return sum(self._recover(job_id, beat) for job_id, beat in lost.items())

    def purge(self, older_than: float) -> int:
        """Forget jobs that finished more than so many seconds ago; how many there were."""
        old = _jobs.c.finished_at < time.time() - older_than
        with self._engine.begin() as connection:
            forget_events(connection, select(_jobs.c.id).where(old))
            return connection.execute(delete(_jobs).where(old)).rowcount

    def ping(self) -> None:
        """Read something; raises whatever the database raises."""
        with self._reader.begin() as connection:
            connection.execute(select(_jobs.c.id).limit(1))

    def _recover(self, job_id: str, beat: int) -> bool:
        lost = (_jobs.c.id == job_id) & (_jobs.c.beat == beat)
        if self._give_back(job_id, lost & (_jobs.c.attempts < self._max_attempts)):
            return True
        problem = problem_document(
            CRASHED, f"the worker of the job died {self._max_attempts} times; see the service's log"
        )
        running = lost & (_jobs.c.state == JobState.RUNNING)
        return self._finish(job_id, JobState.FAILED, running, error=problem)

    def _give_back(self, job_id: str, where: ColumnElement[bool], **values: Any) -> bool:
        statement = _transition(JobState.QUEUED, JobState.RUNNING, where=where)
        with self._engine.begin() as connection:
            given = connection.execute(statement.values(owner=None, **values)).rowcount == 1
            if given:
                _tell(connection, job_id, JobState.QUEUED)
            return given

    def _finish(
        self,
        job_id: str,
        target: JobState,
        where: ColumnElement[bool],
        values: Mapping[str, Any] | None = None,
        *,
        error: Mapping[str, Any] | None = None,
    ) -> bool:
        """The transition to a final state, which also drops what only the solver needed."""
        sources = [s for s in JobState if target in TRANSITIONS[s]]
        final = {"finished_at": time.time(), "owner": None, "graph": None, **(values or {})}
        if error is not None:
            final["error"] = json.dumps(error)
        statement = _transition(target, *sources, where=where).values(final)
        with self._engine.begin() as connection:
            done = connection.execute(statement).rowcount == 1
            if done:
                _tell(connection, job_id, target, **({} if error is None else {"error": error}))
            return done


_CLAIMED = ("id", "kind", "plan_id", "attempts", "request", "graph", "context")


def _tell(connection: Connection, job_id: str, state: JobState, **more: Any) -> None:
    append_event(connection, job_id, EventKind.STATE, {"state": state, **more})


def _transition(target: JobState, *sources: JobState, where: ColumnElement[bool]) -> Update:
    """An UPDATE from any of the sources to the target."""
    if not all(target in TRANSITIONS[source] for source in sources):
        raise AssertionError(f"no transition leads from {sources} to {target}")
    return update(_jobs).where(where, _jobs.c.state.in_(sources)).values(state=target)


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """The job is still the worker's: it may have been cancelled, or given to another."""
    held = (_jobs.c.owner == claim.owner) & (_jobs.c.state == JobState.RUNNING)
    return (_jobs.c.id == claim.id) & held


def _one(connection: Connection, where: ColumnElement[bool]) -> Job | None:
    row = connection.execute(select(*_SUMMARY).where(where)).mappings().one_or_none()
    return None if row is None else _job(row)


def _job(row: RowMapping) -> Job:
    parsed = {
        "state": JobState(row["state"]),
        "progress": json.loads(row["progress"] or "{}"),
        "error": json.loads(row["error"] or "null"),
    }
    return Job(**{**row, **parsed})
