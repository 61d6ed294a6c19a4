"""Totals of jobs, an index of plans that follows the cache, indexes of lists and expired rows.

The totals and the index of plans are kept by triggers.

Triggers run in the transaction of the change, whoever makes it: other programs add and delete
entries of the cache, too. A later migration that rebuilds `jobs` or `plans` on SQLite must create
them again.
"""

import sqlalchemy as sa
from alembic import op

from autoshard_solver_cache.tables import create_missing

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_SQLITE_PLANS = (
    """
    CREATE TRIGGER plans_cached AFTER INSERT ON cache_entries
    WHEN NEW.namespace = 'plans' OR substr(NEW.namespace, -6) = '_plans'
    BEGIN
        INSERT INTO unindexed_plans (project, id) VALUES (
            CASE NEW.namespace WHEN 'plans' THEN 'default'
            ELSE substr(NEW.namespace, 1, length(NEW.namespace) - 6) END,
            NEW.key
        ) ON CONFLICT DO NOTHING;
    END
    """,
    """
    CREATE TRIGGER plans_dropped AFTER DELETE ON cache_entries
    WHEN OLD.namespace = 'plans' OR substr(OLD.namespace, -6) = '_plans'
    BEGIN
        DELETE FROM plans WHERE id = OLD.key AND project = (
            CASE OLD.namespace WHEN 'plans' THEN 'default'
            ELSE substr(OLD.namespace, 1, length(OLD.namespace) - 6) END
        );
        DELETE FROM unindexed_plans WHERE id = OLD.key AND project = (
            CASE OLD.namespace WHEN 'plans' THEN 'default'
            ELSE substr(OLD.namespace, 1, length(OLD.namespace) - 6) END
        );
    END
    """,
)

_POSTGRES_PLANS = (
    """
    CREATE OR REPLACE FUNCTION note_cached_plans() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO unindexed_plans (project, id)
        SELECT CASE namespace WHEN 'plans' THEN 'default' ELSE left(namespace, -6) END, key
        FROM changed WHERE namespace = 'plans' OR right(namespace, 6) = '_plans'
        ON CONFLICT DO NOTHING;
        RETURN NULL;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION drop_plans() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT AS $$
    BEGIN
        DELETE FROM plans USING changed
        WHERE (namespace = 'plans' OR right(namespace, 6) = '_plans') AND id = key AND project =
            CASE namespace WHEN 'plans' THEN 'default' ELSE left(namespace, -6) END;
        DELETE FROM unindexed_plans USING changed
        WHERE (namespace = 'plans' OR right(namespace, 6) = '_plans') AND id = key AND project =
            CASE namespace WHEN 'plans' THEN 'default' ELSE left(namespace, -6) END;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER plans_cached AFTER INSERT ON cache_entries REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION note_cached_plans()
    """,
    """
    CREATE TRIGGER plans_dropped AFTER DELETE ON cache_entries REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION drop_plans()
    """,
)

_SQLITE_JOBS = (
    """
    CREATE TRIGGER jobs_added AFTER INSERT ON jobs WHEN NEW.finished_at IS NOT NULL
    BEGIN
        INSERT INTO job_totals VALUES (NEW.state, 1)
        ON CONFLICT (state) DO UPDATE SET num_jobs = num_jobs + 1;
    END
    """,
    """
    CREATE TRIGGER jobs_finished AFTER UPDATE OF finished_at ON jobs
    WHEN OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL
    BEGIN
        INSERT INTO job_totals VALUES (NEW.state, 1)
        ON CONFLICT (state) DO UPDATE SET num_jobs = num_jobs + 1;
    END
    """,
    """
    CREATE TRIGGER jobs_deleted AFTER DELETE ON jobs WHEN OLD.finished_at IS NOT NULL
    BEGIN
        UPDATE job_totals SET num_jobs = num_jobs - 1 WHERE state = OLD.state;
    END
    """,
)

_POSTGRES_JOBS = (
    """
    CREATE OR REPLACE FUNCTION count_jobs() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT AS $$
    DECLARE
        sign integer := CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END;
    BEGIN
        INSERT INTO job_totals AS kept
        SELECT state, sign * count(*) FROM changed WHERE finished_at IS NOT NULL
        GROUP BY state ORDER BY state
        ON CONFLICT (state) DO UPDATE SET num_jobs = kept.num_jobs + EXCLUDED.num_jobs;
        RETURN NULL;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION count_finished_job() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO job_totals AS kept VALUES (NEW.state, 1)
        ON CONFLICT (state) DO UPDATE SET num_jobs = kept.num_jobs + 1;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER jobs_added AFTER INSERT ON jobs REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_jobs()
    """,
    """
    CREATE TRIGGER jobs_deleted AFTER DELETE ON jobs REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_jobs()
    """,
    """
    CREATE TRIGGER jobs_finished AFTER UPDATE OF finished_at ON jobs
    FOR EACH ROW WHEN (OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL)
    EXECUTE FUNCTION count_finished_job()
    """,
)


def upgrade() -> None:
    """Add tables and triggers; rows of earlier releases are counted once."""
    create_missing(op.get_bind())
    op.create_table(
        "job_totals",
        sa.Column("state", sa.String(16), primary_key=True),
        sa.Column("num_jobs", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "unindexed_plans",
        sa.Column("project", sa.String(64), primary_key=True),
        sa.Column("id", sa.String(255), primary_key=True),
        sa.Column("tried_by", sa.String(64)),
    )
    is_postgres = op.get_bind().dialect.name == "postgresql"
    for statement in (
        *(_POSTGRES_PLANS if is_postgres else _SQLITE_PLANS),
        *(_POSTGRES_JOBS if is_postgres else _SQLITE_JOBS),
    ):
        op.get_bind().exec_driver_sql(statement)
    _change_indexes()
    op.execute(
        "INSERT INTO job_totals SELECT state, count(*) FROM jobs "
        "WHERE finished_at IS NOT NULL GROUP BY state"
    )
    _compare_with_cache()


def _change_indexes() -> None:
    for name in ("jobs_by_number", "jobs_by_age", "jobs_by_caller", "jobs_by_project"):
        op.drop_index(name, "jobs")
    op.drop_index("jobs_by_name", "jobs")
    op.drop_index("plans_by_graph", "plans")
    op.create_index("jobs_by_state", "jobs", ["project", "state", "created_at", "id"])
    op.create_index("jobs_by_caller", "jobs", ["project", "caller", "state", "created_at", "id"])
    op.create_index("plans_by_graph", "plans", ["project", "graph_digest", "created_at", "id"])
    finished = sa.text("finished_at IS NOT NULL")
    op.create_index(
        "jobs_by_end",
        "jobs",
        ["finished_at"],
        sqlite_where=finished,
        postgresql_where=finished,
    )


def _compare_with_cache() -> None:
    """Make the index of plans agree with the cache; before, all plans were in the default one."""
    op.execute(
        "DELETE FROM plans WHERE project = 'default' AND NOT EXISTS ("
        "SELECT 1 FROM cache_entries WHERE namespace = 'plans' AND key = plans.id)"
    )
    op.execute(
        "INSERT INTO unindexed_plans (project, id) SELECT 'default', key FROM cache_entries "
        "WHERE namespace = 'plans' AND NOT EXISTS ("
        "SELECT 1 FROM plans WHERE project = 'default' AND id = cache_entries.key)"
    )
