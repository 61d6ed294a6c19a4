"""The audit log: who changed what, in which project, and when."""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import uuid4

import structlog
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Engine, insert, select

from autoshard_server.callers import Caller
from autoshard_server.store.expiry import delete_expired
from autoshard_server.store.quotas import check_records
from autoshard_server.store.tables import Cursor, audit_events, newest_first
from autoshard_solver_cache import never, reader

_log = structlog.get_logger("autoshard_server.audit")


class AuditAction(StrEnum):
    """Kind of a change of a resource."""

    CREATE = "create"
    """Jobs, graphs, topologies and keys."""
    REPLACE = "replace"
    """Topologies, and keys by new ones."""
    CANCEL = "cancel"
    """Jobs."""
    DELETE = "delete"
    """Plans, graphs, searches, jobs, topologies; keys that are revoked."""


class AuditEvent(BaseModel):
    """A change of a resource of the project."""

    id: str
    created_at: datetime
    caller: str | None = Field(description="name of the key; null without one")
    action: AuditAction
    resource: str = Field(description="its path, or keys/ID for an API key")
    request_id: str | None = Field(
        description="X-Request-ID of the request; null for a command on the service's host"
    )


def insert_event(
    connection: Connection, project: str, action: AuditAction, resource: str, **fields: str | None
) -> None:
    """Insert an event in the transaction that changes the resource; `log_event` it afterwards.

    Args:
        connection: with the transaction.
        project: of the resource.
        action: what is done.
        resource: its path.
        **fields: caller and request_id, if there are any.
    """
    values = {"id": uuid4().hex, "project": project, "created_at": time.time(), **fields}
    connection.execute(insert(audit_events).values(action=action, resource=resource, **values))


def log_event(project: str, action: AuditAction, resource: str, **fields: str | None) -> None:
    """Write an event, which is in the database, into the service's log.

    Args:
        project: of the resource.
        action: what was done.
        resource: its path.
        **fields: caller and request_id, if there are any.
    """
    _log.info("audit", action=action.value, resource=resource, project=project, **fields)


class AuditLog:
    """The audit log in the service's database; each event is also a line of the service's log.

    Args:
        engine: of a migrated database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = reader(engine)

    def add(
        self,
        caller: Caller,
        action: AuditAction,
        resource: str,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        """Record what a caller has done.

        Args:
            caller: who did it.
            action: what was done.
            resource: path of the resource.
            context: with the `request_id` of the request, if there is one.
        """
        request_id = (context or {}).get("request_id")
        fields = {"caller": caller.name, "request_id": request_id}
        with self._engine.begin() as connection:
            insert_event(connection, caller.project, action, resource, **fields)
        log_event(caller.project, action, resource, **fields)

    def check(self, project: str, limit: int) -> None:
        """Refuse what leaves a record of a project, if there are too many of them.

        Raises:
            ServerError: TOO_MANY_JOBS.
        """
        with self._reader.begin() as connection:
            check_records(connection, project, limit)

    def page(
        self, project: str, *, after: Cursor | None = None, limit: int = 50
    ) -> tuple[list[AuditEvent], Cursor | None]:
        """Events of a project, newest first, and the cursor of the next page."""
        query = newest_first(select(audit_events), audit_events, after).limit(limit)
        with self._reader.begin() as connection:
            of_project = query.where(audit_events.c.project == project)
            rows = connection.execute(of_project).mappings().all()
        found = [AuditEvent.model_validate(dict(row)) for row in rows]
        more = len(rows) == limit
        return found, Cursor(rows[-1]["created_at"], rows[-1]["id"]) if more else None

    def purge(self, older_than: float, *, is_over: Callable[[], bool] = never) -> int:
        """Delete events older than some seconds, in batches; return their number."""
        age, before = audit_events.c.created_at, time.time() - older_than
        return delete_expired(self._engine, audit_events, age, before, is_over=is_over)
