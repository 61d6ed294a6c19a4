"""Reductions that drop strategies: arc consistency, dominance."""

from collections.abc import Collection

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray
from autoshard.solve.network import Matrix, Network
from autoshard.solve.presolve.base import Inverse, Worklist, nothing_to_undo
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_MAX_WORK = 3e7
"""Work of comparing the columns of one matrix."""


class EnforceArcConsistency:
    """Drop strategies of infinite cost and those without a partner on some link.

    This is arc consistency: a dropped strategy can leave strategies of its neighbours
    without a partner, so the neighbours are visited again.

    Args:
        effort: limits of work, and when to stop.
    """

    name = "arc_consistency"

    def __init__(self, effort: Effort = DEFAULT_EFFORT) -> None:
        self._effort = effort
        # By identity: comparing the contents takes longer than looking through them again. The
        # matrix is kept too, since the id of one that is gone may be given to another.
        self._finite: dict[int, tuple[Matrix, BoolArray | None]] = {}

    def apply(self, network: Network) -> Inverse:
        """Drop strategies until the network is arc consistent."""
        queue = Worklist(network.variables)
        while queue and not network.infeasible:
            self._effort.check()
            v = queue.pop()
            mask = self._allowed(network, v)
            if not mask.all():
                network.keep(v, mask)
                queue.update(network.links[v])
        return nothing_to_undo

    def _allowed(self, network: Network, v: int) -> BoolArray:
        mask: BoolArray = np.isfinite(network.variables[v].cost)
        for link in network.links[v].values():
            finite = self._pairs(link.matrix)
            if finite is not None:
                present = np.zeros(finite.shape[1], dtype=np.bool_)
                present[link.cols] = True
                partnered: BoolArray = np.any(finite[:, present], axis=1)
                mask &= partnered[link.rows]
        return mask

    def _pairs(self, matrix: Matrix) -> BoolArray | None:
        """Mask of allowed pairs, shape [R, C]; None if all are allowed."""
        if id(matrix) not in self._finite:
            finite = np.isfinite(matrix.values)
            self._finite[id(matrix)] = (matrix, None if finite.all() else finite)
        return self._finite[id(matrix)][1]


Losses = tuple[Matrix, FloatArray | None]
"""A matrix, and the largest increase of price from one of its columns to another, shape [C, C]."""


class DropDominated:
    """Drop dominated strategies.

    Strategy t dominates s if t costs no more than s for every choice of the neighbours, and uses
    no more at any time. The worst case is summed over the links (Goldstein criterion of dead-end
    elimination, Biophys. J. 66:1335, 1994). Of equal strategies the first one stays.

    Args:
        keep: variables whose strategies all stay.
        losses: known comparisons; new ones are added.
        effort: limits of work.
    """

    name = "drop_dominated"

    def __init__(
        self,
        *,
        keep: Collection[int] = (),
        losses: dict[bytes, Losses] | None = None,
        effort: Effort = DEFAULT_EFFORT,
    ) -> None:
        self._settings = effort.settings
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
        """Mask of strategies that are not dominated, shape [S]; None if that takes too long."""
        variable = network.variables[v]
        if not 1 < len(variable.cost) <= self._settings.max_dominance_strategies:
            return None
        # inf - inf is nan, and nan <= 0 is false: such a pair is not compared, which is safe.
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
        # All may be dropped at once: dominance is transitive, and of those that dominate each other
        # the first stays, so each dropped one has a dominator that stays.
        first = np.tri(len(dominates), k=-1, dtype=np.bool_)
        strictly = dominates & (~dominates.T | first)
        undominated: BoolArray = np.logical_not(strictly.any(axis=1))
        return undominated

    def _loss(self, matrix: Matrix) -> FloatArray | None:
        """Largest increase of price from column s to column t, shape [C, C]."""
        if matrix.key not in self._losses:
            self._losses[matrix.key] = (
                matrix,
                _worst_moves(matrix.values, _MAX_WORK),
            )
        return self._losses[matrix.key][1]


def _worst_moves(values: FloatArray, max_work: float) -> FloatArray | None:
    rows, cols = values.shape
    # The criterion compares all pairs of columns in every row: cubic in the strategies.
    if rows * cols * cols > max_work:
        return None
    worst = np.full((cols, cols), -np.inf)
    for row in values:
        with np.errstate(invalid="ignore"):
            move = row[None, :] - row[:, None]
        # Rows in which the first column is forbidden do not count.
        move[~np.isfinite(row)] = -np.inf
        np.maximum(worst, move, out=worst)
    return worst
