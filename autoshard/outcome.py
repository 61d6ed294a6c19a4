"""How a search for an optimum ended, in the words that solver, plan and service share."""

from enum import StrEnum
from math import isfinite


class SolveStatus(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """The objective is proven least, within the requested gap."""
    FEASIBLE = "feasible"
    """There is a solution, and its bound leaves a gap."""
    INFEASIBLE = "infeasible"
    """Proven: nothing satisfies the limits."""
    TIMED_OUT = "timed_out"
    """The time ended before any solution was found."""
    CANCELLED = "cancelled"
    """The caller stopped the solve; the best solution so far is kept if there is one."""


def relative_gap(objective: float, bound: float) -> float:
    """Distance of an objective from a lower bound, relative to the objective.

    >>> relative_gap(10.0, 9.0)
    0.1
    """
    if not isfinite(objective):
        return float("inf")
    return max(objective - bound, 0.0) / max(abs(objective), 1e-30)
