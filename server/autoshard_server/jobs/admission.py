"""Whether another job may join the queue; asked in the transaction that adds it."""

from sqlalchemy import Connection, func, select

from autoshard_server.jobs.job import JobState
from autoshard_server.problems import TOO_MANY, ServerError
from autoshard_server.store.tables import ACTIVE_STATES, jobs


def check_queue(connection: Connection, max_queued: int) -> None:
    """Refuse another job where too many wait.

    Raises:
        ServerError: TOO_MANY.
    """
    query = select(func.count()).where(jobs.c.state == JobState.QUEUED)
    waiting = connection.execute(query).scalar_one()
    if waiting >= max_queued:
        raise ServerError(
            TOO_MANY,
            f"{waiting} jobs are waiting, and the limit is {max_queued}; come back later",
            headers={"Retry-After": "10"},
            extensions={"limit": max_queued, "limit_name": "AUTOSHARD_MAX_QUEUED_JOBS"},
        )


def check_caller(connection: Connection, caller: str | None, max_active: int | None) -> None:
    """Refuse another job where too many of its caller wait or run.

    Raises:
        ServerError: TOO_MANY.
    """
    if caller is None or max_active is None:
        return
    theirs = (jobs.c.caller == caller) & jobs.c.state.in_(ACTIVE_STATES)
    active = connection.execute(select(func.count()).where(theirs)).scalar_one()
    if active >= max_active:
        raise ServerError(
            TOO_MANY,
            f"{active} of your jobs wait or run, and the limit is {max_active} for each caller; "
            "come back when one is done, or cancel one",
            headers={"Retry-After": "10"},
            extensions={"limit": max_active, "limit_name": "AUTOSHARD_MAX_CALLER_JOBS"},
        )
