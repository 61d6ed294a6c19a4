"""Strategies that no finite choice can use."""

import numpy as np

from autoshard.arrays import BoolArray
from autoshard.solve.network import Matrix, Network
from autoshard.solve.reductions.base import Inverse, Worklist, nothing_to_undo


class DropForbidden:
    """Drop strategies of infinite cost and those without a partner on some link.

    This is arc consistency: a dropped strategy can leave strategies of its neighbours
    without a partner, so the neighbours are looked at again.
    """

    name = "drop_forbidden"

    def __init__(self) -> None:
        self._finite: dict[bytes, tuple[Matrix, BoolArray | None]] = {}

    def apply(self, network: Network) -> Inverse:
        """Drop until nothing is forbidden any more."""
        queue = Worklist(network.variables)
        while queue and not network.infeasible:
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
        """Which pairs are allowed, shape [R, C]; None where all are."""
        if matrix.key not in self._finite:
            finite = np.isfinite(matrix.values)
            self._finite[matrix.key] = (matrix, None if finite.all() else finite)
        return self._finite[matrix.key][1]
