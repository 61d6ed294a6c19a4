"""Repeated min-plus products with one large matrix, without its infinite and its repeated parts.

The matrices of a problem that counts memory consist of blocks, one for each state of both ends: a
block is infinite, a diagonal, or equal to another one.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.arrays import FloatArray, IntArray

_SPARSE = 16
"""A row or column with at most one finite entry in so many is stored entry by entry."""
_MOST_BLOCKS = 16
"""Largest number of dense blocks; a matrix with more distinct rows is stored as one block."""

_CHUNK = 1 << 14
"""Entries that are added at once, so that the sums stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The finite part of rows that are finite in the same columns, equal columns once.

    Attributes:
        rows: index of each of R rows, shape [R].
        order: the columns, equal ones next to each other.
        starts: offset in `order` of the first of each of C distinct columns, shape [C].
        values: shape [R, C].
    """

    rows: IntArray
    order: IntArray
    starts: IntArray
    values: FloatArray

    @classmethod
    def of(cls, matrix: FloatArray, rows: IntArray, columns: IntArray) -> "_Block":
        """The block of some rows and columns."""
        part = np.ascontiguousarray(matrix[np.ix_(rows, columns)].T)
        known: dict[bytes, int] = {}
        labels = np.array([known.setdefault(column.tobytes(), len(known)) for column in part])
        order = np.argsort(labels, kind="stable")
        starts = np.searchsorted(labels[order], np.arange(len(known)))
        return cls(rows, columns[order], starts, np.ascontiguousarray(part[order[starts]].T))

    def least(self, prices: FloatArray) -> FloatArray:
        """Least of each row plus the prices of columns, shape [R]."""
        each: FloatArray = np.minimum.reduceat(prices[self.order], self.starts)
        least = np.empty(len(self.values))
        step = max(_CHUNK // max(len(each), 1), 1)
        for i in range(0, len(least), step):
            (self.values[i : i + step] + each).min(axis=1, out=least[i : i + step])
        return least


class _Rows:
    """The rows of a matrix: a sparse part, and blocks."""

    def __init__(self, matrix: FloatArray) -> None:
        self._size = len(matrix)
        finite = np.isfinite(matrix)
        in_row, in_column = finite.sum(axis=1), finite.sum(axis=0)
        dense_rows = in_row * _SPARSE > matrix.shape[1]
        dense_columns = in_column * _SPARSE > matrix.shape[0]
        dense = np.ix_(dense_rows, dense_columns)
        rest = finite.copy()
        rest[dense] = False
        rows, self._columns = np.nonzero(rest)
        self._values = matrix[rows, self._columns]
        self._sparse_rows, self._starts = np.unique(rows, return_index=True)
        groups: dict[bytes, list[int]] = {}
        for row, mask in zip(np.flatnonzero(dense_rows).tolist(), finite[dense], strict=True):
            groups.setdefault(mask.tobytes(), []).append(row)
        columns = np.flatnonzero(dense_columns)
        if len(groups) > _MOST_BLOCKS:
            groups = {np.ones(len(columns), dtype=np.bool_).tobytes(): [*range(len(matrix))]}
        parts = (
            (np.array(found), columns[np.frombuffer(mask, dtype=np.bool_)])
            for mask, found in groups.items()
        )
        self._blocks = [_Block.of(matrix, *part) for part in parts if len(part[1])]

    def least(self, prices: FloatArray) -> FloatArray:
        """Least of each row plus the prices of columns."""
        least = np.full(self._size, np.inf)
        if len(self._starts):
            paid = self._values + prices[self._columns]
            least[self._sparse_rows] = np.minimum.reduceat(paid, self._starts)
        for block in self._blocks:
            least[block.rows] = np.minimum(least[block.rows], block.least(prices))
        return least


class MinPlusTable:
    """A matrix for min-plus products with vectors from both sides, prepared when it is used.

    Args:
        matrix: shape [R, C].
    """

    def __init__(self, matrix: FloatArray) -> None:
        self._matrix = matrix

    def rows(self, prices: FloatArray) -> FloatArray:
        """Least of each row plus the prices of columns, shape [R]."""
        return self._by_row.least(prices)

    def columns(self, prices: FloatArray) -> FloatArray:
        """Least of each column plus the prices of rows, shape [C]."""
        return self._by_column.least(prices)

    @cached_property
    def _by_row(self) -> _Rows:
        return _Rows(self._matrix)

    @cached_property
    def _by_column(self) -> _Rows:
        return _Rows(self._matrix.T)
