"""Clients of the planner, at a service or in this process. Only exporting a module needs torch."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.client.client import (
        AsyncClient,
        Client,
    )
    from autoshard.client.transport import Retry
    from autoshard.requests.results import (
        JobProgress,
        JobStatus,
        MeshSearch,
        PlanEntry,
        PlanResult,
        SearchedMesh,
        SearchResult,
        Validation,
    )
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "AsyncClient",
    "Client",
    "JobProgress",
    "JobStatus",
    "MeshSearch",
    "PlanEntry",
    "PlanResult",
    "Retry",
    "SearchResult",
    "SearchedMesh",
    "Validation",
]
