"""Minimisation of a problem with runs: exact if tables are small, else with a bound."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.runs.block_table import OpenStrategies
from autoshard.solve.runs.contraction import Answer, ContractedProblem
from autoshard.solve.state import SolveState

Minimise = Callable[[Sequence[FloatArray], float], tuple[float, IntArray | None] | None]
"""Returns a lower bound and the best choice found; its arguments are costs per strategy of each
node, and the relative difference that may be left between bound and choice."""

SLACK = 1e-6
"""Relative difference below which two prices count as equal."""


class RunSolver:
    """Minimises a problem with runs for any costs, without its usage limit.

    Args:
        state: of the problem.
        contracted: the problem with its runs contracted.
    """

    def __init__(self, state: SolveState, contracted: ContractedProblem) -> None:
        self._state, self._settings = state, state.settings
        self._problem = state.problem
        self._contracted = contracted
        shared_nodes = set(contracted.shared_nodes)
        self._to_shared_nodes = [
            e for e in self._problem.edges if shared_nodes & {e.source, e.target}
        ]

    def minimise(
        self, costs: Sequence[FloatArray], slack: float
    ) -> tuple[float, IntArray | None] | None:
        """A lower bound, and the best choice found.

        Shared nodes make tables large. If they are too large, shared nodes are relaxed first: every
        group may pick another strategy of a shared node. The resulting bounds usually leave a few
        strategies of shared nodes that a best choice may have, and tables of those are small.

        Args:
            costs: shape [S] for each node.
            slack: relative difference that may be left between bound and choice.

        Returns:
            None if the tables would be too large.
        """
        shared_nodes, nodes = self._contracted.shared_nodes, self._problem.nodes
        every = {
            shared_node: np.ones(nodes[shared_node].num_strategies, dtype=np.bool_)
            for shared_node in shared_nodes
        }
        exact = self._contracted.minimise(costs, every, most_work=self._settings.eager_run_work)
        if exact is not None:
            return exact.value, exact.choice
        relaxed = self._contracted.minimise(costs, dict.fromkeys(shared_nodes))
        if relaxed is None:
            return None
        best = self._fixed_at_best(costs, relaxed)
        if best is None:
            return relaxed.value, None
        if self._contracted.work > self._settings.max_exact_run_work:
            slack = max(slack, self._state.gap)
        if _close(best.value, relaxed.value, slack):
            return relaxed.value, best.choice
        # The same tables again; least prices by strategy take longer than the least of all.
        relaxed = self._contracted.minimise(
            costs, dict.fromkeys(shared_nodes), bounds_of=shared_nodes
        )
        assert relaxed is not None, "the same tables were joined before"
        return self._solve_narrowed(costs, relaxed, best, slack)

    def quick_choice(self, costs: Sequence[FloatArray]) -> IntArray | None:
        """The best choice with the cheapest strategy of each shared node, which takes little time.

        Args:
            costs: shape [S] for each node.

        Returns:
            None if there is no such choice, or tables would be too large.
        """
        fixed: Mapping[int, BoolArray] = {
            v: np.arange(len(costs[v])) == int(costs[v].argmin())
            for v in self._contracted.shared_nodes
        }
        answer = self._contracted.minimise(costs, fixed, most_work=self._settings.eager_run_work)
        return None if answer is None or np.isinf(answer.value) else answer.choice

    @property
    def components(self) -> tuple[int | None, ...]:
        """Numbers of the components of groups; only None if there is one component."""
        num_components = self._contracted.num_components
        return tuple(range(num_components)) if num_components > 1 else (None,)

    def is_same_at_shared(self, choice: IntArray, other: IntArray) -> bool:
        """True if two choices use the same strategies at shared and boundary nodes."""
        one, two = (self._contracted.shared(x) for x in (choice, other))
        return all(np.array_equal(one[v], two[v]) for v in one)

    def near(
        self, costs: Sequence[FloatArray], choice: IntArray, component: int | None
    ) -> IntArray | None:
        """The best choice that uses the strategies of another one at shared and boundary nodes.

        Args:
            costs: shape [S] for each node.
            choice: the other choice.
            component: number of the only component of groups that is allowed; all if None.
        """
        answer = self._contracted.minimise(
            costs, self._contracted.shared(choice), component=component
        )
        return None if answer is None else answer.choice

    def _solve_narrowed(
        self,
        costs: Sequence[FloatArray],
        relaxed: Answer,
        best: Answer,
        slack: float,
    ) -> tuple[float, IntArray]:
        """Drop strategies that no best choice has, one shared node at a time; solve the rest."""
        bound = relaxed.value
        all_shared_nodes: OpenStrategies = dict.fromkeys(self._contracted.shared_nodes)
        cutoff = best.value * (1 + np.sign(best.value) * SLACK)
        left = {v: bounds <= cutoff for v, bounds in relaxed.shared_node_bounds.items()}
        for shared_node in self._contracted.shared_nodes:
            # A shared node with a single strategy left does not enlarge the table.
            decided = {h: mask for h, mask in left.items() if mask.sum() == 1}
            trial = {**all_shared_nodes, **decided, shared_node: left[shared_node]}
            answer = self._contracted.minimise(costs, trial, bounds_of=(shared_node,))
            if answer is None:
                return bound, best.choice
            bound = max(bound, min(answer.value, best.value))
            better = self._fixed_at_best(costs, answer)
            if better is not None and better.value < best.value:
                best = better
            if _close(best.value, bound, slack):
                return bound, best.choice
            left[shared_node] = answer.shared_node_bounds[shared_node] <= best.value * (
                1 + np.sign(best.value) * SLACK
            )
        exact = self._contracted.minimise(costs, left)
        if exact is None:
            return bound, best.choice
        if exact.value < best.value:
            return exact.value, exact.choice
        return best.value, best.choice

    def _fixed_at_best(self, costs: Sequence[FloatArray], relaxed: Answer) -> Answer | None:
        """The best choice with shared nodes fixed at the best strategies for `relaxed`."""
        prices_at = {
            shared_node: costs[shared_node].copy() for shared_node in self._contracted.shared_nodes
        }
        for edge in self._to_shared_nodes:
            if edge.source in prices_at:
                column = edge.cols[relaxed.choice[edge.target]]
                prices_at[edge.source] += edge.cost[edge.rows, column]
            if edge.target in prices_at:
                row = edge.rows[relaxed.choice[edge.source]]
                prices_at[edge.target] += edge.cost[row, edge.cols]
        fixed: Mapping[int, BoolArray] = {
            shared_node: np.arange(len(prices)) == int(prices.argmin())
            for shared_node, prices in prices_at.items()
        }
        return self._contracted.minimise(costs, fixed)


def _close(value: float, bound: float, slack: float) -> bool:
    return value <= bound or value - bound <= slack * abs(value) < np.inf
