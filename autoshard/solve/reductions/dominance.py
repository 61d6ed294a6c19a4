"""Strategies that another strategy of the same variable makes pointless."""

from collections.abc import Collection

import numpy as np

from autoshard.arrays import BoolArray, FloatArray
from autoshard.solve.network import Matrix, Network
from autoshard.solve.reductions.base import Inverse, nothing_to_undo

_MOST_STRATEGIES = 1500
_MOST_COMPARISONS = 30_000_000


Losses = tuple[Matrix, FloatArray | None]
"""A matrix, and the most that moving from one of its columns to another can cost."""


class DropDominated:
    """Drop strategies that can be swapped for another one at no loss, whatever the rest does.

    Strategy t dominates s when, over every choice of the neighbours, moving from s to t
    never costs more, and t never uses more than s. The worst case is summed over the
    links (the Goldstein criterion of dead-end elimination, Biophys. J. 66:1335, 1994),
    which contains the plain entry-by-entry comparison. Of equals the first one stays.

    Args:
        keep: variables whose strategies all stay.
        losses: comparisons known from elsewhere; new ones are added.
    """

    name = "drop_dominated"

    def __init__(
        self, *, keep: Collection[int] = (), losses: dict[bytes, Losses] | None = None
    ) -> None:
        self._keep = keep
        self._losses = {} if losses is None else losses
        self._seen: dict[int, int] = {}

    def apply(self, network: Network) -> Inverse:
        """Drop the dominated strategies of every variable that has changed."""
        for v in network.variables.keys() - set(self._keep):
            while self._seen.get(v) != network.changes[v]:
                self._seen[v] = network.changes[v]
                mask = self._undominated(network, v)
                if mask is not None and not mask.all():
                    network.keep(v, mask)
        return nothing_to_undo

    def _undominated(self, network: Network, v: int) -> BoolArray | None:
        """Which strategies stay, shape [S]; None where the comparison would take too long."""
        variable = network.variables[v]
        if not 1 < len(variable.cost) <= _MOST_STRATEGIES:
            return None
        with np.errstate(invalid="ignore"):
            loss = variable.cost[None, :] - variable.cost[:, None]
            for link in network.links[v].values():
                worst = self._loss(link.matrix.flipped)
                if worst is None:
                    return None
                loss = loss + worst[np.ix_(link.rows, link.rows)]
            dominates = loss <= 0
        for term in variable.terms:
            dominates &= term.usage[None, :] <= term.usage[:, None]
        np.fill_diagonal(dominates, val=False)
        first = np.tri(len(dominates), k=-1, dtype=np.bool_)
        strictly = dominates & (~dominates.T | first)
        undominated: BoolArray = np.logical_not(strictly.any(axis=1))
        return undominated

    def _loss(self, matrix: Matrix) -> FloatArray | None:
        """Most that moving from column s to column t can cost, shape [C, C]."""
        if matrix.key not in self._losses:
            self._losses[matrix.key] = (matrix, _worst_moves(matrix.values))
        return self._losses[matrix.key][1]


def _worst_moves(values: FloatArray) -> FloatArray | None:
    rows, cols = values.shape
    if rows * cols * cols > _MOST_COMPARISONS:
        return None
    worst = np.full((cols, cols), -np.inf)
    for row in values:
        with np.errstate(invalid="ignore"):
            move = row[None, :] - row[:, None]
        # A forbidden start cannot be moved from, so it says nothing about the move.
        move[~np.isfinite(row)] = -np.inf
        np.maximum(worst, move, out=worst)
    return worst
