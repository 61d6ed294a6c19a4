"""REST client of the planning service. Needs torch only to export a live model."""

from autoshard.client.client import Client
from autoshard.client.results import JobProgress, JobStatus, PlanResult

__all__ = ["Client", "JobProgress", "JobStatus", "PlanResult"]
