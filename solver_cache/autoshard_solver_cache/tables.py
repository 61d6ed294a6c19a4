"""The tables of a cache in a database: its entries, and their totals.

The totals of each namespace are kept by triggers, in the transaction that adds or deletes entries.
So they are exact after every commit, also of a release that does not know of them, after a crash
and after statements of an administrator, and are never counted again.
"""

from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.exc import DBAPIError

from autoshard_solver_cache.engine import StoreUnavailableError, lock, reader, redacted

metadata = MetaData()

entries = Table(
    "cache_entries",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("stored_size", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("cache_entries_by_use", "used_at", "stored_size"),
)

_by_namespace = Index("cache_entries_by_namespace", entries.c.namespace, entries.c.used_at)

totals = Table(
    "cache_totals",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("num_entries", BigInteger, nullable=False),
    Column("nbytes", BigInteger, nullable=False),
)

_SQLITE_TRIGGERS = (
    """
    CREATE TRIGGER cache_entries_added AFTER INSERT ON cache_entries
    BEGIN
        INSERT INTO cache_totals VALUES (NEW.namespace, 1, NEW.stored_size)
        ON CONFLICT (namespace) DO UPDATE SET
            num_entries = num_entries + 1, nbytes = nbytes + NEW.stored_size;
    END
    """,
    """
    CREATE TRIGGER cache_entries_deleted AFTER DELETE ON cache_entries
    BEGIN
        UPDATE cache_totals
        SET num_entries = num_entries - 1, nbytes = nbytes - OLD.stored_size
        WHERE namespace = OLD.namespace;
    END
    """,
)

# One update per statement and namespace. Namespaces are locked in the order of their names, after
# all entries of the statement, so that two statements cannot wait for each other.
_POSTGRES_TRIGGERS = (
    """
    CREATE OR REPLACE FUNCTION count_cache_entries() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT AS $$
    DECLARE
        sign integer := CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END;
    BEGIN
        INSERT INTO cache_totals AS kept
        SELECT namespace, sign * count(*), sign * sum(stored_size) FROM changed
        GROUP BY namespace ORDER BY namespace
        ON CONFLICT (namespace) DO UPDATE SET
            num_entries = kept.num_entries + EXCLUDED.num_entries,
            nbytes = kept.nbytes + EXCLUDED.nbytes;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER cache_entries_added AFTER INSERT ON cache_entries
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_cache_entries()
    """,
    """
    CREATE TRIGGER cache_entries_deleted AFTER DELETE ON cache_entries
    REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION count_cache_entries()
    """,
)


def create_tables(engine: Engine) -> None:
    """Create the missing tables; entries of an older release are counted once.

    Raises:
        StoreUnavailableError: the database cannot be read or written.
    """
    with reader(engine).begin() as connection:
        if inspect(connection).has_table(totals.name):
            return
    try:
        with engine.begin() as connection:
            lock(connection, "autoshard tables")
            create_missing(connection)
    except DBAPIError as error:
        raise StoreUnavailableError(
            f"cannot use the database {redacted(engine.url)}: {error.orig}; "
            "give the URL of one that can be written"
        ) from error


def create_missing(connection: Connection) -> None:
    """As `create_tables`, in the transaction of the caller."""
    if inspect(connection).has_table(totals.name):
        return
    metadata.create_all(connection)
    # Other writers wait for the triggers' lock on the table until the entries are counted.
    for statement in _triggers(connection):
        connection.exec_driver_sql(statement)
    _by_namespace.create(connection, checkfirst=True)
    name, size = entries.c.namespace, func.sum(entries.c.stored_size)
    counted = select(name, func.count(), size).group_by(name)
    connection.execute(insert(totals).from_select(list(totals.c.keys()), counted))


def _triggers(connection: Connection) -> Sequence[str]:
    return _POSTGRES_TRIGGERS if connection.dialect.name == "postgresql" else _SQLITE_TRIGGERS
