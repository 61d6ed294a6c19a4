"""What solving a problem under one usage limit teaches about other limits.

Choices and strategies in it only suggest where to look; they are compared anew each time.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.arrays import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from autoshard.solve.narrowing.core import Core


@dataclass(eq=False)
class WarmStart:
    """Knowledge of a problem that holds for every usage limit.

    Attributes:
        unlimited_bound: a lower bound of the price of every choice, if the best choice without
            a limit is known to break the limits, so that solving without one is of no use.
        best_choices: choices that were best at some prices of usage.
        strategy_bounds: of a wide problem without a limit, lower bounds by strategy per node.
        candidates: of a wide problem, strategies of each node to begin with.
        swap_options: choices whose groups local search may combine, one tuple per neighbourhood.
        restricted: of a wide problem, the restricted problem that was solved, and its own
            warm start.
        proven: largest limit for which a bound was proven, and that bound.
    """

    unlimited_bound: float | None = None
    best_choices: list[IntArray] = field(default_factory=list)
    strategy_bounds: list[FloatArray] = field(default_factory=list)
    candidates: list[BoolArray] = field(default_factory=list)
    swap_options: list[tuple[IntArray, ...]] = field(default_factory=list)
    restricted: "tuple[Core, WarmStart] | None" = None
    proven: tuple[float, float] = (-float("inf"), -float("inf"))
