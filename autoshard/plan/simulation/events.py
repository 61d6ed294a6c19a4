"""What a simulation consists of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.buckets import Bucket
from autoshard.plan.document import Resharding
from autoshard.plan.memory.schedule import Phase
from autoshard.plan.memory.timeline import Timeline

Category = Literal["compute", "communication", "optimizer", "recompute"]
"""Under what a plan's costs count something."""

COMPUTE = "compute"
"""Name of the lane of everything that is not on an axis."""


def resharding_label(resharding: Resharding, targets: Mapping[str, str]) -> str:
    """The value that is resharded, and what for; what enters goes by its name in the model.

    Args:
        resharding: of a stage.
        targets: names in the model, by value.
    """
    value = targets.get(resharding.value, resharding.value)
    return f"{value} for {resharding.consumer}" if resharding.consumer else value


def bucket_label(bucket: Bucket, targets: Mapping[str, str]) -> str:
    """What the first of a bucket is called, and how many more there are.

    Args:
        bucket: of a stage.
        targets: names in the model, by value.
    """
    first, *more = bucket.reshardings
    label = resharding_label(first, targets)
    return f"{label} and {len(more)} more" if more else label


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank does in a step.

    Attributes:
        name: of the operator, or of what a step of a resharding runs.
        subject: the node, or the value that is resharded and what for; of a bucket its first.
        axis: the mesh axis whose ranks take part; None of compute.
        phase: part of the step.
        category: under what the plan's costs count it.
        start: seconds since the step began.
        seconds: how long it takes.
        nbytes: size of the larger of a rank's tensor before and after, all those of a bucket
            together; 0 of compute.
        overlapped: whether it overlaps with compute.
        inside: the operator that a collective is a part of; empty of a resharding's.
    """

    name: str
    subject: str
    axis: str | None
    phase: Phase
    category: Category
    start: float
    seconds: float
    nbytes: int = 0
    overlapped: bool = False
    inside: str = ""

    @property
    def lane(self) -> str:
        """Where it is drawn: compute, or the axis that it runs on."""
        return COMPUTE if self.axis is None else f"axis {self.axis}"


@dataclass(frozen=True)
class Simulation:
    """One step of a plan on one rank; all ranks do the same.

    Attributes:
        plan: digest of the plan.
        lanes: names of all lanes: compute, then one per axis.
        events: in the order in which they start.
        seconds: of the whole step.
        moments: seconds since the step began at which each moment of `memory` begins, shape [M].
        memory: bytes that are alive at each moment.
    """

    plan: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    seconds: float
    moments: NDArray[np.float64]
    memory: Timeline

    def by_category(self) -> Mapping[Category, float]:
        """Seconds of all events by what the plan's costs call them, overlapped ones included."""
        found: dict[Category, float] = {}
        for event in self.events:
            found[event.category] = found.get(event.category, 0.0) + event.seconds
        return found

    @property
    def overlapped(self) -> float:
        """Seconds of what overlaps with compute."""
        return sum(event.seconds for event in self.events if event.overlapped)
