"""The two ends of a use of a value, and what the reshardings between them cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.costs import Passes, hidden_seconds
from autoshard.layouts import ReshardingTable
from autoshard.solve import ShortestPathCost

Priced = tuple[FloatArray | ShortestPathCost, IntArray, IntArray]
"""Prices of reshardings, and the row and column of each strategy at either end."""

_MOST_PAIRED = 600
"""Layouts of a tensor up to which the prices of all pairs are written down."""


@dataclass(frozen=True, eq=False)
class Ends:
    """What prices tell apart at the ends of a use: R things at its source, C at its target.

    Attributes:
        made: number of each layout at the source in the value's table, shape [R].
        rows: which of them each strategy of the source makes.
        taken: number of each layout at the target, shape [C]; one may occur several times,
            with different compute beside it.
        cols: which of them each strategy of the target takes.
        compute: what the reshardings may run beside, of shape [C] each; None for nothing.
    """

    made: IntArray
    rows: IntArray
    taken: IntArray
    cols: IntArray
    compute: Passes[FloatArray] | None = None

    @classmethod
    def of(
        cls, made: Sequence[int], taken: Sequence[int], compute: Passes[FloatArray] | None
    ) -> "Ends":
        """The ends of a use.

        Args:
            made: number of the layout that each strategy of the source makes.
            taken: number of the layout that each strategy of the target takes.
            compute: what each strategy of the target has to hide the resharding.
        """
        distinct, rows = np.unique(np.array(made, dtype=np.intp), return_inverse=True)
        wanted = np.array(taken, dtype=np.intp)
        if compute is None:
            return cls(distinct, rows, *np.unique(wanted, return_inverse=True))
        kinds, first, cols = np.unique(
            np.stack([wanted, compute.forward, compute.backward]),
            axis=1,
            return_index=True,
            return_inverse=True,
        )
        return cls(distinct, rows, wanted[first], cols.ravel(), Passes(kinds[1], kinds[2]))

    def compute_of(self, strategy: int) -> Passes[float] | None:
        """What the resharding may run beside if the target has a strategy."""
        if self.compute is None:
            return None
        col = self.cols[strategy]
        return Passes(float(self.compute.forward[col]), float(self.compute.backward[col]))

    def once(self, table: ReshardingTable) -> FloatArray:
        """Seconds of each resharding, of which somebody waits; inf if impossible, [R, C]."""
        cost = table.cost[self._pairs]
        if self.compute is None:
            return cost
        return cost - hidden_seconds(self._communication(table), self.compute)

    def again(self, table: ReshardingTable) -> FloatArray:
        """Seconds that each costs more if its forward part runs once more, shape [R, C]."""
        forward = table.again_cost[self._pairs]
        if self.compute is None:
            return forward
        passes = self._communication(table)
        once, twice = (hidden_seconds(passes, self.compute, again=a) for a in (False, True))
        return forward - (twice - once)

    def stays(self, table: ReshardingTable) -> BoolArray:
        """Whether the forward part of each does nothing, shape [R, C]."""
        return table.stays[self._pairs]

    def priced(self, table: ReshardingTable, path_costs: dict[int, ShortestPathCost]) -> Priced:
        """What an edge needs of the reshardings.

        Args:
            table: the value's reshardings.
            path_costs: those of tables that were too large so far.
        """
        if len(table.layouts) <= _MOST_PAIRED or self.compute is not None:
            return self.once(table), self.rows, self.cols
        if id(table) not in path_costs:
            path_costs[id(table)] = ShortestPathCost(len(table.layouts), *table.steps)
        return path_costs[id(table)], self.made[self.rows], self.taken[self.cols]

    @property
    def _pairs(self) -> tuple[IntArray, IntArray]:
        return self.made[:, None], self.taken[None, :]

    def _communication(self, table: ReshardingTable) -> Passes[FloatArray]:
        both, forward = table.cost[self._pairs], table.again_cost[self._pairs]
        backward = np.subtract(both, forward, out=np.zeros_like(both), where=np.isfinite(both))
        return Passes(forward, np.maximum(backward, 0.0))
