"""What every single choice costs, with everything else at its best."""

from collections.abc import Callable, Mapping

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.elimination import Elimination
from autoshard.solve.network import Network
from autoshard.solve.problem import Problem


def _go_on() -> None:
    """Never stops anything."""


class MinMarginals:
    """The best choices that pick a given strategy of a given node; usage limits are ignored.

    Exact, by message passing over an elimination order (see `Elimination`).

    Attributes:
        least: for each node the least objective of all choices that pick each of its
            strategies, shape [S]; inf where a strategy is impossible.
    """

    def __init__(self, network: Network, plan: Elimination, check: Callable[[], None]) -> None:
        self._plan = plan
        self._check = check
        self._costs: Mapping[int, FloatArray] = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(self._costs, check=check)
        if np.isfinite(result.value):
            found = plan.min_marginals(result, check=check)
            self.least = tuple(found[v] for v in sorted(found))
        else:
            every = (self._costs[v] for v in sorted(self._costs))
            self.least = tuple(np.full(len(cost), np.inf) for cost in every)

    @classmethod
    def of(cls, problem: Problem, *, check: Callable[[], None] = _go_on) -> "MinMarginals | None":
        """The marginals of a problem; None where it has ties, or tables would be too large.

        Closures stand for matrices that are too large.

        Args:
            problem: what to look at.
            check: called now and then; raises to stop.
        """
        if problem.ties or problem.has_path_costs:
            return None
        network = Network.from_problem(problem, limited=False)
        plan = Elimination.compile(network, check=check)
        return None if plan is None else cls(network, plan, check)

    def choice(self, node: int, strategy: int) -> IntArray:
        """A choice that attains `least[node][strategy]`, which must be finite."""
        cost = np.full(len(self._costs[node]), np.inf)
        cost[strategy] = self._costs[node][strategy]
        picks = self._plan.evaluate({**self._costs, node: cost}, check=self._check).picks
        return np.array([picks[v] for v in sorted(picks)], dtype=np.intp)
