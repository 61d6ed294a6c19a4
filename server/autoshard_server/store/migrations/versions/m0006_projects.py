"""Projects of API keys, plans and topologies; the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Releases without projects would show everything of one project to the callers of all.
min_compatible = "0006"


def upgrade() -> None:
    """Add the columns; the primary keys of plans and topologies include the project."""
    op.add_column("api_keys", _project())
    op.drop_index("plans_by_age", "plans")
    op.drop_index("plans_by_graph", "plans")
    for table, key in (("plans", "id"), ("topologies", "name")):
        names = {"pk": "%(table_name)s_pkey"}
        with op.batch_alter_table(table, naming_convention=names) as batch:
            batch.add_column(_project())
            batch.drop_constraint(f"{table}_pkey", type_="primary")
            batch.create_primary_key(f"{table}_pkey", ["project", key])
    op.create_index("plans_by_age", "plans", ["project", "created_at", "id"])
    op.create_index("plans_by_graph", "plans", ["project", "graph_digest", "created_at"])
    _add_audit_events()


def _project() -> "sa.Column[str]":
    return sa.Column("project", sa.String(64), nullable=False, server_default="default")


def _add_audit_events() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("caller", sa.String(64)),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("resource", sa.String(255), nullable=False),
        sa.Column("request_id", sa.String(64)),
    )
    op.create_index("audit_events_by_age", "audit_events", ["created_at"])
    op.create_index("audit_events_by_project", "audit_events", ["project", "created_at", "id"])
