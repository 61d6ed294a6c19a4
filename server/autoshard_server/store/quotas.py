"""Quotas of jobs: how many a queue, a project and a caller may have, and how many bytes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, select

from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.store.jobs import JobState
from autoshard_server.store.tables import audit_events, has_bytes, is_active
from autoshard_server.store.tables import jobs as _jobs

_RETRY = {"Retry-After": "10"}

DAY = 24 * 3600.0
"""Seconds within which records of a project are counted."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Largest numbers of jobs and bytes; None for no limit.

    Attributes:
        queued: queued jobs of all callers together.
        of_project: queued and running jobs of one project.
        of_caller: queued and running jobs of one caller that has a key.
        nbytes: bytes of the requests, graphs and results in the jobs of one caller.
        records: audit events of one project within a day, of which each job makes one.
    """

    queued: int
    of_project: int | None = None
    of_caller: int | None = None
    nbytes: int | None = None
    records: int | None = None


@dataclass(frozen=True, slots=True)
class JobUsage:
    """Use of the quotas of a caller.

    Attributes:
        jobs: queued and running jobs.
        nbytes: compressed bytes of the graphs and results in its jobs.
    """

    jobs: int
    nbytes: int


def job_usage(connection: Connection, project: str, caller: str | None) -> JobUsage:
    """Use of the quotas of a caller; reads two indexes."""
    active = _active_jobs(connection)
    return JobUsage(_of_caller(active, project, caller), _num_bytes(connection, project, caller))


def check_limits(
    connection: Connection, project: str, caller: str | None, limits: JobLimits, nbytes: int
) -> None:
    """Refuse another job if there are too many, in the transaction that inserts it.

    Args:
        connection: of the transaction.
        project: of the caller.
        caller: name of the key; None without keys.
        limits: of the queue.
        nbytes: of the new job.

    Raises:
        ServerError: TOO_MANY_JOBS.
    """
    active = _active_jobs(connection)
    queued = sum(n for (_, _, state), n in active.items() if state == JobState.QUEUED)
    of_project = sum(n for (name, _, _), n in active.items() if name == project)
    checks = [
        (queued, limits.queued, "queued", "max_queued_jobs"),
        (of_project, limits.of_project, "queued or running for your project", "max_project_jobs"),
    ]
    if caller is not None:
        state = "queued or running for your key"
        of_caller = _of_caller(active, project, caller)
        checks.append((of_caller, limits.of_caller, state, "max_caller_jobs"))
    for count, limit, state, setting in checks:
        if limit is not None and count >= limit:
            detail = (
                f"{count} jobs are {state}, and the limit is {limit}; retry later, or cancel one"
            )
            raise limit_error(ProblemType.TOO_MANY_JOBS, detail, setting, limit, headers=_RETRY)
    if limits.records is not None:
        check_records(connection, project, limits.records)
    if limits.nbytes is not None:
        used = _num_bytes(connection, project, caller)
        if used + nbytes > limits.nbytes:
            raise _too_many_bytes(used, nbytes, limits.nbytes)


def check_records(connection: Connection, project: str, limit: int) -> None:
    """Refuse what leaves a record of a project, if there are too many of them.

    Args:
        connection: of a transaction.
        project: of the records.
        limit: largest number of audit events within a day.

    Raises:
        ServerError: TOO_MANY_JOBS.
    """
    of_project = (audit_events.c.project == project) & (
        audit_events.c.created_at > time.time() - DAY
    )
    if has_at_least(connection, select(audit_events.c.created_at).where(of_project), limit):
        raise limit_error(
            ProblemType.TOO_MANY_JOBS,
            f"your project has submitted, stored or deleted {limit:,} things within a day; retry "
            "later",
            "max_project_records",
            limit,
            headers={"Retry-After": "600"},
        )


def has_at_least(connection: Connection, rows: Select[Any], number: int) -> bool:
    """True if there are at least so many rows; reads no more of them than that.

    Args:
        connection: of a transaction.
        rows: a query that an index answers.
        number: of rows, one or more.
    """
    return connection.execute(rows.offset(number - 1).limit(1)).first() is not None


def is_caller(name: str | None) -> ColumnElement[bool]:
    """True for the jobs that a caller submitted first."""
    return _jobs.c.caller.is_(None) if name is None else _jobs.c.caller == name


_ActiveJobs = Mapping[tuple[str, str | None, str], int]
"""Numbers of queued and running jobs by project, caller and state."""


def _active_jobs(connection: Connection) -> _ActiveJobs:
    # Grouped in the index of active jobs, which are few. With a condition on the project, SQLite
    # reads all of the project's jobs instead, also those that are finished.
    group = (_jobs.c.project, _jobs.c.caller, _jobs.c.state)
    query = select(*group, func.count()).where(is_active).group_by(*group)
    return {(project, name, state): n for project, name, state, n in connection.execute(query)}


def _of_caller(active: _ActiveJobs, project: str, caller: str | None) -> int:
    return sum(n for (*owner, _), n in active.items() if owner == [project, caller])


def _num_bytes(connection: Connection, project: str, caller: str | None) -> int:
    of_caller = (_jobs.c.project == project) & is_caller(caller)
    nbytes = select(func.coalesce(func.sum(_jobs.c.stored_bytes), 0)).where(of_caller, has_bytes)
    return int(connection.execute(nbytes).scalar_one())


def _too_many_bytes(used: int, nbytes: int, limit: int) -> ServerError:
    return limit_error(
        ProblemType.TOO_MANY_JOBS,
        f"your jobs contain {used:,} bytes of graphs and results, this one has {nbytes:,}, and the "
        f"limit is {limit:,}; retry when a job has finished, or delete finished jobs",
        "max_caller_job_bytes",
        limit,
        headers=_RETRY,
    )
