"""REST clients of the planning service. Need torch only to export a live model."""

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
from autoshard.client.retries import Retry

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
