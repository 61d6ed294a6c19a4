"""Every choice, priced: the yardstick of the tests."""

import time

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.errors import OptionError
from autoshard.outcome import SolveStatus
from autoshard.solve.problem import USAGE_TOLERANCE, Problem
from autoshard.solve.solution import Solution

MOST_CHOICES = 1 << 21


def brute_force(problem: Problem) -> Solution:
    """Price every choice and return a cheapest one that is allowed.

    Args:
        problem: a small problem: the product of the numbers of strategies, where tied
            nodes count once, must not exceed `MOST_CHOICES`.

    Raises:
        OptionError: there are too many choices.
    """
    start = time.perf_counter()
    choices = _all_choices(problem)
    prices: FloatArray = np.zeros(len(choices))
    for i, node in enumerate(problem.nodes):
        prices = prices + node.cost[choices[:, i]]
    for edge in problem.edges:
        rows, cols = edge.rows[choices[:, edge.source]], edge.cols[choices[:, edge.target]]
        prices = prices + edge.cost[rows, cols]
    room = problem.usage_limit + abs(problem.usage_limit) * USAGE_TOLERANCE
    prices = np.where(_peaks(problem, choices) <= room, prices, np.inf)
    best = int(prices.argmin())
    value, elapsed = float(prices[best]), time.perf_counter() - start
    if not np.isfinite(value):
        return Solution(SolveStatus.INFEASIBLE, None, value, value, elapsed)
    return Solution(SolveStatus.OPTIMAL, choices[best], value, value, elapsed)


def _all_choices(problem: Problem) -> IntArray:
    """Every choice that keeps the ties, shape [number of choices, N]."""
    head = np.arange(len(problem.nodes))
    for group in problem.ties:
        head[list(group)] = min(group)
    heads, place = np.unique(head, return_inverse=True)
    sizes = [problem.nodes[v].num_strategies for v in heads]
    total = float(np.prod(np.array(sizes, dtype=np.float64)))
    if total > MOST_CHOICES:
        raise OptionError(
            f"brute_force would price {total:.3g} choices, more than {MOST_CHOICES}; "
            "use solve_problem"
        )
    grid = np.indices(sizes, dtype=np.intp).reshape(len(sizes), int(total))
    return grid[place].T


def _peaks(problem: Problem, choices: IntArray) -> FloatArray:
    """Largest usage over time of each choice, shape [number of choices]."""
    peaks: FloatArray = np.zeros(len(choices))
    for alive in problem.live_sets:
        use: FloatArray = np.zeros(len(choices))
        for i in alive:
            use = use + problem.nodes[i].usage[choices[:, i]]
        peaks = np.maximum(peaks, use)
    return peaks
