"""The queue of jobs: rows in a database, with a state machine.

    queued ──> running ──> succeeded
      │  ^       │  │ └──> failed
      │  └───────┘  └────> cancelled
      └──> cancelled

A running job is leased to the worker that claimed it, which sends heartbeats: each increments
the row's `beat`. Another process that reads the same number for the length of a lease, measured
with its own monotonic clock and only while it can read the database, considers the worker dead and
requeues the job, or fails it after too many attempts. Clocks of different hosts are never compared,
so a clock that jumps cannot take a job from a live worker.

Plan ids depend on the release, so the workers of a release run the jobs that were submitted to it.
If none of them runs a job for the length of a lease while the oldest one waits, they are considered
gone, and the workers of other releases may claim these jobs.

A worker that shuts down releases its job. Every transition is one UPDATE that names the states it
may start from, so two processes cannot both make it, and inserts an event in the same transaction.
A worker stops when the row has another owner or state.
"""

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Engine,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autoshard_server.problems import ProblemType, problem_document
from autoshard_server.projects import DEFAULT_PROJECT
from autoshard_server.store.audit import AuditAction, insert_event, log_event
from autoshard_server.store.expiry import delete_expired
from autoshard_server.store.fair_order import FairOrder, QueuedJobs
from autoshard_server.store.job_rows import (
    JOB_COLUMNS,
    add_state_event,
    delete_events,
    find_job,
    insert_job_event,
    is_leased_by,
    job_of_row,
    request_id_of,
    transition,
)
from autoshard_server.store.jobs import (
    TRANSITIONS,
    Claim,
    EventKind,
    Job,
    JobClass,
    JobEvent,
    JobKind,
    JobState,
    PolledJob,
)
from autoshard_server.store.leases import Leases
from autoshard_server.store.quotas import (
    JobLimits,
    JobUsage,
    check_limits,
    is_caller,
    job_usage,
)
from autoshard_server.store.tables import (
    Cursor,
    is_active,
    job_events,
    job_totals,
    newest_first,
)
from autoshard_server.store.tables import jobs as _jobs
from autoshard_solver_cache import never, reader

_log = logging.getLogger(__name__)


_CLAIMED = (
    *("id", "kind", "plan_id", "project", "attempts", "request", "graph", "context"),
    "created_at",
)

_RELEASE = version("autoshard")

_BATCH = 500
"""Largest number of jobs of one query."""

_Queued = dict[JobClass, list[QueuedJobs]]
_Running = dict[JobClass, dict[tuple[str, str | None], int]]


