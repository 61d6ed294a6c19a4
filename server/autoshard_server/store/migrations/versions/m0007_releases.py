"""The release that a job was submitted to."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and the index of the queue with it."""
    op.add_column("jobs", sa.Column("release", sa.String(64)))
    op.drop_index("jobs_active", "jobs")
    active = sa.text("finished_at IS NULL")
    queue = ["project", "caller", "state", "class", "number", "created_at", "release"]
    op.create_index("jobs_active", "jobs", queue, sqlite_where=active, postgresql_where=active)
