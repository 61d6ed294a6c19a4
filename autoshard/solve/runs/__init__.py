"""Runs of repeated groups: one group is solved, and the run is contracted to one table."""

from autoshard.solve.runs.find import Run, covered_edges, find_runs, group_edges, independent_runs
from autoshard.solve.runs.limited import RunOutcome, solve_runs
from autoshard.solve.runs.usage_prices import UsageLagrangian, UsageWeights

__all__ = [
    "Run",
    "RunOutcome",
    "UsageLagrangian",
    "UsageWeights",
    "covered_edges",
    "find_runs",
    "group_edges",
    "independent_runs",
    "solve_runs",
]
