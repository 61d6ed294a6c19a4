"""The service's database: its tables and migrations, and a store for each kind of rows.

`autoshard_server.store.database` opens and migrates it; solver processes do not import that.
"""

from autoshard_server.store.api_keys import ApiKey, ApiKeyStore
from autoshard_server.store.artifacts import GRAPHS, PLANS, GraphStore, PlanEntry, PlanIndex
from autoshard_server.store.idempotency import IdempotencyRecord, IdempotencyStore
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import (
    TRANSITIONS,
    Claim,
    EventKind,
    Job,
    JobEvent,
    JobKind,
    JobState,
    known_kind,
)
from autoshard_server.store.tables import Cursor
from autoshard_server.store.topologies import NAME_PATTERN, StoredTopologyEntry, TopologyStore

__all__ = [
    "GRAPHS",
    "NAME_PATTERN",
    "PLANS",
    "TRANSITIONS",
    "ApiKey",
    "ApiKeyStore",
    "Claim",
    "Cursor",
    "EventKind",
    "GraphStore",
    "IdempotencyRecord",
    "IdempotencyStore",
    "Job",
    "JobEvent",
    "JobKind",
    "JobState",
    "JobStore",
    "PlanEntry",
    "PlanIndex",
    "StoredTopologyEntry",
    "TopologyStore",
    "known_kind",
]
