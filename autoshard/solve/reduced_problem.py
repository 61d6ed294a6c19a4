"""A reduced problem with the inverse of its reductions."""

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.network import Network
from autoshard.solve.presolve import (
    Inverse,
    Presolve,
    default_reductions,
    nothing_to_undo,
    sequence,
)
from autoshard.solve.state import SolveState


class ReducedProblem:
    """A network under reduction, the inverse of its reductions, and the state of the solve.

    Strategies are also dropped if no choice with them is better than the best one known. From then
    on bounds of the network are valid for better choices only, so they are capped at `cap`, the
    least price that a dropped choice can have.

    Args:
        network: the undecided variables.
        state: receives choices and bounds.

    Attributes:
        network: the undecided variables.
        state: receives choices and bounds.
        cap: upper limit of recorded bounds.
    """

    def __init__(self, network: Network, state: SolveState) -> None:
        self.network = network
        self.state = state
        self.cap = float("inf")
        self._inverse: Inverse = nothing_to_undo
        self._presolve = Presolve(default_reductions(state.effort), state.effort, state.statistics)

    @property
    def done(self) -> bool:
        """True if nothing is left to decide."""
        return self.network.infeasible or not self.network.variables

    def reduce(self) -> None:
        """Apply all reductions; if they decide every variable, record the optimum."""
        self._inverse = sequence([self._inverse, self._presolve.apply(self.network)])
        if self.network.infeasible:
            self.exhausted()
        elif not self.network.variables:
            self.offer({})
            self.raise_bound(self._rounded_bound(self.network.constant))

    def _rounded_bound(self, bound: float) -> float:
        """The objective, if an exact bound differs from it by rounding only; else the bound."""
        # The objective of the choice and the constant of the network are sums of the same prices in
        # another order; a gap of their rounding would keep a solved problem open.
        near = abs(self.state.objective - bound) <= 1e-12 * self.state.magnitude
        return self.state.objective if near else bound

    def offer(self, picks: dict[int, int]) -> bool:
        """Offer a position per remaining variable as a choice; return True if it is allowed."""
        choice: IntArray = np.zeros(len(self.state.problem.nodes), dtype=np.intp)
        for v, variable in self.network.variables.items():
            choice[v] = variable.labels[picks[v]]
        self._inverse(choice)
        return self.state.offer(choice)

    def raise_bound(self, bound: float) -> None:
        """Record a lower bound of the network."""
        self.state.raise_bound(min(bound, self.cap))

    def exhausted(self) -> bool:
        """Record that no better choice exists; return True if a choice was found before."""
        if self.cap < float("inf"):
            self.state.raise_bound(self.cap)
        return self.state.choice is not None

    def prune(self, least: dict[int, FloatArray]) -> int:
        """Drop strategies that cannot lead to a better choice.

        Args:
            least: lower bound of the price of all choices with each strategy, shape [S].

        Returns:
            the number of dropped strategies.
        """
        cutoff, dropped = self.state.cutoff, 0
        for v, bounds in least.items():
            keep = bounds < cutoff
            if not keep.all() and not self.network.infeasible:
                dropped += int((~keep).sum())
                self.network.keep(v, keep)
        if dropped:
            # What was dropped costs at least the cut-off, so a bound of what is left holds for all
            # choices up to there only.
            self.cap = min(self.cap, cutoff)
            self.state.count("pruned.strategies", dropped)
        return dropped

    def pick_of(self, choice: IntArray) -> dict[int, int] | None:
        """Position per remaining variable of a choice.

        Returns:
            None if one of its strategies, or a pair of them, was dropped.
        """
        picks = {}
        for v, variable in self.network.variables.items():
            place = int(np.searchsorted(variable.labels, choice[v]))
            if place == len(variable.labels) or variable.labels[place] != choice[v]:
                return None
            picks[v] = place
        return picks if np.isfinite(self.network.price(picks)) else None
