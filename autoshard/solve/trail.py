"""What solving a problem under one usage limit leaves for other limits.

Choices and strategies in it are where to look; they are compared anew each time.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.arrays import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from autoshard.solve.narrowing.core import Core


@dataclass(eq=False)
class Trail:
    """What is known of a problem, whatever its limit.

    Attributes:
        unlimited: a lower bound of the price of every choice, if the best one is known to
            break the limits; to look at it again would be in vain.
        best: choices that were best at some prices of usage.
        least: of a wide problem without a limit, lower bounds by strategy of each node.
        likely: of a wide problem, strategies of each node to begin with.
        near: choices for which groups may be exchanged, by the way in which they were found.
        core: of a wide problem the part that was solved, and the trail of that.
        proven: largest limit that a bound was proven for, and that bound.
    """

    unlimited: float | None = None
    best: list[IntArray] = field(default_factory=list)
    least: list[FloatArray] = field(default_factory=list)
    likely: list[BoolArray] = field(default_factory=list)
    near: list[tuple[IntArray, ...]] = field(default_factory=list)
    core: "tuple[Core, Trail] | None" = None
    proven: tuple[float, float] = (-float("inf"), -float("inf"))
