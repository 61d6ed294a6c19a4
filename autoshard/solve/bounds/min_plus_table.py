"""Repeated min-plus products with one large matrix, without its infinite and its repeated parts.

The matrices of a problem that counts memory consist of blocks, one for each state of both ends: a
block is infinite, a diagonal, or equal to another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray

_SPARSE = 16
"""A row or column with at most one finite entry in so many is stored entry by entry."""
_MOST_BLOCKS = 16
"""Largest number of dense blocks; a matrix with more distinct rows is stored as one block."""
_CHUNK = 1 << 14
"""Entries that are added at once, so that the sums stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class _FiniteBlock:
    """The finite part of rows that are finite in the same columns, equal columns once.

    Attributes:
        rows: index of each of R rows, shape [R].
        columns: the columns, equal ones next to each other, shape [A].
        labels: number of the distinct column of each of these, ascending, shape [A].
        starts: offset in `columns` of the first of each of C distinct columns, shape [C].
        values: shape [R, C].
    """

    rows: IntArray
    columns: IntArray
    labels: IntArray
    starts: IntArray
    values: FloatArray

    @classmethod
    def of(cls, matrix: FloatArray, rows: IntArray, columns: IntArray) -> "_FiniteBlock":
        part = np.ascontiguousarray(matrix[np.ix_(rows, columns)].T)
        known: dict[bytes, int] = {}
        labels = np.array([known.setdefault(column.tobytes(), len(known)) for column in part])
        order = np.argsort(labels, kind="stable")
        labels = labels[order]
        starts = np.searchsorted(labels, np.arange(len(known)))
        values = np.ascontiguousarray(part[order[starts]].T)
        return cls(rows, columns[order], labels, starts, values)

    @property
    def _chunks(self) -> Iterator[slice]:
        """Slices of rows with at most `_CHUNK` entries, or single rows."""
        step = max(_CHUNK // self.values.shape[1], 1)
        return (slice(i, i + step) for i in range(0, len(self.values), step))

    def by_row(self, prices: FloatArray) -> FloatArray:
        """Least of each row plus the prices of all columns of the matrix, shape [R]."""
        # Equal columns differ by their prices only, so the least of these stands for all of them.
        each: FloatArray = np.minimum.reduceat(prices[self.columns], self.starts)
        least = np.empty(len(self.values))
        for chunk in self._chunks:
            (self.values[chunk] + each).min(axis=1, out=least[chunk])
        return least

    def by_column(self, prices: FloatArray) -> FloatArray:
        """Least of each column plus the prices of all rows of the matrix, shape [A]."""
        each, least = prices[self.rows, None], np.full(self.values.shape[1], np.inf)
        for chunk in self._chunks:
            np.minimum(least, (self.values[chunk] + each[chunk]).min(axis=0), out=least)
        return least[self.labels]


class MinPlusTable:
    """A matrix for min-plus products with vectors from both sides, prepared when it is used.

    Args:
        matrix: shape [R, C].
    """

    def __init__(self, matrix: FloatArray) -> None:
        self._matrix = matrix

    def rows(self, prices: FloatArray) -> FloatArray:
        """Least of each row plus the prices of columns, shape [R]."""
        (rows, columns), values = self._scattered
        least = np.full(len(self._matrix), np.inf)
        np.minimum.at(least, rows, values + prices[columns])
        for block in self._blocks:
            least[block.rows] = np.minimum(least[block.rows], block.by_row(prices))
        return least

    def columns(self, prices: FloatArray) -> FloatArray:
        """Least of each column plus the prices of rows, shape [C]."""
        (rows, columns), values = self._scattered
        least = np.full(self._matrix.shape[1], np.inf)
        np.minimum.at(least, columns, values + prices[rows])
        for block in self._blocks:
            least[block.columns] = np.minimum(least[block.columns], block.by_column(prices))
        return least

    @cached_property
    def _dense(self) -> tuple[BoolArray, BoolArray]:
        """Masks of the rows and of the columns with many finite entries."""
        finite = np.isfinite(self._matrix)
        counts = zip((1, 0), self._matrix.shape[::-1], strict=True)
        rows, columns = (finite.sum(axis=axis) * _SPARSE > length for axis, length in counts)
        return rows, columns

    @cached_property
    def _scattered(self) -> tuple[tuple[IntArray, IntArray], FloatArray]:
        """Rows and columns of the finite entries outside of blocks, and these entries."""
        rest = np.isfinite(self._matrix)
        rest[np.ix_(*self._dense)] = False
        rows, columns = np.nonzero(rest)
        return (rows, columns), self._matrix[rows, columns]

    @cached_property
    def _blocks(self) -> list[_FiniteBlock]:
        """The blocks of all rows with many finite entries."""
        rows, columns = map(np.flatnonzero, self._dense)
        if not len(columns):
            return []
        groups: dict[bytes, list[int]] = {}
        finite = np.isfinite(self._matrix[np.ix_(rows, columns)])
        for row, mask in zip(rows.tolist(), finite, strict=True):
            groups.setdefault(mask.tobytes(), []).append(row)
        # Many small blocks lose more to calls than inf entries cost.
        if len(groups) > _MOST_BLOCKS:
            return [_FiniteBlock.of(self._matrix, rows, columns)]
        parts = ((np.array(g), columns[np.frombuffer(m, np.bool_)]) for m, g in groups.items())
        return [_FiniteBlock.of(self._matrix, *part) for part in parts if len(part[1])]
