"""Links in their simplest form: small, shifted to zero, gone where they say nothing."""

from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.network import Link, Matrix, Network, fingerprint
from autoshard.solve.reductions.base import Inverse, nothing_to_undo


@dataclass(frozen=True, slots=True)
class _NormalForm:
    matrix: Matrix
    row_shift: FloatArray
    col_shift: FloatArray
    row_class: IntArray
    col_class: IntArray


class SimplifyLinks:
    """Bring every link into normal form.

    Unused rows and columns go; the least entry of each row, then of each column, moves
    into the costs of the variables; equal rows and equal columns become one. A link that
    does not depend on one of its ends becomes a cost of the other and disappears.
    """

    name = "simplify_links"

    def __init__(self) -> None:
        self._forms: dict[bytes, _NormalForm] = {}
        self._seen: dict[tuple[int, int], Link] = {}

    def apply(self, network: Network) -> Inverse:
        """Simplify every link that is not in normal form."""
        for u, v, link in list(network.pairs()):
            if self._seen.get((u, v)) is not link:
                self.simplify(network, u, v, link)
        return nothing_to_undo

    def simplify(self, network: Network, u: int, v: int, link: Link) -> None:
        """Bring one link into normal form, or dissolve it."""
        used_rows, rows = _compressed(link.rows, len(link.matrix.values))
        used_cols, cols = _compressed(link.cols, link.matrix.values.shape[1])
        form = self._form(link.matrix, used_rows, used_cols)
        if form.row_shift.any():
            network.add_cost(u, form.row_shift[rows])
        if form.col_shift.any():
            network.add_cost(v, form.col_shift[cols])
        if form.matrix.values.size == 1:
            network.disconnect(u, v)
            return
        new = Link(form.matrix, form.row_class[rows], form.col_class[cols])
        if new.matrix.key != link.matrix.key:
            network.put(u, v, new)
        self._seen[u, v] = network.links[u][v]

    def _form(self, matrix: Matrix, rows: IntArray | None, cols: IntArray | None) -> _NormalForm:
        kept = (b"" if kept is None else kept.tobytes() for kept in (rows, cols))
        key = fingerprint(matrix.key, *kept)
        if key not in self._forms:
            values = matrix.values if rows is None else matrix.values[rows]
            self._forms[key] = _normal_form(values if cols is None else values[:, cols])
        return self._forms[key]


def _compressed(labels: IntArray, size: int) -> tuple[IntArray | None, IntArray]:
    """Labels in use, or None where all are, and the labels renumbered to them."""
    used = np.zeros(size, dtype=np.bool_)
    used[labels] = True
    if used.all():
        return None, labels
    return np.flatnonzero(used), (np.cumsum(used) - 1)[labels]


def _normal_form(values: FloatArray) -> _NormalForm:
    values = np.where(np.isnan(values), np.inf, values)
    row_shift = _finite_or_zero(values.min(axis=1))
    values = values - row_shift[:, None]
    col_shift = _finite_or_zero(values.min(axis=0))
    # Adding zero turns -0.0 into 0.0, so that equal rows have equal bytes.
    values = values - col_shift + 0.0
    first_rows, row_class = _equal_rows(values)
    first_cols, col_class = _equal_rows(np.ascontiguousarray(values.T))
    if len(first_cols) == 1:
        row_shift, first_rows, row_class = row_shift + values[:, 0], [0], np.zeros_like(row_class)
    elif len(first_rows) == 1:
        col_shift, first_cols, col_class = col_shift + values[0], [0], np.zeros_like(col_class)
    matrix = Matrix(np.ascontiguousarray(values[np.ix_(first_rows, first_cols)]))
    return _NormalForm(matrix, row_shift, col_shift, row_class, col_class)


def _finite_or_zero(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, 0.0)


def _equal_rows(values: FloatArray) -> tuple[list[int], IntArray]:
    """First row of each class of equal rows, and the class of each row."""
    classes: dict[bytes, int] = {}
    first: list[int] = []
    row_class = np.empty(len(values), dtype=np.intp)
    for i, row in enumerate(values):
        row_class[i] = classes.setdefault(row.tobytes(), len(first))
        if row_class[i] == len(first):
            first.append(i)
    return first, row_class
