"""An index of the plans in the cache, so that they can be listed without opening them."""

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, RowMapping, delete, insert, select
from sqlalchemy.exc import IntegrityError

from autoshard_server.store.cursor import Cursor, beyond, newest_first
from autoshard_server.store.tables import plans
from autoshard_solver_cache import Cache, StoreUnavailableError, reader

_log = logging.getLogger(__name__)

PLANS = "plans"
"""Namespace of plan documents in the cache, by plan id."""

_BATCH = 100
"""Plans that are added at once, so that nobody else waits for long."""

_LARGEST = (1 << 63) - 1
"""What a column of a database holds; larger figures are shown as this one."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a list shows of a plan.

    Attributes:
        id: of the plan.
        created_at: when it was added here, seconds since 1970.
        size: of the document, bytes.
        status: of the certificate.
        objective: price of a step, seconds; None without a plan.
        bound: proven lower bound of it, seconds.
        gap: (objective - bound) / objective.
        peak_memory: of one rank, bytes.
        mode: training or inference.
        mesh: name and size of each axis.
        topology: its name.
        graph_digest: of the canonical program.
        num_nodes: of the program.
        num_parameters: elements of all parameters together.
    """

    id: str
    created_at: float
    size: int
    status: str
    objective: float | None
    bound: float | None
    gap: float | None
    peak_memory: int | None
    mode: str
    mesh: tuple[tuple[str, int], ...]
    topology: str
    graph_digest: str
    num_nodes: int
    num_parameters: int


class PlanIndex:
    """Summaries of the plans in a cache.

    The cache is the truth: what it has dropped is not listed, and what it got without our
    knowing (from an older release, or an import) is added by `refresh`.

    Args:
        engine: of a migrated database.
        cache: whose plans are listed.
    """

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self._engine = engine
        self._reader = reader(engine)
        self._cache = cache
        self._unfit: frozenset[str] = frozenset()

    def add(self, plan_id: str, document: bytes) -> None:
        """Add a plan, unless it is there; one that cannot be listed is left out, and logged.

        Raises:
            StoreUnavailableError: the database cannot be used now.
        """
        try:
            self._insert(_summary_columns(plan_id, document))
        except StoreUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, other plans are still listed
            self._unfit |= {plan_id}
            _log.warning("the plan %r cannot be listed: %s", plan_id, type(error).__name__)

    def page(
        self, *, after: Cursor | None = None, graph_digest: str | None = None, limit: int = 50
    ) -> list[PlanSummary]:
        """Plans that the cache holds, newest first; fewer than the limit only at the end.

        Args:
            after: the last one that was seen.
            graph_digest: only plans of this program.
            limit: most to return.
        """
        found: list[PlanSummary] = []
        while len(found) < limit:
            wanted = limit - len(found)
            rows = self._rows(after, graph_digest, wanted)
            held = self._cache.existing(PLANS, [row.id for row in rows])
            found += [row for row in rows if row.id in held]
            if len(rows) < wanted:
                break
            after = Cursor(rows[-1].created_at, rows[-1].id)
        return found

    def refresh(self) -> int:
        """Add plans that the cache has, and drop those that it has not; how many in all."""
        with self._reader.begin() as connection:
            known = set(connection.execute(select(plans.c.id)).scalars())
        held = {entry.key for entry in self._cache.entries(PLANS)}
        # What cannot be listed is tried again by the next process, or when it is put anew.
        self._unfit &= held
        missing, gone = sorted(held - known - self._unfit)[:_BATCH], sorted(known - held)[:_BATCH]
        for plan_id in missing:
            document = self._cache.get(PLANS, plan_id)
            if document is not None:
                self.add(plan_id, document)
        if gone:
            with self._engine.begin() as connection:
                connection.execute(delete(plans).where(plans.c.id.in_(gone)))
        return len(missing) + len(gone)

    def _rows(self, after: Cursor | None, digest: str | None, limit: int) -> list[PlanSummary]:
        query = select(plans).order_by(*newest_first(plans)).limit(limit)
        if after is not None:
            query = query.where(beyond(plans, after))
        if digest is not None:
            query = query.where(plans.c.graph_digest == digest)
        with self._reader.begin() as connection:
            return [_summary(row) for row in connection.execute(query).mappings()]

    def _insert(self, values: dict[str, Any]) -> None:
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(plans).values(values))
        except IntegrityError:
            return


def _summary_columns(plan_id: str, document: bytes) -> dict[str, Any]:
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
        "peak_memory": None if memory is None else min(memory["peak"], _LARGEST),
        "mode": plan["options"]["mode"],
        "mesh": json.dumps(axes),
        "topology": plan["mesh"]["topology"]["name"],
        "graph_digest": graph["digest"],
        "num_nodes": graph["num_nodes"],
        "num_parameters": min(graph["num_parameters"], _LARGEST),
    }


def _summary(row: RowMapping) -> PlanSummary:
    axes = tuple((str(name), int(size)) for name, size in json.loads(row["mesh"]))
    return PlanSummary(**{**row, "mesh": axes})
