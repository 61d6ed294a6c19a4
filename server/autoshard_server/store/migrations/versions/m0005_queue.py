"""Projects and classes of jobs, and their bytes; indexes of the queue."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# Releases before expect the result in the row of a job.
min_compatible = "0005"


def upgrade() -> None:
    """Add columns and indexes; jobs of equal requests are shared within a project only."""
    project = sa.Column("project", sa.String(64), nullable=False, server_default="default")
    op.add_column("jobs", project)
    op.add_column("jobs", sa.Column("class", sa.String(16), nullable=False, server_default="solve"))
    nbytes = sa.Column("stored_bytes", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("jobs", nbytes)
    op.drop_index("jobs_active_plan", "jobs")
    active = sa.text("finished_at IS NULL")
    op.create_index(
        "jobs_active_result",
        "jobs",
        ["project", "plan_id"],
        unique=True,
        sqlite_where=active,
        postgresql_where=active,
    )
    queue = ["project", "caller", "state", "class", "number", "created_at"]
    op.create_index("jobs_active", "jobs", queue, sqlite_where=active, postgresql_where=active)
    op.create_index("jobs_by_arrival", "jobs", ["number"])
    op.create_index("jobs_by_project", "jobs", ["project", "created_at", "id"])
    op.create_index("jobs_by_name", "jobs", ["project", "caller", "created_at", "id"])
    stored = sa.text("stored_bytes > 0")
    op.create_index(
        "jobs_by_bytes",
        "jobs",
        ["project", "caller", "stored_bytes"],
        sqlite_where=stored,
        postgresql_where=stored,
    )
