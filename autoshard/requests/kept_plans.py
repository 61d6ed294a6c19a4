"""Plans stored on this machine, so that a job can start while the service is down."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Literal

from autoshard.base.outcome import SolveStatus
from autoshard.errors import AutoshardError, ServiceUnavailableError
from autoshard.graph import graph_digest
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.plan import PLAN_VERSION, Plan
from autoshard.requests.models import PlanRequest
from autoshard.requests.results import PlanResult
from autoshard_solver_cache import FolderCache

Offline = Literal["fallback", "never", "only"]
"""Use of plans kept on this machine: if the service cannot be reached, never, or without
contacting the service."""

FOLDER_VARIABLE = "AUTOSHARD_CACHE"

MAX_BYTES = 256 << 20
"""Size limit of the cache folder; the least recently used entries are dropped first."""

_NAMESPACE = "plans"

_UNFINISHED = frozenset({SolveStatus.TIMED_OUT, SolveStatus.CANCELLED})

_log = logging.getLogger(__name__)


def open_folder(folder: str | Path | None = None) -> FolderCache:
    """Open a cache folder: the one given, that of AUTOSHARD_CACHE, or the user's default."""
    return FolderCache(folder or os.environ.get(FOLDER_VARIABLE) or None, max_bytes=MAX_BYTES)


class OfflinePlans:
    """Plans in a cache folder, by plan id and by request.

    A request finds its plan by the bytes of the graph, or else by the program, so that another
    export of the model finds it too. Plans that are read are checked: the bytes against their
    digest, the plan against the request. A folder that cannot be used counts as empty.

    Args:
        folder: as in `open_folder`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._cache = open_folder(folder)

    @classmethod
    def of(cls, cache: bool | str | Path) -> "OfflinePlans | None":  # noqa: FBT001  as callers give it
        """The plans in a folder, or the default one if True; None if plans are not kept."""
        return None if cache is False else cls(None if cache is True else cache)

    def keep(self, plan: Plan, request: PlanRequest | None = None) -> None:
        """Keep a plan under its id and its request, unless it is not final."""
        if not plan.found or plan.certificate.status in _UNFINISHED:
            return
        try:
            self._cache.put(_NAMESPACE, plan.id, plan.to_json().encode())
            if request is not None:
                for graph in (request.graph_sha256, plan.graph.digest):
                    self._point(_key(graph, request, plan.mesh), plan.id)
        except (AutoshardError, OSError) as error:
            _log.warning("the plan %s is not kept on this machine: %s", plan.id, error)

    def get(self, plan_id: str) -> Plan | None:
        """Return a plan by its id, or None."""
        try:
            body = self._cache.get(_NAMESPACE, plan_id)
            plan = None if body is None else Plan.from_json(body)
        except (AutoshardError, OSError) as error:
            _log.warning("the plan %s kept on this machine cannot be read: %s", plan_id, error)
            return None
        return plan if plan is not None and plan.id == plan_id else None

    def ids(self, prefix: str) -> list[str]:
        """Ids of the plans kept here that begin with some digits."""
        try:
            keys = [entry.key for entry in self._cache.entries(_NAMESPACE)]
            # Requests are in the same namespace, with the id of a plan as contents.
            found = {
                key: self._cache.get(_NAMESPACE, key) for key in keys if key.startswith(prefix)
            }
        except (AutoshardError, OSError) as error:
            _log.warning("plans kept on this machine cannot be listed: %s", error)
            return []
        return [key for key, body in found.items() if body is not None and len(body) > len(key)]

    def delete(self, plan_id: str) -> bool:
        """Delete a plan by its id; False if it is not kept here."""
        try:
            return self._cache.delete(_NAMESPACE, plan_id)
        except (AutoshardError, OSError) as error:
            _log.warning("the plan %s kept on this machine is not deleted: %s", plan_id, error)
            return False

    def find(self, request: PlanRequest) -> Plan | None:
        """Return the plan of an earlier request that was the same, or None."""
        try:
            mesh = request.mesh({})
            plan = self._at(_key(request.graph_sha256, request, mesh))
            # Reading the graph takes longer, and finds the plan of another export.
            if plan is None and not request.of_config:
                plan = self._at(_key(graph_digest(request.program), request, mesh))
        except (AutoshardError, OSError) as error:
            _log.warning("plans kept on this machine cannot be looked up: %s", error)
            return None
        fits = plan is not None and plan.options == request.options and plan.mesh == mesh
        return plan if fits else None

    def _at(self, key: str) -> Plan | None:
        pointer = self._cache.get(_NAMESPACE, key)
        return None if pointer is None else self.get(pointer.decode())

    def _point(self, key: str, plan_id: str) -> None:
        # Another version of the service may have made another plan: the latest one is stored.
        if self._cache.get(_NAMESPACE, key) != plan_id.encode():
            self._cache.delete(_NAMESPACE, key)
            self._cache.put(_NAMESPACE, key, plan_id.encode())


def require_plan(kept: OfflinePlans | None, request: PlanRequest) -> PlanResult:
    """Return the plan of an earlier request that was the same.

    Raises:
        ServiceUnavailableError: none is kept on this machine.
    """
    plan = None if kept is None else kept.find(request)
    if plan is None:
        raise ServiceUnavailableError("no plan of this request is kept on this machine")
    return PlanResult(plan, cached=True, source="offline")


def _key(graph: str | None, request: PlanRequest, mesh: Mesh) -> str:
    document = {**request.document, "mesh": json.loads(mesh_to_json(mesh))}
    text = json.dumps([PLAN_VERSION, graph, document], sort_keys=True)
    return f"request:{hashlib.sha256(text.encode()).hexdigest()}"
