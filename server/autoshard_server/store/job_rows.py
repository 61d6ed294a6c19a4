"""Rows of jobs and of their events: reads, and the statements of a transition.

Each works in the caller's transaction, so that a job and its events change together.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    ScalarSelect,
    Update,
    delete,
    func,
    insert,
    select,
    update,
)

from autoshard_server.store.jobs import TRANSITIONS, Claim, EventKind, Job, JobState
from autoshard_server.store.tables import job_events
from autoshard_server.store.tables import jobs as _jobs

JOB_COLUMNS = tuple(_jobs.c[name] for name in Job.__slots__)


def delete_events(connection: Connection, of_jobs: ColumnElement[bool]) -> None:
    """Delete the events of jobs that are about to be deleted."""
    # With the query in the statement, PostgreSQL may read all events.
    ids = connection.execute(select(_jobs.c.id).where(of_jobs)).scalars().all()
    connection.execute(delete(job_events).where(job_events.c.job_id.in_(ids)))


def add_state_event(connection: Connection, job_id: str, state: JobState, **more: Any) -> None:
    """Insert the event of a transition."""
    insert_job_event(connection, job_id, EventKind.STATE, {"state": state, **more})


def insert_job_event(
    connection: Connection, job_id: str, kind: EventKind, data: Mapping[str, Any]
) -> None:
    """Insert the next event of a job, in the transaction that has just updated its row.

    The update locks the row, so no two events can have the same number.
    """
    number: ScalarSelect[int] = (
        select(func.coalesce(func.max(job_events.c.number), 0) + 1)
        .where(job_events.c.job_id == job_id)
        .scalar_subquery()
    )
    values = {"kind": kind, "created_at": time.time(), "data": json.dumps(data)}
    connection.execute(insert(job_events).values(job_id=job_id, number=number, **values))


def transition(target: JobState, *sources: JobState, where: ColumnElement[bool]) -> Update:
    """An UPDATE from any of the sources to the target."""
    if not all(target in TRANSITIONS[source] for source in sources):
        raise AssertionError(f"there is no transition from {sources} to {target}")
    return update(_jobs).where(where, _jobs.c.state.in_(sources)).values(state=target)


def is_leased_by(claim: Claim) -> ColumnElement[bool]:
    """The worker still has the lease: the job was neither cancelled nor claimed by another one."""
    leased = (_jobs.c.owner == claim.owner) & (_jobs.c.state == JobState.RUNNING)
    return (_jobs.c.id == claim.id) & leased


def find_job(connection: Connection, where: ColumnElement[bool]) -> Job | None:
    """The only job that a condition holds for; None if there is none."""
    row = connection.execute(select(*JOB_COLUMNS).where(where)).mappings().one_or_none()
    return None if row is None else job_of_row(row)


def request_id_of(connection: Connection, job_id: str) -> dict[str, str]:
    """The member `request_id` of the problem of a job: the id of the request that submitted it."""
    context = connection.execute(select(_jobs.c.context).where(_jobs.c.id == job_id)).scalar()
    found = json.loads(context or "{}").get("request_id")
    return {} if found is None else {"request_id": found}


def job_of_row(row: RowMapping) -> Job:
    """The job of a row with `JOB_COLUMNS`."""
    parsed = {
        "state": JobState(row["state"]),
        "progress": json.loads(row["progress"] or "{}"),
        "error": json.loads(row["error"] or "null"),
    }
    return Job(**{**row, **parsed})
