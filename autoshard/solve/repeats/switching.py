"""Choices between two others, group by group."""

from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.arrays import IntArray
from autoshard.solve.problem import Problem
from autoshard.solve.repeats.runs import Run


def between(
    problem: Problem, runs: Sequence[Run], above: IntArray, below: IntArray
) -> Iterator[IntArray]:
    """Choices that keep the limit, from one that does towards one that does not.

    As many groups as possible are taken from the latter, the first ones or the last ones;
    what is in no group comes from either.

    Args:
        problem: the problem.
        runs: runs in it.
        above: a choice that need not keep the limit.
        below: a choice that keeps it.
    """
    groups = [instance for run in runs for instance in run.instances]
    outside = np.ones(len(below), dtype=bool)
    outside[[v for group in groups for v in group]] = False
    for base in (below, np.where(outside, above, below)):
        for order in (groups, groups[::-1]):
            kept = _most_switched(problem, order, above, base)
            yield _switched(order[:kept], above, base)


def _most_switched(
    problem: Problem, order: Sequence[tuple[int, ...]], above: IntArray, base: IntArray
) -> int:
    """How many groups can be switched before the limit breaks, by bisection."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        usage = problem.peak_usage(_switched(order[:middle], above, base))
        low, high = (middle, high) if usage <= problem.usage_limit else (low, middle - 1)
    return low


def _switched(groups: Sequence[tuple[int, ...]], above: IntArray, base: IntArray) -> IntArray:
    choice = base.copy()
    for group in groups:
        members = list(group)
        choice[members] = above[members]
    return choice
