"""Tables of events, plans, API keys and idempotency keys; leases measured by heartbeats."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add tables and columns; the order of jobs stays."""
    _extend_jobs()
    _add_events()
    _add_plans()
    _add_keys()


def _extend_jobs() -> None:
    number = sa.Column("number", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("jobs", number)
    op.add_column("jobs", sa.Column("kind", sa.String(16), nullable=False, server_default="plan"))
    op.add_column("jobs", sa.Column("caller", sa.String(64)))
    op.add_column("jobs", sa.Column("beat", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("context", sa.Text))
    op.drop_index("jobs_by_state", "jobs")
    op.drop_column("jobs", "lease_until")
    op.execute(
        "UPDATE jobs SET number = ranked.number FROM ("
        "SELECT id, row_number() OVER (ORDER BY created_at, id) AS number FROM jobs"
        ") AS ranked WHERE jobs.id = ranked.id"
    )
    op.create_index("jobs_by_number", "jobs", ["state", "number"])
    op.create_index("jobs_by_age", "jobs", ["created_at", "id"])
    op.create_index("jobs_by_caller", "jobs", ["caller", "state"])


def _add_events() -> None:
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
    )


def _add_plans() -> None:
    op.create_table(
        "plans",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("objective", sa.Float),
        sa.Column("bound", sa.Float),
        sa.Column("gap", sa.Float),
        sa.Column("peak_memory", sa.BigInteger),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("mesh", sa.Text, nullable=False),
        sa.Column("topology", sa.String(255), nullable=False),
        sa.Column("graph_digest", sa.String(64), nullable=False),
        sa.Column("num_nodes", sa.Integer, nullable=False),
        sa.Column("num_parameters", sa.BigInteger, nullable=False),
    )
    op.create_index("plans_by_age", "plans", ["created_at", "id"])
    op.create_index("plans_by_graph", "plans", ["graph_digest", "created_at"])


def _add_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("caller", sa.String(64), primary_key=True),
        sa.Column("key_sha256", sa.String(64), primary_key=True),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("idempotency_keys_by_age", "idempotency_keys", ["created_at"])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )
