"""The time at which an API key was last used."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("api_keys", sa.Column("last_used_at", sa.Float))
