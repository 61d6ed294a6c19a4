"""Predictions for a plan: costs, memory, collectives, and the certificate of its step time."""

from math import ceil, floor, log10
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autoshard.base.integers import MAX_BYTES
from autoshard.base.outcome import SolveStatus

Seconds = Annotated[float, Field(ge=0, description="seconds")]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES, description="bytes per device")]

Direction = Literal["forward", "backward"]
"""The pass in which something runs; recomputation counts as backward."""

ROUNDING = 1e-9
"""Relative gap up to which an objective and a bound count as equal: sums of floating-point numbers
differ by as much."""


class Document(BaseModel):
    """Base class of the plan's parts: immutable, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Certificate(Document):
    """Objective and proven lower bound of a plan, and their relative gap."""

    status: SolveStatus = Field(
        description="optimal: the gap is at most the option `relative_gap`, among the plans that "
        "`statement` names"
    )
    objective: float | None = Field(description="cost of the plan, seconds; null without a plan")
    bound: float | None = Field(
        description="proven lower bound of the cost of any plan that obeys the options, seconds"
    )
    gap: float | None = Field(ge=0, description="(objective - bound) / objective")
    statement: str = Field(
        default="",
        description="what is proven, in words: among which plans, within which gap, under which "
        "cost model",
    )

    @property
    def is_exact(self) -> bool:
        """True if the plan is proven optimal, not only within a gap."""
        return self.gap is not None and self.gap <= ROUNDING


class CollectiveCount(Document):
    """Collectives of one kind, axis and direction in a step of the program."""

    kind: str
    axis: str
    direction: Direction
    count: int = Field(ge=1)
    nbytes: int = Field(ge=0, description="sum of PlannedStep.nbytes")


class Costs(Document):
    """Predicted seconds of one step, on every device."""

    total: Seconds
    compute: Seconds = Field(description="operators, and the memory traffic of inputs")
    communication: Seconds = Field(
        description=(
            "collectives and the local copies that they need; an upper estimate, since each "
            "resharding is charged a latency even if several share a collective"
        )
    )
    optimizer: Seconds = Field(
        description="the local optimizer update, and sums of gradients over micro-batches"
    )
    recompute: Seconds = Field(
        default=0.0, description="operators and reshardings that backward runs again"
    )
    overlapped: Seconds = Field(
        default=0.0,
        description=(
            "seconds of communication and recompute that overlap with compute; not in the total"
        ),
    )
    idle: Seconds = Field(
        default=0.0,
        description=(
            "seconds in which the pipeline rank with the most work waits for others; the other "
            "costs of a pipeline are those of this rank"
        ),
    )


def error_percent(error: float) -> str:
    """A relative error in whole percent, rounded up."""
    return f"{ceil(100 * error - ROUNDING)} %"


class Performance(Document):
    """Throughput of a step at its predicted time, and the error of such predictions."""

    samples_per_second: float | None = Field(description="null if no input has a batch")
    tokens_per_second: float | None = Field(description="null if the model does not take tokens")
    mfu: float | None = Field(
        description="model FLOPs utilisation: floating-point operations of the contractions of "
        "forward, and in training of their backward, without recomputation, over devices x peak "
        "rate of their element types x seconds of a step; null without contractions"
    )
    error: float | None = Field(
        description="relative error of the step time: 80 % of comparable published runs took at "
        "most this share more or less than predicted; null if there are none"
    )
    comparison: str = Field(
        description="the runs that were compared, in words; or that none were on this hardware"
    )

    @property
    def rates(self) -> tuple[str, ...]:
        """Throughput and MFU in words, those that there are."""
        tokens, samples = self.tokens_per_second, self.samples_per_second
        return (
            *(() if tokens is None else (f"{tokens:,.0f} tokens/s",)),
            *(() if samples is None else (f"{samples:,.1f} samples/s",)),
            *(() if self.mfu is None else (f"MFU {self.mfu:.1%}",)),
        )

    @property
    def error_bar(self) -> str:
        """The error after a predicted time, such as ` +- 9 %`; empty without comparison."""
        return "" if self.error is None else f" +- {error_percent(self.error)}"


def step_time(seconds: float, performance: Performance | None) -> str:
    """A predicted step time with its error, such as `416 ms +- 9 %`."""
    return three_digits(seconds) + ("" if performance is None else performance.error_bar)


def three_digits(seconds: float) -> str:
    """Seconds in milliseconds with at least three significant digits."""
    milliseconds = 1e3 * seconds
    digits = max(2 - floor(log10(milliseconds)), 1) if milliseconds > 0 else 0
    return f"{milliseconds:,.{digits}f} ms"


class Memory(Document):
    """Predicted bytes per device at the peak."""

    peak: Bytes
    budget: int | None = Field(description="memory budget of the request")
    phase: Literal["forward", "turn", "recompute", "backward", "optimizer"] = Field(
        description="phase of the step in which the peak occurs"
    )
    at: str = Field(
        description="node that runs, or value that is resharded, at the peak; may be empty"
    )
    turn: int | None = Field(
        ge=0, description="bytes alive between forward and backward; null in inference"
    )
    per_micro_batch: int | None = Field(
        ge=0,
        description="activations that each micro-batch in flight keeps between its forward and its "
        "backward; null in inference",
    )
    optimizer_step: int | None = Field(
        ge=0, description="bytes alive at the optimizer's step; null in inference"
    )
    parameters: Bytes
    gradients: Bytes = Field(description="of parameters")
    optimizer: Bytes
    buffers: Bytes
    inputs: Bytes
    activations: Bytes = Field(
        description="tensors saved for backward, or alive until their last use in inference"
    )
    temporaries: Bytes = Field(
        description="resharded and recomputed tensors, gradients of activations, working memory"
    )
