"""The optimization core: numpy only, knows neither tensors nor meshes."""

from autoshard.solve.brute import brute_force
from autoshard.solve.closure import Closure
from autoshard.solve.engine import solve_problem
from autoshard.solve.iopddl import read_iopddl
from autoshard.solve.marginals import Marginals
from autoshard.solve.problem import USAGE_TOLERANCE, Edge, Node, Problem, Repeat
from autoshard.solve.reference import solve_reference
from autoshard.solve.search import CancelToken, Progress
from autoshard.solve.solution import Solution
from autoshard.solve.tables import SolvedBlock, TableStore
from autoshard.solve.trail import Trail
from autoshard.solve.usage import minimum_usage

__all__ = [
    "USAGE_TOLERANCE",
    "CancelToken",
    "Closure",
    "Edge",
    "Marginals",
    "Node",
    "Problem",
    "Progress",
    "Repeat",
    "Solution",
    "SolvedBlock",
    "TableStore",
    "Trail",
    "brute_force",
    "minimum_usage",
    "read_iopddl",
    "solve_problem",
    "solve_reference",
]
