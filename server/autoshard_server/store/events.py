"""What happened to a job, in order: what a stream of events sends, and sends again."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, ScalarSelect, Select, delete, func, insert, select

from autoshard_server.store.tables import job_events


class EventKind(StrEnum):
    """What an event tells."""

    STATE = "state"
    """The job came into a state: `state`, and `attempt` or `error` where there is one."""
    PROGRESS = "progress"
    """The solver reported: phase, incumbent, bound and gap."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a job.

    Attributes:
        number: 1, 2, 3, ... within the job, without gaps.
        kind: what it tells.
        created_at: seconds since 1970.
        data: as its kind says.
    """

    number: int
    kind: EventKind
    created_at: float
    data: Mapping[str, Any]


def append_event(
    connection: Connection, job_id: str, kind: EventKind, data: Mapping[str, Any]
) -> None:
    """Write the next event of a job, in the transaction that has just changed its row.

    Having changed the row keeps all others from it, so no two can take one number.
    """
    number: ScalarSelect[int] = (
        select(func.coalesce(func.max(job_events.c.number), 0) + 1)
        .where(job_events.c.job_id == job_id)
        .scalar_subquery()
    )
    values = {"kind": kind, "created_at": time.time(), "data": json.dumps(data)}
    connection.execute(insert(job_events).values(job_id=job_id, number=number, **values))


def read_events(connection: Connection, job_id: str, after: int, limit: int) -> list[Event]:
    """At most so many events of a job whose numbers are larger than `after`, in order."""
    query = (
        select(job_events)
        .where(job_events.c.job_id == job_id, job_events.c.number > after)
        .order_by(job_events.c.number)
        .limit(limit)
    )
    return [
        Event(row.number, EventKind(row.kind), row.created_at, json.loads(row.data))
        for row in connection.execute(query)
    ]


def forget_events(connection: Connection, job_ids: Select[tuple[str]]) -> None:
    """Delete the events of jobs that are about to be deleted."""
    connection.execute(delete(job_events).where(job_events.c.job_id.in_(job_ids)))
