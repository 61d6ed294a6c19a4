"""What is chosen, and which choices meet: the variables of the problem, and the uses of values."""

from dataclasses import dataclass, field
from enum import StrEnum

from autoshard.arrays import FloatArray
from autoshard.ops import Strategy
from autoshard.plan.gradients import Gradient
from autoshard.plan.pricing import Usage


class Role(StrEnum):
    """What a choice decides."""

    INPUT = "input"
    OPERATOR = "operator"
    SHARED = "shared"
    OUTPUT = "output"


@dataclass(frozen=True)
class Variable:
    """One choice.

    Attributes:
        role: what it decides.
        name: the value (input, shared), the node (operator) or the position (output).
        strategies: what there is to choose from; an input has only outputs, and so on.
        time: seconds of each strategy, shape [S].
        usage: bytes per device of each strategy by kind, each of shape [S].
        interval: when its memory is held in inference, half-open.
    """

    role: Role
    name: str
    strategies: tuple[Strategy, ...]
    time: FloatArray
    usage: Usage = field(default_factory=dict)
    interval: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Arc:
    """One use of a value: from output `output` of a choice to input `position` of another."""

    value: str
    source: int
    output: int
    target: int
    position: int
    gradient: Gradient