class JobStore:
    """Jobs in a database; safe to share between threads, processes and hosts.

    Args:
        engine: of a migrated database.
        lease: seconds without a heartbeat after which a worker is considered dead.
        max_attempts: number of starts of a job after which it fails.
        weights: of projects (`FairOrder`).
        clock: monotonic clock, in seconds.
        release: version of autoshard that submits and claims jobs.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lease: float,
        max_attempts: int,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        release: str = _RELEASE,
    ) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._leases = Leases(lease)
        self._releases = Leases(lease)
        self._release = release
        self._is_ours = _jobs.c.release.is_(None) | (_jobs.c.release == release)
        self._fair = {job_class: FairOrder(weights) for job_class in JobClass}
        self._clock = clock
        self._max_attempts = max_attempts

    def submit(
        self,
        plan_id: str,
        request: str,
        graph: bytes,
        *,
        max_queued: int,
        kind: str = JobKind.PLAN,
        project: str = DEFAULT_PROJECT,
        caller: str | None = None,
        max_project: int | None = None,
        max_active: int | None = None,
        max_bytes: int | None = None,
        max_records: int | None = None,
        context: Mapping[str, str] | None = None,
    ) -> Job:
        """Return the project's active job for this result, or insert one and an audit event.

        Args:
            plan_id: id of the result.
            request: JSON text for the solver.
            graph: the uploaded bytes.
            max_queued: largest number of queued jobs.
            kind: of the result.
            project: of the caller.
            caller: name of the key.
            max_project: largest number of queued and running jobs of the project.
            max_active: largest number of queued and running jobs of this caller.
            max_bytes: largest number of bytes in the jobs of this caller.
            max_records: largest number of audit events of the project within a day.
            context: fields for logs and traces of the job.

        Raises:
            ServerError: TOO_MANY_JOBS, if a limit is reached.
        """
        limits = JobLimits(max_queued, max_project, max_active, max_bytes, max_records)
        packed = zlib.compress(graph, 1)
        nbytes = len(packed) + len(request)
        row: dict[str, Any] = {
            "id": uuid4().hex,
            "kind": kind,
            "class": JobClass.of(kind),
            "plan_id": plan_id,
            "project": project,
            "caller": caller,
            "state": JobState.QUEUED,
            "attempts": 0,
            "release": self._release,
            "created_at": time.time(),
            "context": json.dumps(dict(context or {})),
            "request": request,
            "graph": packed,
            "stored_bytes": nbytes,
        }
        last = select(func.coalesce(func.max(_jobs.c.number), 0) + 1).scalar_subquery()
        of_result = (_jobs.c.project == project) & (_jobs.c.plan_id == plan_id) & is_active
        resource = f"/v1/jobs/{row['id']}"
        by = {"caller": caller, "request_id": (context or {}).get("request_id")}
        while True:
            try:
                with self._engine.begin() as connection:
                    found = find_job(connection, of_result)
                    if found is not None:
                        return found
                    check_limits(connection, project, caller, limits, nbytes)
                    connection.execute(insert(_jobs).values(row | {"number": last}))
                    add_state_event(connection, row["id"], JobState.QUEUED)
                    insert_event(connection, project, AuditAction.CREATE, resource, **by)
                    inserted = find_job(connection, _jobs.c.id == row["id"])
            except IntegrityError:
                # A concurrent writer inserted it first.
                continue
            log_event(project, AuditAction.CREATE, resource, **by)
            assert inserted is not None
            return inserted

    def usage(self, project: str, caller: str | None) -> JobUsage:
        """Use of the quotas of a caller."""
        with self._reader.begin() as connection:
            return job_usage(connection, project, caller)

    def oldest_queued(self) -> dict[JobClass, float]:
        """Submission time of the oldest queued job of each class, in seconds since 1970."""
        query = select(_jobs.c["class"], func.min(_jobs.c.created_at)).where(
            is_active, _jobs.c.state == JobState.QUEUED, _jobs.c["class"].in_(JobClass)
        )
        with self._reader.begin() as connection:
            rows = connection.execute(query.group_by(_jobs.c["class"]))
            return {JobClass(name): float(created_at) for name, created_at in rows}

    def get(self, job_id: str) -> Job | None:
        """A job, or None if it never existed or was purged."""
        with self._reader.begin() as connection:
            return find_job(connection, _jobs.c.id == job_id)

    def page(
        self,
        *,
        after: Cursor | None = None,
        project: str = DEFAULT_PROJECT,
        caller: str | None = None,
        states: Sequence[JobState] = (),
        limit: int = 50,
    ) -> tuple[list[Job], Cursor | None]:
        """Jobs of a project, newest first, and the cursor of the next page.

        Args:
            after: cursor of the previous page.
            project: of the jobs.
            caller: only jobs that this caller submitted first.
            states: only jobs in one of these; in any if left out.
            limit: largest number to return.
        """
        query = newest_first(select(*JOB_COLUMNS), _jobs, after).limit(limit)
        query = query.where(_jobs.c.project == project)
        if caller is not None:
            query = query.where(_jobs.c.caller == caller)
        found: list[Job] = []
        with self._reader.begin() as connection:
            # One query each: for several states, databases would sort all of their jobs.
            for state in set(states or JobState):
                of_state = query.where(_jobs.c.state == state)
                found += (job_of_row(row) for row in connection.execute(of_state).mappings())
        found = sorted(found, key=lambda job: (job.created_at, job.id), reverse=True)[:limit]
        more = len(found) == limit
        return found, Cursor(found[-1].created_at, found[-1].id) if more else None

    def count(self) -> dict[JobState, int]:
        """The number of jobs in each state."""
        active = select(_jobs.c.state, func.count()).where(is_active).group_by(_jobs.c.state)
        with self._reader.begin() as connection:
            rows = [*connection.execute(active), *connection.execute(select(job_totals))]
        found = {JobState(state): int(number) for state, number in rows}
        return {state: found.get(state, 0) for state in JobState}

    def events(self, job_id: str, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Events of a job with numbers larger than `after`, in order.

        The last event of a finished job has kind STATE and a final state.
        """
        query = (
            select(job_events)
            .where(job_events.c.job_id == job_id, job_events.c.number > after)
            .order_by(job_events.c.number)
            .limit(limit)
        )
        with self._reader.begin() as connection:
            rows = connection.execute(query).mappings().all()
        return [JobEvent.model_validate({**row, "data": json.loads(row["data"])}) for row in rows]

    def statuses(self, job_ids: Sequence[str]) -> dict[str, PolledJob]:
        """The states of jobs, and the numbers of their last events; without unknown jobs."""
        last = (
            select(func.coalesce(func.max(job_events.c.number), 0))
            .where(job_events.c.job_id == _jobs.c.id)
            .scalar_subquery()
        )
        found: dict[str, PolledJob] = {}
        with self._reader.begin() as connection:
            for first in range(0, len(job_ids), _BATCH):
                of_jobs = _jobs.c.id.in_(job_ids[first : first + _BATCH])
                rows = connection.execute(select(_jobs.c.id, _jobs.c.state, last).where(of_jobs))
                found |= {key: PolledJob(JobState(state), number) for key, state, number in rows}
        return found

    def result(self, job_id: str) -> bytes | None:
        """The document in a job that succeeded; None if the cache has it, or it is damaged."""
        with self._reader.begin() as connection:
            query = select(_jobs.c.result).where(_jobs.c.id == job_id)
            packed = connection.execute(query).scalar_one_or_none()
        try:
            return None if packed is None else zlib.decompress(packed)
        except zlib.error:
            _log.warning("the result of job %s is damaged", job_id)
            return None

    def claim(
        self,
        owner: str,
        classes: Sequence[JobClass] = tuple(JobClass),
        *,
        idle_projects_only: bool = False,
    ) -> Claim | None:
        """Claim the job whose turn it is (`FairOrder`); None if there is none.

        Args:
            owner: the worker.
            classes: of the jobs to claim, the preferred ones first.
            idle_projects_only: only jobs of projects of which no job runs.
        """
        queued, running = self._active()
        if idle_projects_only:
            busy = {project for counts in running.values() for project, _ in counts}
            queued = {
                c: [jobs for jobs in q if jobs.project not in busy] for c, q in queued.items()
            }
        for job_class in classes:
            fair = self._fair[job_class]
            for jobs in fair.order(queued[job_class], running[job_class]):
                claim = self._claim_first(owner, job_class, jobs)
                if claim is not None:
                    fair.served(jobs.project, jobs.caller)
                    return claim
        return None

    def renew(self, claim: Claim, progress: Mapping[str, Any] | None = None) -> bool:
        """Send a heartbeat, and progress if any; False if the lease has ended."""
        values: dict[str, Any] = {"beat": _jobs.c.beat + 1}
        if progress is not None:
            values["progress"] = json.dumps(progress)
        with self._engine.begin() as connection:
            statement = update(_jobs).where(is_leased_by(claim)).values(values)
            renewed = connection.execute(statement).rowcount == 1
            if renewed and progress is not None:
                insert_job_event(connection, claim.id, EventKind.PROGRESS, progress)
            return renewed

    def is_leased(self, claim: Claim) -> bool:
        """True if the worker still has the lease of the job."""
        with self._reader.begin() as connection:
            return bool(connection.execute(select(_jobs.c.id).where(is_leased_by(claim))).all())

    def succeed(self, claim: Claim, result: bytes | None) -> bool:
        """Finish a job.

        Args:
            claim: of the job.
            result: its document; None if the cache has it under the id of the result.

        Returns:
            false if the lease has ended.
        """
        if result is None:
            return self._finish(claim.id, JobState.SUCCEEDED, is_leased_by(claim))
        packed = zlib.compress(result)
        return self._finish(
            claim.id,
            JobState.SUCCEEDED,
            is_leased_by(claim),
            result=packed,
            stored_bytes=len(packed),
        )

    def fail(self, claim: Claim, problem: Mapping[str, Any]) -> bool:
        """Finish a job with problem details; False if the lease has ended."""
        return self._finish(claim.id, JobState.FAILED, is_leased_by(claim), problem)

    def retry(self, claim: Claim, problem: Mapping[str, Any]) -> bool:
        """Requeue a job whose solver died, or fail it after too many attempts.

        Returns:
            false if the lease has ended.
        """
        again = _jobs.c.attempts < self._max_attempts
        return self._requeue(claim.id, is_leased_by(claim) & again) or self.fail(claim, problem)

    def cancel(self, job_id: str) -> bool:
        """Cancel a queued or running job; False if it is finished or unknown."""
        problem = problem_document(
            ProblemType.CANCELLED, "the job was cancelled before it was finished"
        )
        return self._finish(job_id, JobState.CANCELLED, _jobs.c.id == job_id, problem)

    def delete(self, job_id: str) -> bool:
        """Delete a finished job with its events; False if it is not finished, or unknown."""
        finished = (_jobs.c.id == job_id) & ~is_active
        with self._engine.begin() as connection:
            if connection.execute(delete(_jobs).where(finished)).rowcount == 0:
                return False
            connection.execute(delete(job_events).where(job_events.c.job_id == job_id))
            return True

    def release(self, claim: Claim) -> bool:
        """Requeue a job without counting the attempt."""
        return self._requeue(claim.id, is_leased_by(claim), attempts=_jobs.c.attempts - 1)

    def recover(self) -> int:
        """Requeue or fail the jobs of dead workers; return their number.

        Jobs of other releases whose workers are gone count too: all workers may claim them then.
        It must be called several times per lease to detect them.
        """
        running = is_active & (_jobs.c.state == JobState.RUNNING)
        query = select(_jobs.c.id, _jobs.c.beat).where(running)
        with self._reader.begin() as connection:
            beats = {row.id: row.beat for row in connection.execute(query)}
        expired = self._leases.expired(beats, self._clock())
        recovered = sum(self._recover(job_id, beat) for job_id, beat in expired.items())
        return recovered + self._adopt()

    def purge(self, older_than: float, *, is_over: Callable[[], bool] = never) -> int:
        """Delete jobs that finished more than `older_than` seconds ago; return their number.

        They are deleted in batches, until none is left or `is_over` returns true.
        """
        end, before = _jobs.c.finished_at, time.time() - older_than
        return delete_expired(
            self._engine, _jobs, end, before, is_over=is_over, first=delete_events
        )

    def _active(self) -> tuple[_Queued, _Running]:
        """The queued jobs, and the numbers of running ones, of each class and caller.

        It reads the index of active jobs only, and takes no lock: claims check the rows again.
        """
        group = (_jobs.c["class"], _jobs.c.state, _jobs.c.project, _jobs.c.caller)
        query = select(*group, func.min(_jobs.c.number), func.count())
        # A newer release that shares the database may have further classes.
        of_known_class = _jobs.c["class"].in_(JobClass)
        waits_for_others = (_jobs.c.state == JobState.QUEUED) & ~self._is_ours
        query = query.where(is_active, of_known_class, ~waits_for_others).group_by(*group)
        queued: _Queued = {job_class: [] for job_class in JobClass}
        running: _Running = {job_class: {} for job_class in JobClass}
        with self._reader.begin() as connection:
            for name, state, project, caller, first, count in connection.execute(query):
                if state == JobState.QUEUED:
                    queued[JobClass(name)].append(QueuedJobs(project, caller, first))
                else:
                    running[JobClass(name)][project, caller] = count
        return queued, running

    def _claim_first(self, owner: str, job_class: JobClass, jobs: QueuedJobs) -> Claim | None:
        """Claim the oldest queued job of a caller; None if others were faster."""
        oldest = (
            select(_jobs.c.id)
            .where(
                is_active,
                _jobs.c.state == JobState.QUEUED,
                _jobs.c["class"] == job_class,
                _jobs.c.project == jobs.project,
                is_caller(jobs.caller),
                self._is_ours,
            )
            .order_by(_jobs.c.number, _jobs.c.id)
            .limit(1)
            # Concurrent claims get different jobs, and do not wait for each other (PostgreSQL).
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        now = time.time()
        statement = (
            transition(JobState.RUNNING, JobState.QUEUED, where=_jobs.c.id == oldest)
            .values(
                owner=owner,
                beat=_jobs.c.beat + 1,
                started_at=now,
                attempts=_jobs.c.attempts + 1,
            )
            .returning(*(_jobs.c[name] for name in _CLAIMED))
        )
        with self._engine.begin() as connection:
            row = connection.execute(statement).mappings().one_or_none()
            if row is None:
                return None
            add_state_event(connection, row["id"], JobState.RUNNING, attempt=row["attempts"])
        return Claim(
            id=row["id"],
            kind=row["kind"],
            plan_id=row["plan_id"],
            project=row["project"],
            owner=owner,
            request=row["request"],
            graph=zlib.decompress(row["graph"]),
            context=json.loads(row["context"] or "{}"),
            waited=max(0.0, now - row["created_at"]) if row["attempts"] == 1 else None,
        )

    def _recover(self, job_id: str, beat: int) -> bool:
        lost = (_jobs.c.id == job_id) & (_jobs.c.beat == beat)
        if self._requeue(job_id, lost & (_jobs.c.attempts < self._max_attempts)):
            return True
        problem = problem_document(
            ProblemType.SOLVER_CRASHED,
            f"the worker of the job died {self._max_attempts} times; see the service's log",
        )
        running = lost & (_jobs.c.state == JobState.RUNNING)
        return self._finish(job_id, JobState.FAILED, running, problem)

    def _adopt(self) -> int:
        """Let all workers claim the jobs of releases without workers; return their number."""
        group = (_jobs.c.release, _jobs.c.state)
        query = select(*group, func.min(_jobs.c.number)).where(
            is_active, _jobs.c.release != self._release
        )
        with self._reader.begin() as connection:
            rows = connection.execute(query.group_by(*group)).all()
        busy = {release for release, state, _ in rows if state == JobState.RUNNING}
        oldest = {release: first for release, _, first in rows if release not in busy}
        gone = tuple(self._releases.expired(oldest, self._clock()))
        if not gone:
            return 0
        queued = is_active & (_jobs.c.state == JobState.QUEUED) & _jobs.c.release.in_(gone)
        with self._engine.begin() as connection:
            count = connection.execute(update(_jobs).where(queued).values(release=None)).rowcount
        _log.warning("%d jobs of %s have no workers of that release", count, ", ".join(gone))
        return count

    def _requeue(self, job_id: str, where: ColumnElement[bool], **values: Any) -> bool:
        statement = transition(JobState.QUEUED, JobState.RUNNING, where=where)
        with self._engine.begin() as connection:
            requeued = connection.execute(statement.values(owner=None, **values)).rowcount == 1
            if requeued:
                add_state_event(connection, job_id, JobState.QUEUED)
            return requeued

    def _finish(
        self,
        job_id: str,
        target: JobState,
        where: ColumnElement[bool],
        error: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> bool:
        """The transition to a final state, which also deletes the request and the graph."""
        sources = [s for s in JobState if target in TRANSITIONS[s]]
        values = {"request": "{}", "graph": None, "stored_bytes": 0, "owner": None, **values}
        values["finished_at"] = time.time()
        with self._engine.begin() as connection:
            if error is not None:
                error = {**error, **request_id_of(connection, job_id)}
                values["error"] = json.dumps(error)
            statement = transition(target, *sources, where=where).values(values)
            finished = connection.execute(statement).rowcount == 1
            if finished:
                add_state_event(
                    connection, job_id, target, **({} if error is None else {"error": error})
                )
            return finished
