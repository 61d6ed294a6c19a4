"""Topologies that were stored under names, for requests that name them."""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoshard_server.problems import LIMIT, PRECONDITION, ServerError
from autoshard_server.store.tables import topologies
from autoshard_solver_cache import reader

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Names that a topology can be stored under: one segment of a path."""

_NAME = re.compile(NAME_PATTERN)


Fits = Callable[[str | None], bool]
"""Asked with the digest of what is stored under a name, None where nothing is."""


def _anything(_sha256: str | None) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class TopologyInfo:
    """What a list shows of a topology.

    Attributes:
        name: under which it is stored.
        sha256: of the document, 64 hex digits.
        created_at: when the name was first used, seconds since 1970.
        updated_at: when this document came, the same.
    """

    name: str
    sha256: str
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class StoredTopology:
    """A topology as it was stored.

    Attributes:
        info: what a list shows of it.
        document: JSON text.
    """

    info: TopologyInfo
    document: str


_INFO = (
    topologies.c.name,
    topologies.c.sha256,
    topologies.c.created_at,
    topologies.c.updated_at,
)


class TopologyStore:
    """Topologies in the service's database; unlike what the cache holds, none is ever dropped.

    Args:
        engine: of a migrated database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = reader(engine)

    def put(
        self, name: str, document: str, *, most: int, fits: Fits = _anything
    ) -> tuple[TopologyInfo, bool]:
        """Store a topology, in place of another of the name; and whether the name is new.

        Args:
            name: as `NAME_PATTERN` has it.
            document: JSON text.
            most: topologies that may be stored.
            fits: whether what is there may be replaced.

        Raises:
            ServerError: LIMIT, where there are so many already; PRECONDITION, where what is
                there does not fit.
        """
        while True:
            try:
                with self._engine.begin() as connection:
                    _check(connection, name, fits)
                    return _put(connection, name, document, most)
            except IntegrityError:
                # Somebody else has stored the first one of this name: replace it.
                continue

    def get(self, name: str) -> StoredTopology | None:
        """The topology that has the name now, or None."""
        if not _NAME.fullmatch(name):
            return None
        query = select(*_INFO, topologies.c.document).where(topologies.c.name == name)
        with self._reader.begin() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else StoredTopology(TopologyInfo(*row[:-1]), row.document)

    def list(self) -> "list[TopologyInfo]":
        """All of them, by name."""
        with self._reader.begin() as connection:
            found = [TopologyInfo(*row) for row in connection.execute(select(*_INFO))]
        # Databases order letters in ways of their own.
        return sorted(found, key=lambda info: info.name)

    def delete(self, name: str, *, fits: Fits = _anything) -> bool:
        """Forget a topology; False if there is none.

        Raises:
            ServerError: PRECONDITION, where what is there does not fit.
        """
        with self._engine.begin() as connection:
            _check(connection, name, fits)
            statement = delete(topologies).where(topologies.c.name == name)
            return connection.execute(statement).rowcount == 1


def _check(connection: Connection, name: str, fits: Fits) -> None:
    # Nobody replaces it before the transaction ends.
    query = select(topologies.c.sha256).where(topologies.c.name == name).with_for_update()
    if not fits(connection.execute(query).scalar_one_or_none()):
        raise ServerError(
            PRECONDITION,
            f"topology {name!r} is not the one that If-Match or If-None-Match asks for; "
            f"GET /v1/topologies/{name} has its ETag",
        )


def _put(connection: Connection, name: str, document: str, most: int) -> tuple[TopologyInfo, bool]:
    digest, now = hashlib.sha256(document.encode()).hexdigest(), time.time()
    values = {"sha256": digest, "document": document, "updated_at": now}
    same = topologies.c.name == name
    if connection.execute(update(topologies).where(same).values(values)).rowcount:
        created = connection.execute(select(topologies.c.created_at).where(same)).scalar_one()
        return TopologyInfo(name, digest, created, now), False
    held = connection.execute(select(func.count()).select_from(topologies)).scalar_one()
    if held >= most:
        setting = "AUTOSHARD_MAX_TOPOLOGIES"
        raise ServerError(
            LIMIT,
            f"{held:,} topologies are stored, and the limit is {most:,} ({setting}); delete one "
            "that nobody names, or send yours whole with the mesh",
            extensions={"limit": most, "limit_name": setting},
        )
    connection.execute(insert(topologies).values(name=name, created_at=now, **values))
    return TopologyInfo(name, digest, now, now), True
