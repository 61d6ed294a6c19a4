"""Callers of the service: who sends a request, for which project, and what they may do."""

from dataclasses import dataclass
from enum import StrEnum

from autoshard_server.projects import DEFAULT_PROJECT


class Scope(StrEnum):
    """Permissions of a key, within its project."""

    READ = "read"
    """Reading plans, jobs, graphs and topologies."""
    PLAN = "plan"
    """Submitting and cancelling jobs, uploading, storing and deleting; and reading."""
    METRICS = "metrics"
    """GET /metrics, which counts the jobs and entries of all projects together."""
    ADMIN = "admin"
    """Everything in the project, its audit log included; not the metrics of the service."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    Attributes:
        name: of the key; two keys may have the same name while one replaces the other. None
            without keys.
        scopes: permissions.
        project: of the key; all resources that the caller reads and changes are in it.
    """

    name: str | None
    scopes: frozenset[Scope]
    project: str = DEFAULT_PROJECT


ANONYMOUS = Caller(None, frozenset(Scope))
"""Every caller, if keys are not required."""
