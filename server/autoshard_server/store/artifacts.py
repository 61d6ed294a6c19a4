"""Artifacts in the cache: uploaded graphs, and an index of the plans."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Table,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autoshard.requests.results import PlanEntry
from autoshard_server.projects import stored_namespace
from autoshard_server.store.tables import Cursor, newest_first, plans, unindexed_plans
from autoshard_solver_cache import (
    Cache,
    EntryInfo,
    StoreUnavailableError,
    in_batches,
    never,
    reader,
)
from autoshard_solver_cache.tables import entries

_log = logging.getLogger(__name__)

GRAPHS = "graphs"
"""Namespace of uploaded graphs in the cache, by the digest of their bytes."""

PLANS = "plans"
"""Namespace of plan documents in the cache, by plan id."""

_BATCH = 10
"""Plans that one batch of `refresh` reads and adds."""

_RELEASE = version("autoshard")

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


class PlanIndex:
    """An index of the plans in a cache, by project, so that they are listed without reading them.

    Triggers of the database delete what the cache drops, and note plans that were added without the
    index (by a search, or an import), which `refresh` adds.

    Args:
        engine: of a migrated database.
        cache: with the plans.
    """

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._cache = cache

    def add(self, project: str, plan_id: str, document: bytes) -> None:
        """Add a project's plan that is in the cache; one that cannot be indexed is only logged.

        Raises:
            StoreUnavailableError: the database cannot be used now.
        """
        self._add([(project, plan_id, document)])

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
        query = newest_first(select(plans), plans, after).limit(limit)
        query = query.where(plans.c.project == project)
        if graph_digest is not None:
            query = query.where(plans.c.graph_digest == graph_digest)
        with self._reader.begin() as connection:
            rows = connection.execute(query).mappings().all()
        more = len(rows) == limit
        next_page = Cursor(rows[-1]["created_at"], rows[-1]["id"]) if more else None
        return [_entry(row) for row in rows], next_page

    def refresh(self, *, is_over: Callable[[], bool] = never) -> int:
        """Add the plans that were added to the cache without the index; return their number."""
        return in_batches(self._refresh, is_over=is_over)

    def _refresh(self, limit: int) -> int:
        missing = select(unindexed_plans.c.project, unindexed_plans.c.id)
        # A plan that this release cannot read may be one of a newer release.
        untried = unindexed_plans.c.tried_by.is_distinct_from(_RELEASE)
        with self._reader.begin() as connection:
            rows = connection.execute(missing.where(untried).limit(min(limit, _BATCH))).all()
        read = ((p, key, self._cache.read(stored_namespace(p, PLANS), key)) for p, key in rows)
        # Reading a damaged plan has deleted it, here too.
        self._add([(p, key, document) for p, key, document in read if document is not None])
        return len(rows)

    def _add(self, documents: Sequence[tuple[str, str, bytes]]) -> None:
        """Add plans, in one transaction; those that cannot be indexed are only logged."""
        rows = [(p, key, _columns_or_error(p, key, document)) for p, key, document in documents]
        with self._engine.begin() as connection:
            for project, plan_id, values in rows:
                error = values if isinstance(values, Exception) else _insert(connection, values)
                if error is not None:
                    noted = update(unindexed_plans).where(_is(unindexed_plans, project, plan_id))
                    connection.execute(noted.values(tried_by=_RELEASE))
                    _log.warning("the plan %r cannot be listed: %s", plan_id, type(error).__name__)


def _columns_or_error(project: str, plan_id: str, document: bytes) -> dict[str, Any] | Exception:
    try:
        return {"project": project, **_columns(plan_id, document)}
    except Exception as error:  # noqa: BLE001  other plans must still be listed
        return error


def _insert(connection: Connection, values: Mapping[str, Any]) -> Exception | None:
    """Insert a plan, unless it is in the index, or not in the cache any more.

    Returns:
        the error of values that the database does not accept.
    """
    project, plan_id = values["project"], values["id"]
    namespace = stored_namespace(project, PLANS)
    cached = (entries.c.namespace == namespace) & (entries.c.key == plan_id)
    # The lock (on SQLite, the transaction) keeps the cache from dropping it meanwhile.
    in_cache = select(entries.c.key).where(cached).with_for_update(read=True, key_share=True)
    indexed = select(plans.c.id).where(_is(plans, project, plan_id))
    try:
        with connection.begin_nested():
            if connection.execute(in_cache).first() and not connection.execute(indexed).first():
                connection.execute(insert(plans).values(values))
    except IntegrityError:
        # Another process was faster.
        pass
    except StoreUnavailableError:
        raise
    except Exception as error:  # noqa: BLE001  as above
        return error
    connection.execute(delete(unindexed_plans).where(_is(unindexed_plans, project, plan_id)))
    return None


def _is(table: Table, project: str, plan_id: str) -> ColumnElement[bool]:
    return (table.c.project == project) & (table.c.id == plan_id)


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
