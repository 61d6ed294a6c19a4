"""Topologies that are stored under names."""

import hashlib
import re
import time
from collections.abc import Callable
from datetime import datetime

from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.projects import SHARED_PROJECT
from autoshard_server.store.tables import topologies
from autoshard_solver_cache import reader

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Names that a topology can be stored under: one segment of a path."""

_NAME = re.compile(NAME_PATTERN)

Precondition = Callable[[str | None], bool]
"""Returns true if a change is allowed, given the stored digest, or None if nothing is stored."""


class StoredTopologyEntry(BaseModel):
    """A topology that was stored under a name."""

    project: str = Field(
        description="the caller's, or `shared`, whose topologies every project can name"
    )
    name: str
    sha256: str = Field(description="of the document; its ETag")
    created_at: datetime
    updated_at: datetime = Field(description="time at which this document was stored")


_ENTRY = tuple(topologies.c[name] for name in StoredTopologyEntry.model_fields)


class TopologyStore:
    """Topologies in the service's database; unlike entries of the cache, they are never evicted.

    Every project can read those of the project `shared`; its own of the same name comes first.

    Args:
        engine: of a migrated database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = reader(engine)

    def put(
        self,
        project: str,
        name: str,
        document: str,
        *,
        max_stored: int,
        precondition: Precondition = lambda _sha256: True,
    ) -> tuple[StoredTopologyEntry, bool]:
        """Store a topology, replacing one of the same name.

        Args:
            project: to which it belongs.
            name: matches `NAME_PATTERN`.
            document: JSON text.
            max_stored: largest number of topologies of a project.
            precondition: returns true if the stored one may be replaced.

        Returns:
            its entry; true if the name is new.

        Raises:
            ServerError: LIMIT, if there are too many; PRECONDITION_FAILED.
        """
        while True:
            try:
                with self._engine.begin() as connection:
                    _check(connection, project, name, precondition)
                    return _put(connection, project, name, document, max_stored)
            except IntegrityError:
                # A concurrent request has stored the first one of this name: replace it.
                continue

    def get(self, project: str, name: str) -> str | None:
        """The document of a topology that a project can read, or None."""
        if not _NAME.fullmatch(name):
            return None
        columns = select(topologies.c.project, topologies.c.document)
        query = columns.where(_readable(project), topologies.c.name == name)
        with self._reader.begin() as connection:
            found = {row.project: row.document for row in connection.execute(query)}
        document: str | None = found.get(project, found.get(SHARED_PROJECT))
        return document

    def list(self, project: str) -> "list[StoredTopologyEntry]":
        """All topologies that a project can read, by name."""
        query = select(*_ENTRY).where(_readable(project))
        with self._reader.begin() as connection:
            rows = connection.execute(query).mappings().all()
        found = [StoredTopologyEntry.model_validate(dict(row)) for row in rows]
        own = {entry.name for entry in found if entry.project == project}
        visible = [entry for entry in found if entry.project == project or entry.name not in own]
        # The order of strings depends on the database.
        return sorted(visible, key=lambda entry: entry.name)

    def delete(
        self, project: str, name: str, *, precondition: Precondition = lambda _sha256: True
    ) -> bool:
        """Delete a topology of a project; False if there is none.

        Raises:
            ServerError: PRECONDITION_FAILED.
        """
        with self._engine.begin() as connection:
            _check(connection, project, name, precondition)
            statement = delete(topologies).where(_is(project, name))
            return connection.execute(statement).rowcount == 1


def _is(project: str, name: str) -> ColumnElement[bool]:
    return (topologies.c.project == project) & (topologies.c.name == name)


def _readable(project: str) -> ColumnElement[bool]:
    return topologies.c.project.in_([project, SHARED_PROJECT])


def _check(connection: Connection, project: str, name: str, precondition: Precondition) -> None:
    # The row stays locked until the transaction ends.
    query = select(topologies.c.sha256).where(_is(project, name)).with_for_update()
    if not precondition(connection.execute(query).scalar_one_or_none()):
        raise ServerError(
            ProblemType.PRECONDITION_FAILED,
            f"topology {name!r} does not satisfy If-Match or If-None-Match; "
            f"GET /v1/topologies/{name} returns its ETag",
        )


def _put(
    connection: Connection, project: str, name: str, document: str, max_stored: int
) -> tuple[StoredTopologyEntry, bool]:
    digest, now = hashlib.sha256(document.encode()).hexdigest(), time.time()
    values = {"sha256": digest, "document": document, "updated_at": now}
    same = _is(project, name)
    is_new = not connection.execute(update(topologies).where(same).values(values)).rowcount
    if is_new:
        of_project = topologies.c.project == project
        stored = connection.execute(select(func.count()).where(of_project)).scalar_one()
        if stored >= max_stored:
            raise limit_error(
                ProblemType.LIMIT,
                f"{stored:,} topologies are stored, and the limit is {max_stored:,}; delete an "
                "unused one, or send the whole topology with the mesh",
                "max_topologies",
                max_stored,
            )
        new = {"project": project, "name": name, "created_at": now, **values}
        connection.execute(insert(topologies).values(new))
    row = connection.execute(select(*_ENTRY).where(same)).mappings().one()
    return StoredTopologyEntry.model_validate(dict(row)), is_new
