"""Problems without limits solved by toulbar2, which shares no code with our solver.

https://toulbar2.github.io/toulbar2 solves weighted constraint satisfaction problems.
"""

import numpy as np
from pytoulbar2 import CFN

from autoshard.base.arrays import FloatArray
from autoshard.solve import Problem


def weighted_csp_optimum(problem: Problem, *, scale: int) -> float | None:
    """The least cost of a problem, or None if it has no choice.

    Args:
        problem: a problem; usage is ignored.
        scale: all costs are multiples of 1 / scale, since toulbar2 minimises integers.
    """
    links = _links(problem)
    tables = [*(node.cost for node in problem.nodes), *(costs for _, _, costs in links)]
    most = sum(float(costs[np.isfinite(costs)].max(initial=0.0)) for costs in tables)
    top = float(round(scale * (most + 1)))
    network = CFN(top, resolution=0, verbose=-1)
    for number, node in enumerate(problem.nodes):
        network.AddVariable(f"x{number}", list(range(node.num_strategies)))
        network.AddFunction([number], np.minimum(scale * node.cost, top).tolist())
    for source, target, costs in links:
        network.AddFunction([source, target], np.minimum(scale * costs, top).ravel().tolist())
    answer = network.Solve()
    return None if answer is None else float(answer[1]) / scale


def _links(problem: Problem) -> list[tuple[int, int, FloatArray]]:
    """Source, target and costs of each edge; tied nodes must take the same strategy."""
    links = [(e.source, e.target, e.cost[np.ix_(e.rows, e.cols)]) for e in problem.edges]
    for first, second in problem.ties:
        equal = np.eye(problem.nodes[first].num_strategies) > 0
        links.append((first, second, np.where(equal, 0.0, np.inf)))
    return links
