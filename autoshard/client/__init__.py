"""Clients of the planner, at a service or in this process. Only exporting a module needs torch."""

from autoshard.client.client import AsyncClient, Client
from autoshard.client.results import (
    JobProgress,
    JobStatus,
    MeshSearch,
    PlanEntry,
    PlanResult,
    SearchedMesh,
    SearchResult,
    Validation,
)
from autoshard.client.transport import Retry

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
