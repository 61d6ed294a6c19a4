"""The service's database: its tables, their migrations, and small classes over them."""

from autoshard_server.store.api_keys import ApiKey, ApiKeyStore
from autoshard_server.store.cursor import Cursor
from autoshard_server.store.events import Event, EventKind
from autoshard_server.store.graphs import GRAPHS, GraphInfo, GraphStore
from autoshard_server.store.idempotency import IdempotencyStore, Reply
from autoshard_server.store.migrate import is_current, migrate, newest_revision
from autoshard_server.store.plans import PLANS, PlanIndex, PlanSummary
from autoshard_server.store.topologies import (
    NAME_PATTERN,
    StoredTopology,
    TopologyInfo,
    TopologyStore,
)

__all__ = [
    "GRAPHS",
    "NAME_PATTERN",
    "PLANS",
    "ApiKey",
    "ApiKeyStore",
    "Cursor",
    "Event",
    "EventKind",
    "GraphInfo",
    "GraphStore",
    "IdempotencyStore",
    "PlanIndex",
    "PlanSummary",
    "Reply",
    "StoredTopology",
    "TopologyInfo",
    "TopologyStore",
    "is_current",
    "migrate",
    "newest_revision",
]
