"""A place in a list that is ordered from new to old."""

from typing import NamedTuple

from sqlalchemy import ColumnElement, Table, and_, or_


class Cursor(NamedTuple):
    """The last row that was seen; rows that come later do not move it.

    Attributes:
        created_at: of the row, seconds since 1970.
        id: of the row, where several are as old.
    """

    created_at: float
    id: str


def newest_first(table: Table) -> tuple[ColumnElement[float], ColumnElement[str]]:
    """The order of a list."""
    return table.c.created_at.desc(), table.c.id.desc()


def beyond(table: Table, cursor: Cursor) -> ColumnElement[bool]:
    """Rows that follow a place."""
    same_age = and_(table.c.created_at == cursor.created_at, table.c.id < cursor.id)
    return or_(table.c.created_at < cursor.created_at, same_age)
