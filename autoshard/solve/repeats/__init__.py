"""Repeated groups of nodes: one is solved, the others follow."""

from autoshard.solve.repeats.runs import Run, find_runs
from autoshard.solve.repeats.search import Outcome, solve_repeats

__all__ = ["Outcome", "Run", "find_runs", "solve_repeats"]
