"""Table of the oldest migration whose releases work on the database."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

min_compatible = "0004"


def upgrade() -> None:
    """Add the table; `autoshard_server.store.database.migrate` writes its row."""
    op.create_table(
        "compatibility",
        sa.Column("min_compatible", sa.String(32), primary_key=True),
        sa.Column("release", sa.String(64), nullable=False),
    )
