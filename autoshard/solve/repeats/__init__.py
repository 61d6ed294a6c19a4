"""Repeated groups of nodes: one is solved, the others follow."""

from autoshard.solve.repeats.pricing import Pricing
from autoshard.solve.repeats.runs import Run, covered_edges, find_runs, independent_runs
from autoshard.solve.repeats.search import Outcome, solve_repeats
from autoshard.solve.repeats.watch import Watch

__all__ = [
    "Outcome",
    "Pricing",
    "Run",
    "Watch",
    "covered_edges",
    "find_runs",
    "independent_runs",
    "solve_repeats",
]
