"""The tables of the service after the newest migration, and cursors of lists.

The tables of the cache are in `autoshard_solver_cache.tables`. Times are seconds since 1970 by the
writer's clock, for display and for deleting old rows. Jobs are claimed in the order of `number`,
and leases are measured by heartbeats (see `autoshard_server.store.job_store`), so neither depends
on a clock that may jump.
"""

from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    String,
    Table,
    Text,
    text,
    tuple_,
)

from autoshard_server.projects import DEFAULT_PROJECT

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(32), primary_key=True),
    # Order of arrival; concurrent ones may have the same number.
    Column("number", BigInteger, nullable=False, server_default="0"),
    Column("kind", String(16), nullable=False, server_default="plan"),
    Column("plan_id", String(64), nullable=False),
    Column("caller", String(64)),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("owner", String(64)),
    # Incremented by every heartbeat.
    Column("beat", BigInteger, nullable=False, server_default="0"),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("progress", Text),
    Column("error", Text),
    Column("context", Text),
    Column("request", Text, nullable=False),
    Column("graph", LargeBinary),
    Column("result", LargeBinary),
    Column("project", String(64), nullable=False, server_default="default"),
    Column("class", String(16), nullable=False, server_default="solve"),
    # Compressed bytes of the graph or the result that the row contains.
    Column("stored_bytes", BigInteger, nullable=False, server_default="0"),
    # Whose workers run the job; null for those of any.
    Column("release", String(64)),
)
Index("jobs_by_arrival", jobs.c.number)
# For the lists of a project and of a caller.
Index("jobs_by_state", *(jobs.c[name] for name in ("project", "state", "created_at", "id")))
Index(
    "jobs_by_caller",
    *(jobs.c[name] for name in ("project", "caller", "state", "created_at", "id")),
)

# SQLite uses a partial index only for a query that contains its condition, without parameters.
is_active = jobs.c.finished_at.is_(None)
"""True for jobs that are queued or running."""

has_bytes = jobs.c.stored_bytes > text("0")
"""True for jobs that contain a graph or a result."""

# For deleting old ones.
Index(
    "jobs_by_end",
    jobs.c.finished_at,
    sqlite_where=jobs.c.finished_at.is_not(None),
    postgresql_where=jobs.c.finished_at.is_not(None),
)
Index(
    "jobs_active_result",
    jobs.c.project,
    jobs.c.plan_id,
    unique=True,
    sqlite_where=is_active,
    postgresql_where=is_active,
)
Index(
    "jobs_active",
    *(jobs.c[name] for name in ("project", "caller", "state", "class", "number", "created_at")),
    jobs.c.release,
    sqlite_where=is_active,
    postgresql_where=is_active,
)
Index(
    "jobs_by_bytes",
    jobs.c.project,
    jobs.c.caller,
    jobs.c.stored_bytes,
    sqlite_where=has_bytes,
    postgresql_where=has_bytes,
)

job_events = Table(
    "job_events",
    metadata,
    Column("job_id", String(32), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("data", Text, nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("project", String(64), primary_key=True, server_default=DEFAULT_PROJECT),
    Column("id", String(64), primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("status", String(32), nullable=False),
    Column("objective", Float),
    Column("bound", Float),
    Column("gap", Float),
    Column("peak_memory", BigInteger),
    Column("mode", String(16), nullable=False),
    Column("mesh", Text, nullable=False),
    Column("topology", String(255), nullable=False),
    Column("graph_digest", String(64), nullable=False),
    Column("num_nodes", Integer, nullable=False),
    Column("num_parameters", BigInteger, nullable=False),
)
Index("plans_by_age", plans.c.project, plans.c.created_at, plans.c.id)
Index(
    "plans_by_graph",
    *(plans.c[name] for name in ("project", "graph_digest", "created_at", "id")),
)

# Plans of the cache that are not in the index yet: triggers add and delete these rows, and delete
# the plans that the cache has dropped (see the migration m0008_totals).
unindexed_plans = Table(
    "unindexed_plans",
    metadata,
    Column("project", String(64), primary_key=True),
    Column("id", String(255), primary_key=True),
    # The version of autoshard that could not read it.
    Column("tried_by", String(64)),
)

# The number of finished jobs in each state, kept by triggers (see the same migration).
job_totals = Table(
    "job_totals",
    metadata,
    Column("state", String(16), primary_key=True),
    Column("num_jobs", BigInteger, nullable=False),
)

topologies = Table(
    "topologies",
    metadata,
    Column("project", String(64), primary_key=True, server_default=DEFAULT_PROJECT),
    Column("name", String(64), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("document", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("caller", String(64), primary_key=True),
    Column("key_sha256", String(64), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)
Index("idempotency_keys_by_age", idempotency_keys.c.created_at)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(255), nullable=False),
    Column("secret_sha256", String(64), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("project", String(64), nullable=False, server_default=DEFAULT_PROJECT),
    Column("last_used_at", Float),
)

audit_events = Table(
    "audit_events",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("caller", String(64)),
    Column("action", String(16), nullable=False),
    Column("resource", String(255), nullable=False),
    Column("request_id", String(64)),
)
Index("audit_events_by_age", audit_events.c.created_at)
Index(
    "audit_events_by_project", *(audit_events.c[name] for name in ("project", "created_at", "id"))
)

# One row, written by every migration.
compatibility = Table(
    "compatibility",
    metadata,
    # The oldest migration whose releases work on the database.
    Column("min_compatible", String(32), primary_key=True),
    # The version of autoshard that migrated it.
    Column("release", String(64), nullable=False),
)


class Cursor(NamedTuple):
    """The last row of a page of a list that is ordered from new to old.

    Attributes:
        created_at: of the row, seconds since 1970.
        id: of the row, for rows of the same age.
    """

    created_at: float
    id: str


def newest_first(query: Select[Any], table: Table, after: Cursor | None) -> Select[Any]:
    """Order a query from new to old, starting after a cursor if there is one."""
    place = tuple_(table.c.created_at, table.c.id)
    if after is not None:
        query = query.where(place < tuple_(*after))
    return query.order_by(table.c.created_at.desc(), table.c.id.desc())
