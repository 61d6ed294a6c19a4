"""What every single choice costs, with everything else at its best."""

from collections.abc import Callable

import numpy as np

from autoshard.solve.elimination import Elimination
from autoshard.solve.network import Network
from autoshard.solve.problem import FloatArray, Problem


def min_marginals(
    problem: Problem, *, check: Callable[[], None] = lambda: None
) -> tuple[FloatArray, ...] | None:
    """Least objective of all choices that pick each strategy of each node, without the limit.

    Exact, by message passing over an elimination order (see `Elimination`).

    Args:
        problem: what to look at; its usage limit is ignored.
        check: called now and then; raises to stop.

    Returns:
        an array of shape [S] per node, inf where a strategy is impossible; None where the
        problem has ties, or its tables would be too large.
    """
    if problem.ties:
        return None
    network = Network.from_problem(problem, limited=False)
    plan = Elimination.compile(network, check=check)
    if plan is None:
        return None
    result = plan.evaluate({v: x.cost for v, x in network.variables.items()}, check=check)
    if not np.isfinite(result.value):
        return tuple(np.full(node.num_strategies, np.inf) for node in problem.nodes)
    found = plan.min_marginals(result, check=check)
    return tuple(found[v] for v in range(len(problem.nodes)))
