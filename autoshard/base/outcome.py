"""Status of a solve, relative gap and names of solvers: shared by solver, plan and service."""

from enum import StrEnum
from math import isfinite

OWN_SOLVER = "autoshard"
"""The solver that reduces a problem first."""
PLAIN_SOLVER = "ilp"
"""HiGHS, on the integer program of a problem as it is given."""


class SolveStatus(StrEnum):
    """Status of a solve when it ends."""

    OPTIMAL = "optimal"
    """The objective is proven optimal within the requested gap."""
    FEASIBLE = "feasible"
    """There is a solution, but the gap to the bound is larger than requested."""
    INFEASIBLE = "infeasible"
    """It is proven that nothing satisfies the limits."""
    TIMED_OUT = "timed_out"
    """The time ended before any solution was found."""
    CANCELLED = "cancelled"
    """The caller stopped the solve; the best solution so far is returned if there is one."""


TIME_LIMIT_REACHED = "time_limit_reached"
"""Statistic of a solve that a time limit cut short: on a faster machine, or one with less other
work, its solution or its bound may be better."""


def relative_gap(objective: float, bound: float) -> float:
    """Distance of an objective from a lower bound, relative to the objective.

    >>> relative_gap(10.0, 9.0)
    0.1
    """
    if not isfinite(objective):
        return float("inf")
    return max(objective - bound, 0.0) / max(abs(objective), 1e-30)
