"""What a solve found."""

from dataclasses import dataclass, field

from autoshard.arrays import IntArray
from autoshard.outcome import SolveStatus, relative_gap
from autoshard.solve.tables import SolvedBlock


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

    status: SolveStatus
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
