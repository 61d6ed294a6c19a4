"""What a solve found."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

from autoshard.solve.problem import IntArray
from autoshard.solve.tables import SolvedBlock


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """A choice whose price is proven least, within the requested gap."""
    FEASIBLE = "feasible"
    """A choice, with a bound that leaves a gap."""
    INFEASIBLE = "infeasible"
    """Proven: no choice satisfies the limits."""
    TIMED_OUT = "timed_out"
    """The time ended before any choice was found."""
    CANCELLED = "cancelled"
    """Somebody stopped the solve; the best choice so far is kept if there is one."""


@dataclass(frozen=True)
class Solution:
    """What a solve found.

    Attributes:
        status: how it ended.
        choice: strategy index per node, or None when none was found.
        objective: price of the choice, or inf.
        bound: proven lower bound of every choice's price.
        wall_time: seconds spent.
        statistics: what each step did, by name, for the report.
        blocks: repeated groups that were solved as one.
    """

    status: Status
    choice: IntArray | None
    objective: float
    bound: float
    wall_time: float
    statistics: dict[str, float] = field(default_factory=dict)
    blocks: tuple[SolvedBlock, ...] = ()

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the bound; inf without a choice."""
        return float("inf") if self.choice is None else relative_gap(self.objective, self.bound)


def relative_gap(objective: float, bound: float) -> float:
    """Distance of an objective from a lower bound, relative to the objective."""
    if not isfinite(objective):
        return float("inf")
    return max(objective - bound, 0.0) / max(abs(objective), 1e-30)
