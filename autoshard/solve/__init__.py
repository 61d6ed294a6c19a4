"""The optimization core: numpy only, knows neither tensors nor meshes."""

from autoshard.solve.brute import brute_force
from autoshard.solve.closure import ShortestPathCost
from autoshard.solve.engine import solve_problem
from autoshard.solve.iopddl import read_iopddl
from autoshard.solve.marginals import MinMarginals
from autoshard.solve.problem import USAGE_TOLERANCE, Edge, Node, Problem, Repeat
from autoshard.solve.reference import solve_reference
from autoshard.solve.search import CancelToken, Progress
from autoshard.solve.solution import Solution
from autoshard.solve.tables import KeyValueStore, SolvedBlock
from autoshard.solve.usage import minimum_usage
from autoshard.solve.warm_start import WarmStart

__all__ = [
    "USAGE_TOLERANCE",
    "CancelToken",
    "Edge",
    "KeyValueStore",
    "MinMarginals",
    "Node",
    "Problem",
    "Progress",
    "Repeat",
    "ShortestPathCost",
    "Solution",
    "SolvedBlock",
    "WarmStart",
    "brute_force",
    "minimum_usage",
    "read_iopddl",
    "solve_problem",
    "solve_reference",
]
