"""Plans kept on this machine, so that a job can start while the service is down."""

import hashlib
import json
import logging
import os
from pathlib import Path

from autoshard.client.asked import Asked
from autoshard.errors import AutoshardError
from autoshard.graph import graph_digest
from autoshard.mesh import mesh_to_json
from autoshard.outcome import SolveStatus
from autoshard.plan import PLAN_VERSION, Plan
from autoshard_solver_cache import FolderCache

FOLDER_VARIABLE = "AUTOSHARD_CACHE"

_NAMESPACE = "plans"

_MAX_BYTES = 256 << 20
"""Room for all that is in the folder; the least recently used go first."""

_UNFINISHED = frozenset({SolveStatus.TIMED_OUT, SolveStatus.CANCELLED})

_log = logging.getLogger(__name__)


class OfflinePlans:
    """Plans in a folder, by their ids and by what was asked.

    A plan is found again for the same bytes of a graph, and also for another export of the same
    program. What is read is checked: the bytes against their digest, the plan against the
    request. A folder that cannot be used counts as empty.

    Args:
        folder: AUTOSHARD_CACHE, or one in the user's cache folder, if left out.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        path = folder or os.environ.get(FOLDER_VARIABLE) or None
        self._cache = FolderCache(path, max_bytes=_MAX_BYTES)

    def keep(self, plan: Plan, asked: Asked | None = None) -> None:
        """Keep a plan for its id and for what was asked, if it is one, and is final."""
        if not plan.found or plan.certificate.status in _UNFINISHED:
            return
        try:
            self._cache.put(_NAMESPACE, plan.id, plan.to_json().encode())
            if asked is not None:
                self._point(_key(asked.graph_sha256, asked), plan.id)
                self._point(_key(plan.graph.digest, asked), plan.id)
        except (AutoshardError, OSError) as error:
            _log.warning("the plan %s is not kept for when the service is down: %s", plan.id, error)

    def get(self, plan_id: str) -> Plan | None:
        """A plan by its id, or None."""
        try:
            body = self._cache.get(_NAMESPACE, plan_id)
            plan = None if body is None else Plan.from_json(body)
        except (AutoshardError, OSError) as error:
            _log.warning("the plan %s that is kept cannot be read: %s", plan_id, error)
            return None
        return plan if plan is not None and plan.id == plan_id else None

    def find(self, asked: Asked) -> Plan | None:
        """The plan of a request that was answered before, or None."""
        try:
            plan = self._at(_key(asked.graph_sha256, asked))
            # Reading the graph takes longer, and finds it where it was only exported anew.
            plan = plan or self._at(_key(graph_digest(asked.program), asked))
            fits = plan is not None and plan.options == asked.options and plan.mesh == asked.mesh
        except (AutoshardError, OSError) as error:
            _log.warning("no plan can be looked up on this machine: %s", error)
            return None
        return plan if fits else None

    def _at(self, key: str) -> Plan | None:
        pointer = self._cache.get(_NAMESPACE, key)
        return None if pointer is None else self.get(pointer.decode())

    def _point(self, key: str, plan_id: str) -> None:
        # Another version of the service may have made another plan: the latest counts.
        if self._cache.get(_NAMESPACE, key) != plan_id.encode():
            self._cache.delete(_NAMESPACE, key)
            self._cache.put(_NAMESPACE, key, plan_id.encode())


def _key(graph: str, asked: Asked) -> str:
    document = {**asked.document, "mesh": json.loads(mesh_to_json(asked.mesh))}
    text = json.dumps([PLAN_VERSION, graph, document], sort_keys=True)
    return f"asked:{hashlib.sha256(text.encode()).hexdigest()}"
