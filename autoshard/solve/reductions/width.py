"""Components of small width are solved outright."""

from collections.abc import Callable

from autoshard.arrays import IntArray
from autoshard.solve.elimination import Elimination
from autoshard.solve.network import Network
from autoshard.solve.reductions.base import Inverse, sequence


class SolveNarrow:
    """Solve every component without usage whose elimination tables stay small.

    Args:
        check: called now and then; raises to stop.
    """

    name = "solve_narrow"

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._refused: dict[int, tuple[int, ...]] = {}

    def apply(self, network: Network) -> Inverse:
        """Solve what can be solved; the inverse reads off the answers."""
        inverses = []
        for members in network.components():
            if any(network.variables[v].terms for v in members):
                continue
            stamp = (len(members), *(network.changes[v] for v in members))
            if self._refused.get(members[0]) == stamp:
                continue
            inverse = self._solve(network, members)
            if inverse is None:
                self._refused[members[0]] = stamp
            else:
                inverses.append(inverse)
        return sequence(inverses)

    def _solve(self, network: Network, members: list[int]) -> Inverse | None:
        part = Network()
        part.variables = {v: network.variables[v] for v in members}
        part.links = {v: network.links[v] for v in members}
        plan = Elimination.compile(part, check=self._check)
        if plan is None:
            return None
        costs = {v: x.cost for v, x in part.variables.items()}
        result = plan.evaluate(costs, check=self._check)
        network.constant += result.value
        network.infeasible = network.infeasible or result.value == float("inf")
        labels = {v: part.variables[v].labels[s] for v, s in result.picks.items()}
        for v in members:
            network.remove(v)

        def invert(choice: IntArray) -> None:
            for v, label in labels.items():
                choice[v] = label

        return invert
