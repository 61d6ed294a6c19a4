"""Topologies that are stored under names."""

import hashlib
import re
import time
from collections.abc import Callable
from datetime import datetime

from pydantic import BaseModel, Field
from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.store.tables import topologies
from autoshard_solver_cache import reader

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Names that a topology can be stored under: one segment of a path."""

_NAME = re.compile(NAME_PATTERN)

Precondition = Callable[[str | None], bool]
"""Returns true if a change is allowed, given the stored digest, or None if nothing is stored."""


class StoredTopologyEntry(BaseModel):
    """A topology that was stored under a name."""

    name: str
    sha256: str = Field(description="of the document; its ETag")
    created_at: datetime
    updated_at: datetime = Field(description="time at which this document was stored")


_ENTRY = tuple(topologies.c[name] for name in StoredTopologyEntry.model_fields)


class TopologyStore:
    """Topologies in the service's database; unlike entries of the cache, they are never evicted.

    Args:
        engine: of a migrated database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = reader(engine)

    def put(
        self,
        name: str,
        document: str,
        *,
        max_stored: int,
        precondition: Precondition = lambda _sha256: True,
    ) -> tuple[StoredTopologyEntry, bool]:
        """Store a topology, replacing one of the same name.

        Args:
            name: matches `NAME_PATTERN`.
            document: JSON text.
            max_stored: largest number of stored topologies.
            precondition: returns true if the stored one may be replaced.

        Returns:
            its entry; true if the name is new.

        Raises:
            ServerError: LIMIT, if there are too many; PRECONDITION_FAILED.
        """
        while True:
            try:
                with self._engine.begin() as connection:
                    _check(connection, name, precondition)
                    return _put(connection, name, document, max_stored)
            except IntegrityError:
                # A concurrent request has stored the first one of this name: replace it.
                continue

    def get(self, name: str) -> str | None:
        """The document of a topology, or None."""
        if not _NAME.fullmatch(name):
            return None
        query = select(topologies.c.document).where(topologies.c.name == name)
        with self._reader.begin() as connection:
            return connection.execute(query).scalar_one_or_none()

    def list(self) -> "list[StoredTopologyEntry]":
        """All topologies, by name."""
        with self._reader.begin() as connection:
            found = [
                StoredTopologyEntry.model_validate(dict(row))
                for row in connection.execute(select(*_ENTRY)).mappings()
            ]
        # The order of strings depends on the database.
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, name: str, *, precondition: Precondition = lambda _sha256: True) -> bool:
        """Delete a topology; False if there is none.

        Raises:
            ServerError: PRECONDITION_FAILED.
        """
        with self._engine.begin() as connection:
            _check(connection, name, precondition)
            statement = delete(topologies).where(topologies.c.name == name)
            return connection.execute(statement).rowcount == 1


def _check(connection: Connection, name: str, precondition: Precondition) -> None:
    # The row stays locked until the transaction ends.
    query = select(topologies.c.sha256).where(topologies.c.name == name).with_for_update()
    if not precondition(connection.execute(query).scalar_one_or_none()):
        raise ServerError(
            ProblemType.PRECONDITION_FAILED,
            f"topology {name!r} does not satisfy If-Match or If-None-Match; "
            f"GET /v1/topologies/{name} returns its ETag",
        )


def _put(
    connection: Connection, name: str, document: str, max_stored: int
) -> tuple[StoredTopologyEntry, bool]:
    digest, now = hashlib.sha256(document.encode()).hexdigest(), time.time()
    values = {"sha256": digest, "document": document, "updated_at": now}
    same = topologies.c.name == name
    is_new = not connection.execute(update(topologies).where(same).values(values)).rowcount
    if is_new:
        stored = connection.execute(select(func.count()).select_from(topologies)).scalar_one()
        if stored >= max_stored:
            raise limit_error(
                ProblemType.LIMIT,
                f"{stored:,} topologies are stored, and the limit is {max_stored:,}; delete an "
                "unused one, or send the whole topology with the mesh",
                "max_topologies",
                max_stored,
            )
        connection.execute(insert(topologies).values(name=name, created_at=now, **values))
    row = connection.execute(select(*_ENTRY).where(same)).mappings().one()
    return StoredTopologyEntry.model_validate(dict(row)), is_new
