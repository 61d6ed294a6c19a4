"""Telling a search what the runs of its problem lead to."""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from autoshard.solve.repeats.condensed import Condensed
from autoshard.solve.repeats.limited import PricedUsage
from autoshard.solve.repeats.runs import Run, find_runs
from autoshard.solve.repeats.solver import SLACK, GroupSolver
from autoshard.solve.search import Search


class Outcome(StrEnum):
    """What solving through runs came to."""

    NOTHING = "nothing"
    """There are no runs, or the tables would be too large."""
    TOLD = "told"
    """The search has been told choices and bounds."""
    INFEASIBLE = "infeasible"
    """No choice keeps the usage limit."""


def solve_repeats(search: Search) -> Outcome:
    """Solve a problem through its runs.

    The search is told the best choice that was found, and the bound that every choice obeys.
    """
    problem = search.problem
    runs = find_runs(problem)
    condensed = Condensed(problem, runs, search.block_cache, check=search.check)
    if problem.ties or not condensed.worthwhile:
        return Outcome.NOTHING
    try:
        return _through(search, runs, condensed)
    finally:
        search.blocks = condensed.report()


def _through(search: Search, runs: Sequence[Run], condensed: Condensed) -> Outcome:
    problem = search.problem
    search.enter("solve repeated groups")
    solver = GroupSolver(search, condensed)
    if not search.warm_start.best_choices:
        answer = solver.minimise([node.cost for node in problem.nodes], SLACK)
        if answer is None:
            return Outcome.NOTHING
        bound, choice = answer
        search.raise_bound(bound)
        if choice is None or search.offer(choice) or np.isinf(problem.usage_limit):
            return Outcome.TOLD
        search.warm_start.best_choices.append(choice)
    possible = PricedUsage(search, runs, solver).run()
    return Outcome.TOLD if possible else Outcome.INFEASIBLE
