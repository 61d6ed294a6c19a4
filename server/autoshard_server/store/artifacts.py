"""Artifacts in the cache: uploaded graphs, and an index of the plans."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

from pydantic import Field
from sqlalchemy import Engine, RowMapping, delete, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from autoshard.client import results
from autoshard_server.projects import split_namespace, stored_namespace
from autoshard_server.store.tables import Cursor, newest_first, plans
from autoshard_solver_cache import Cache, EntryInfo, StoreUnavailableError, reader

_log = logging.getLogger(__name__)

GRAPHS = "graphs"
"""Namespace of uploaded graphs in the cache, by the digest of their bytes."""

PLANS = "plans"
"""Namespace of plan documents in the cache, by plan id."""

_BATCH = 100
"""Plans that are indexed by one call, so that other writers do not wait for long."""

_Place: TypeAlias = tuple[str, str]
"""Project and id of a plan."""

_MAX_INTEGER = (1 << 63) - 1
"""Largest integer of a database column; larger numbers are shown as this one."""


class GraphStore:
    """Graphs in the cache: they share its budget, and the least recently used are evicted.

    Args:
        cache: with the graphs.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def put(self, project: str, body: bytes) -> tuple[EntryInfo, bool]:
        """Store a graph for a project; return its metadata, and true if it is new."""
        namespace = stored_namespace(project, GRAPHS)
        digest = hashlib.sha256(body).hexdigest()
        is_new = self._cache.put(namespace, digest, body)
        if not is_new and self._cache.get(namespace, digest) is None:
            # The entry was damaged, and has just been dropped.
            is_new = self._cache.put(namespace, digest, body)
        found = self.info(project, digest)
        return found or EntryInfo(namespace, digest, len(body), len(body), 0.0, 0.0), is_new

    def get(self, project: str, digest: str) -> bytes | None:
        """The bytes of a project's graph, checked against their digest, or None."""
        body = self._cache.get(stored_namespace(project, GRAPHS), digest)
        if body is None or hashlib.sha256(body).hexdigest() == digest:
            return body
        # An intact entry under the wrong key.
        self.delete(project, digest)
        return None

    def info(self, project: str, digest: str) -> EntryInfo | None:
        """Metadata of a project's graph, or None."""
        return self._cache.info(stored_namespace(project, GRAPHS), digest)

    def delete(self, project: str, digest: str) -> bool:
        """Delete a project's graph; False if there is none."""
        return self._cache.delete(stored_namespace(project, GRAPHS), digest)


class PlanEntry(results.PlanEntry):
    """A plan in a list, as the service describes it."""

    size: int = Field(ge=0, description="bytes of the document")
    bound: float | None = Field(description="proven lower bound on a step, seconds")
    num_nodes: int
    num_parameters: int


class PlanIndex:
    """An index of the plans in a cache, by project, so that they are listed without reading them.

    Plans that the cache has evicted are not listed. Plans that were added to the cache without the
    index (by an older release, or an import) are added by `refresh`.

    Args:
        engine: of a migrated database.
        cache: with the plans.
    """

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._cache = cache
        self._invalid: frozenset[_Place] = frozenset()

    def add(self, project: str, plan_id: str, document: bytes) -> None:
        """Add a project's plan, unless it exists; one that cannot be indexed is only logged.

        Raises:
            StoreUnavailableError: the database cannot be used now.
        """
        try:
            values = _columns(plan_id, document)
            with self._engine.begin() as connection:
                connection.execute(insert(plans).values(project=project, **values))
        except IntegrityError:
            return
        except StoreUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001  other plans must still be listed
            self._invalid |= {(project, plan_id)}
            _log.warning("the plan %r cannot be listed: %s", plan_id, type(error).__name__)

    def page(
        self,
        project: str,
        *,
        after: Cursor | None = None,
        graph_digest: str | None = None,
        limit: int = 50,
    ) -> tuple[list[PlanEntry], Cursor | None]:
        """A project's plans in the cache, newest first, and the cursor of the next page.

        Args:
            project: of the plans.
            after: cursor of the previous page.
            graph_digest: only plans of this program.
            limit: largest number to return; fewer are returned only at the end.
        """
        found: list[PlanEntry] = []
        while len(found) < limit:
            rows = self._rows(project, after, graph_digest, limit - len(found))
            stored = stored_namespace(project, PLANS)
            existing = self._cache.existing(stored, [row["id"] for row in rows])
            found += [_entry(row) for row in rows if row["id"] in existing]
            if not rows:
                return found, None
            after = Cursor(rows[-1]["created_at"], rows[-1]["id"])
        return found, after

    def refresh(self) -> int:
        """Add missing plans, and delete evicted ones; return the number of both together."""
        with self._reader.begin() as connection:
            rows = connection.execute(select(plans.c.project, plans.c.id))
            known = {(row.project, row.id) for row in rows}
        cached = set(self._cached())
        # Plans that cannot be indexed are tried again by the next process, or when put anew.
        self._invalid &= cached
        missing = sorted(cached - known - self._invalid)[:_BATCH]
        evicted = sorted(known - cached)[:_BATCH]
        for project, plan_id in missing:
            document = self._cache.get(stored_namespace(project, PLANS), plan_id)
            if document is not None:
                self.add(project, plan_id, document)
        if evicted:
            with self._engine.begin() as connection:
                place = tuple_(plans.c.project, plans.c.id)
                connection.execute(delete(plans).where(place.in_(evicted)))
        return len(missing) + len(evicted)

    def delete(self, project: str, plan_id: str) -> bool:
        """Delete a project's plan from the index and from the cache; False if there is none."""
        same = (plans.c.project == project) & (plans.c.id == plan_id)
        with self._engine.begin() as connection:
            connection.execute(delete(plans).where(same))
        return self._cache.delete(stored_namespace(project, PLANS), plan_id)

    def _cached(self) -> "Iterator[_Place]":
        for namespace in self._cache.namespaces():
            project, kind = split_namespace(namespace)
            if kind == PLANS:
                yield from ((project, entry.key) for entry in self._cache.entries(namespace))

    def _rows(
        self, project: str, after: Cursor | None, digest: str | None, limit: int
    ) -> list[RowMapping]:
        query = newest_first(select(plans), plans, after).limit(limit)
        query = query.where(plans.c.project == project)
        if digest is not None:
            query = query.where(plans.c.graph_digest == digest)
        with self._reader.begin() as connection:
            return list(connection.execute(query).mappings())


def _columns(plan_id: str, document: bytes) -> dict[str, Any]:
    plan = json.loads(document)
    certificate, graph, memory = plan["certificate"], plan["graph"], plan["memory"]
    axes = [[axis["name"], axis["size"]] for axis in plan["mesh"]["axes"]]
    return {
        "id": plan_id,
        "created_at": time.time(),
        "size": len(document),
        "status": certificate["status"],
        "objective": certificate["objective"],
        "bound": certificate["bound"],
        "gap": certificate["gap"],
        "peak_memory": None if memory is None else min(memory["peak"], _MAX_INTEGER),
        "mode": plan["options"]["mode"],
        "mesh": json.dumps(axes),
        "topology": plan["mesh"]["topology"]["name"],
        "graph_digest": graph["digest"],
        "num_nodes": graph["num_nodes"],
        "num_parameters": min(graph["num_parameters"], _MAX_INTEGER),
    }


def _entry(row: RowMapping) -> PlanEntry:
    return PlanEntry.model_validate({**row, "mesh": json.loads(row["mesh"])})
