"""Table of jobs as in version 0.1.0, which had no migrations; an existing table is kept."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table if the database is new."""
    if sa.inspect(op.get_bind()).has_table("jobs"):
        return
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("plan_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until", sa.Float),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.Column("progress", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("graph", sa.LargeBinary),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_index("jobs_by_state", "jobs", ["state", "created_at"])
    active = sa.text("state IN ('queued', 'running')")
    op.create_index(
        "jobs_active_plan",
        "jobs",
        ["plan_id"],
        unique=True,
        sqlite_where=active,
        postgresql_where=active,
    )
