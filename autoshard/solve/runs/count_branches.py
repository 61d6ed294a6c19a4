"""Branching on the numbers of groups of runs that are in one of their components.

All choices with given numbers are a *branch*. At any prices of usage, one evaluation gives a bound
of every branch, and the least of them is a bound of all choices. The branch that has it is improved
next: by prices that are best for its own choices, until it excludes better choices than the best
one (best-first branch and bound; the relaxation is that of `usage_prices`).
"""

from collections import defaultdict

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.group_master import GroupMaster
from autoshard.solve.runs.usage_prices import EVALUATIONS, Point, UsageLagrangian

_MAX_EVALUATIONS = 24
_FIRST_EVALUATIONS = 8
"""Maximum numbers of evaluations, and of those with given strategies of shared nodes."""
_GAP_SHARE = 0.1
"""Share of the requested gap below which prices of a branch count as the best ones."""


def branch_on_counts(
    lagrangian: UsageLagrangian,
    prices: FloatArray,
    contracted: ContractedProblem,
    master: GroupMaster,
) -> None:
    """Raise the bound, and offer choices, by branching on the numbers of groups.

    At first, shared nodes have the strategies of the best choice: a better choice is found soon,
    and fewer strategies of shared nodes are open afterwards.

    Args:
        lagrangian: the relaxation.
        prices: its best prices, shape [D].
        contracted: the problem with its runs contracted.
        master: combines the groups of choices; extended by those that are found.
    """
    best = master.state.choice
    if best is not None and contracted.has_shared_nodes:
        _Branches(lagrangian, contracted, master, best).search(prices, most=_FIRST_EVALUATIONS)
    if not master.state.closed:
        _Branches(lagrangian, contracted, master, None).search(prices)


class _Branches:
    """Bounds and choices of all branches.

    Args:
        lagrangian: the relaxation.
        contracted: the problem.
        master: combines the groups of choices.
        shared: a choice whose strategies the shared nodes have; None for any strategies.
    """

    def __init__(
        self,
        lagrangian: UsageLagrangian,
        contracted: ContractedProblem,
        master: GroupMaster,
        shared: IntArray | None,
    ) -> None:
        self._lagrangian, self._contracted = lagrangian, contracted
        self._master, self._state, self._shared = master, master.state, shared
        self._points: dict[tuple[int, ...], list[Point]] = defaultdict(list)
        self._bounds: FloatArray = np.zeros(0)
        self._branch: tuple[int, ...] = ()
        self._work = self._state.settings.max_counted_work

    def search(self, prices: FloatArray, *, most: int = _MAX_EVALUATIONS) -> None:
        """Improve the branch with the least bound until it excludes better choices.

        Args:
            prices: the first prices, shape [D].
            most: maximum number of evaluations.
        """
        state = self._state
        for _ in range(most):
            state.check()
            if self._work <= 0 or not self._evaluate(self._lagrangian.padded(prices)):
                break
            bound = float(self._bounds[self._branch])
            # With given strategies of shared nodes, it is a bound of some choices only.
            if self._shared is None:
                state.raise_bound(bound)
            points = self._points[self._branch]
            if state.closed or bound >= state.cutoff or not points:
                break
            prices, promised = self._lagrangian.best_prices(points=points)
            if promised - bound <= _GAP_SHARE * state.gap * abs(promised):
                break

    def _evaluate(self, prices: FloatArray) -> bool:
        """Bounds of all branches at some prices, and choices of the least one and the last one."""
        lagrangian, state = self._lagrangian, self._state
        # Prices above this give a bound that excludes better choices.
        most = state.cutoff + lagrangian.paid(prices)
        costs = lagrangian.priced(prices)
        found = self._contracted.minimise_by_count(costs, most, shared=self._shared)
        if found is None:
            return False
        self._work -= found.work
        state.count(EVALUATIONS)
        values = np.minimum(found.values, found.least_of_others)
        possible, proven = np.isfinite(values), np.full(values.shape, np.inf)
        proven[possible] = lagrangian.proven(values[possible], prices)
        # Any prices prove a bound of every branch, so each keeps the best one of all evaluations.
        self._bounds = np.maximum(self._bounds, proven) if self._bounds.size else proven
        least = np.unravel_index(int(np.argmin(self._bounds)), proven.shape)
        before, self._branch = self._branch, tuple(int(i) for i in least)
        for numbers in dict.fromkeys((before, self._branch)):
            if numbers and np.isfinite(found.values[numbers]):
                choice = found.choice(numbers)
                lagrangian.add_choice(choice)
                self._points[numbers].append(lagrangian.points[-1])
                self._master.add(choice)
        self._master.combine()
        return True
