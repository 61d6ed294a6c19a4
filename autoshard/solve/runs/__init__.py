"""Run contraction: one group of a run is solved, and the run becomes one table."""

from autoshard.solve.runs.find import Run, find_runs, group_edges, independent_runs, uncovered_edges
from autoshard.solve.runs.limited import RunOutcome, solve_runs
from autoshard.solve.runs.usage_prices import SAME, UsageLagrangian, UsageWeights

__all__ = [
    "SAME",
    "Run",
    "RunOutcome",
    "UsageLagrangian",
    "UsageWeights",
    "find_runs",
    "group_edges",
    "independent_runs",
    "solve_runs",
    "uncovered_edges",
]
