"""Deletion of expired rows, in small transactions."""

from collections.abc import Callable

from sqlalchemy import Column, ColumnElement, Connection, Engine, Table, delete, select

from autoshard_solver_cache import in_batches, lock, reader


def delete_expired(
    engine: Engine,
    table: Table,
    time: Column[float],
    before: float,
    *,
    is_over: Callable[[], bool],
    first: Callable[[Connection, ColumnElement[bool]], object] | None = None,
) -> int:
    """Delete the rows of a table whose time is before another one, the oldest first.

    Args:
        engine: of the database.
        table: of the rows.
        time: an indexed column; rows without a time are kept.
        before: seconds since 1970.
        is_over: returns true to end early.
        first: deletes what belongs to the rows of a condition, in the same transaction.

    Returns:
        number of rows deleted.
    """
    expired = select(time).where(time < before).order_by(time)
    read_only = reader(engine)

    def delete_some(limit: int) -> int:
        with read_only.begin() as connection:
            times = connection.execute(expired.limit(limit)).scalars().all()
        if not times:
            return 0
        oldest = time <= times[-1]
        with engine.begin() as connection:
            # Two processes that delete the same rows could wait for each other.
            lock(connection, f"autoshard expiry of {table.name}")
            if first is not None:
                first(connection, oldest)
            return connection.execute(delete(table).where(oldest)).rowcount

    return in_batches(delete_some, is_over=is_over)
