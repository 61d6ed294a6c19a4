"""The optimization core: a `Problem` in, a certified `Solution` out; numpy only, no tensors."""

from autoshard.base.limits import CancelToken
from autoshard.solve.block_cache import (
    KeyValueStore,
    SolvedBlock,
    content_key,
    read_sealed,
    write_sealed,
)
from autoshard.solve.bounds.elimination import MinMarginals
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.iopddl import read_iopddl
from autoshard.solve.minimum_usage import minimum_usage
from autoshard.solve.problem import Edge, Problem, ProblemNode, Repeat, UsageLimit
from autoshard.solve.programs.integer_program import (
    ProgramSize,
    ProgramTooLargeError,
    program_size,
    with_equal_groups,
)
from autoshard.solve.programs.restricted_problem import restrict
from autoshard.solve.reference import brute_force
from autoshard.solve.settings import SolverSettings
from autoshard.solve.solver import solve_problem
from autoshard.solve.state import Progress, Solution, WarmStart

__all__ = [
    "CancelToken",
    "Edge",
    "KeyValueStore",
    "MinMarginals",
    "Problem",
    "ProblemNode",
    "ProgramSize",
    "ProgramTooLargeError",
    "Progress",
    "Repeat",
    "ShortestPathCost",
    "Solution",
    "SolvedBlock",
    "SolverSettings",
    "UsageLimit",
    "WarmStart",
    "brute_force",
    "content_key",
    "minimum_usage",
    "program_size",
    "read_iopddl",
    "read_sealed",
    "restrict",
    "solve_problem",
    "with_equal_groups",
    "write_sealed",
]
