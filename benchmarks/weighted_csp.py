"""Problems without limits solved by toulbar2, a solver of weighted constraint satisfaction.

    python -m benchmarks.weighted_csp A.json.gz G.json.gz --seconds 120

An instance of the contest is solved without its usage limit, by autoshard and by toulbar2
(https://toulbar2.github.io/toulbar2), which shares no code with it. A row of the table that is
printed shows both results, and seconds of the processor.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pytoulbar2 import CFN

from autoshard.base.arrays import FloatArray
from autoshard.solve import Problem, read_iopddl, solve_problem


class Optimum(NamedTuple):
    """What toulbar2 proved.

    Attributes:
        cost: of the best choice; None if none below the given cost was found.
        bound: lower bound of the cost of all choices.
        seconds: of the processor.
    """

    cost: float | None
    bound: float
    seconds: float


def weighted_csp_optimum(
    problem: Problem, *, scale: int = 1, below: float | None = None, seconds: int = 600
) -> Optimum:
    """The least cost of a problem by toulbar2, which minimises integers.

    Args:
        problem: a problem; usage is ignored.
        scale: all costs are multiples of 1 / scale.
        below: only choices of a smaller cost are looked for; all if None.
        seconds: time limit.
    """
    links = list(_links(problem))
    most = sum(_largest(node.cost) for node in problem.nodes)
    most += sum(_largest(costs) for _, _, costs in links)
    top = float(round(scale * (most + 1 if below is None else below)))
    network = CFN(top, resolution=0, verbose=-1)
    for number, node in enumerate(problem.nodes):
        network.AddVariable(f"x{number}", list(range(node.num_strategies)))
        network.AddFunction([number], np.minimum(scale * node.cost, top).tolist())
    for source, target, costs in links:
        network.AddFunction([source, target], np.minimum(scale * costs, top).ravel().tolist())
    start = time.process_time()
    answer = network.Solve(timeLimit=seconds)
    elapsed = time.process_time() - start
    bound = float(network.GetDDualBound()) / scale
    return Optimum(None if answer is None else float(answer[1]) / scale, bound, elapsed)


def _links(problem: Problem) -> list[tuple[int, int, FloatArray]]:
    """Source, target and costs of each edge; tied nodes must take the same strategy."""
    links = [(e.source, e.target, e.cost[np.ix_(e.rows, e.cols)]) for e in problem.edges]
    for first, second in problem.ties:
        equal = np.eye(problem.nodes[first].num_strategies) > 0
        links.append((first, second, np.where(equal, 0.0, np.inf)))
    return links


def _largest(costs: FloatArray) -> float:
    return float(costs[np.isfinite(costs)].max(initial=0.0))


def main() -> None:
    """Print a row per instance."""
    parser = argparse.ArgumentParser(description="Compare with toulbar2 on contest instances.")
    parser.add_argument("instances", nargs="+", type=Path)
    parser.add_argument("--seconds", type=int, default=120, help="time limit of each solver")
    options = parser.parse_args()
    print("| instance | cost | bound | seconds | cost by toulbar2 | its bound | seconds |")
    print("|---|---|---|---|---|---|---|")
    for path in options.instances:
        problem = replace(read_iopddl(path), usage_limit=float("inf"))
        start = time.process_time()
        own = solve_problem(problem, time_limit=options.seconds, relative_gap=0.0)
        elapsed = time.process_time() - start
        other = weighted_csp_optimum(problem, below=own.objective + 1, seconds=options.seconds)
        cells = (
            path.name.split(".")[0],
            *(f"{own.objective:.12g}", f"{own.bound:.12g}", f"{elapsed:.1f}"),
            "none as good" if other.cost is None else f"{other.cost:.12g}",
            *(f"{other.bound:.12g}", f"{other.seconds:.1f}"),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
