"""Variables of a formulation, and the uses of values between them."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.graph.gradients import Gradient
from autoshard.ops import Strategy
from autoshard.pricing.prices import Usage
from autoshard.solve import ProblemNode


class Role(StrEnum):
    """The kind of a variable."""

    INPUT = "input"
    OPERATOR = "operator"
    SHARED = "shared"
    OUTPUT = "output"


@dataclass(frozen=True)
class Variable:
    """A variable of the problem: a choice among strategies.

    Attributes:
        role: its kind.
        name: the value (input, shared), the node (operator) or the position (output).
        strategies: S strategies; those of an input have only outputs, those of an output only
            inputs.
        time: seconds of each strategy, shape [S].
        usage: bytes per device of each strategy by kind, each of shape [S].
        interval: half-open interval of nodes during which its memory is in use in inference.
    """

    role: Role
    name: str
    strategies: tuple[Strategy, ...]
    time: FloatArray
    usage: Usage = field(default_factory=dict)
    interval: tuple[int, int] = (0, 0)

    @property
    def min_bytes(self) -> int:
        """The minimum bytes per device over the allowed strategies."""
        allowed = self._total_usage()[np.isfinite(self.time)]
        return int(allowed.min()) if allowed.size else 0

    def problem_node(self, totals: dict[int, FloatArray]) -> ProblemNode:
        """The variable as a node of the problem; `totals` shares arrays between equal usages."""
        key = id(self.usage)
        if key not in totals:
            totals[key] = self._total_usage()
        return ProblemNode(self.time, totals[key], self.interval, f"{self.role}:{self.name}")

    def _total_usage(self) -> FloatArray:
        return sum(self.usage.values(), np.zeros(len(self.strategies)))


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a value: from output `output` of a variable to input `position` of another.

    Attributes:
        value: name of the value.
        source: index of the variable that produces it.
        output: position of the value among the outputs of the source.
        target: index of the variable that uses it.
        position: position of the value among the inputs of the target.
        gradient: the gradient of this use.
    """

    value: str
    source: int
    output: int
    target: int
    position: int
    gradient: Gradient
