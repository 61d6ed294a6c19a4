"""Results of sizing: what takes the memory of a device, and what fits."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from autoshard.plan.predictions import Bytes, Document, Seconds

Dimension = Literal["batch_size", "seq_length"]
"""A size of a model's batch."""

Verdict = Literal["fits", "does not fit", "unknown"]


class HeldMemory(Document):
    """The memory of one device, by part and by module.

    Modules are the layers of a model, such as `model.layers.3`; what is outside of all layers has
    the module of its own.
    """

    parts: Mapping[str, Bytes] = Field(description="at the peak, the largest first")
    phase: str = Field(description="phase of the step in which the peak occurs")
    at: str = Field(description="module that runs at the peak, or the operator's name")
    activations: Mapping[str, Bytes] = Field(
        description="what each module keeps between forward and backward, the most first"
    )
    unsharded: Mapping[str, Bytes] = Field(
        description="the most of unsharded parameters and gradients that each module has at a time"
    )
    kept_despite: Mapping[str, Bytes] = Field(
        description="what activation checkpointing does not release, the most first: what enters "
        "recomputed modules, and what modules that are not recomputed save; empty without it"
    )


class FitRow(Document):
    """One configuration, with its memory on the device that needs the most."""

    varied: Mapping[str, str] = Field(description="what differs between the rows")
    layout: str
    mesh: str
    verdict: Verdict
    peak: int | None = Field(
        description="predicted bytes per device at the peak; null if it is not known"
    )
    kinds: Mapping[str, Bytes] = Field(description="the peak by kind, as plans have it")
    held: HeldMemory | None = Field(description="null for a pipeline")
    num_recomputed: int = Field(
        default=0, description="modules that activation checkpointing recomputes"
    )
    step_time: Seconds | None = Field(description="predicted, if it fits")
    host_memory: int | None = Field(
        default=None, description="bytes per device that are offloaded to the host"
    )
    remark: str = Field(default="", description="what the figures hold for, or why there is none")


class Largest(Document):
    """The largest batch, or the longest sequence, that fits."""

    name: Dimension
    unit: int = Field(description="sizes are multiples of it")
    size: int | None = Field(description="the largest that fits; null if the unit does not fit")
    row: FitRow = Field(description="the configuration at this size; at the unit without one")
    beyond: FitRow | None = Field(
        description="the configuration one unit further, which does not fit; null if no model or "
        "graph has this size"
    )
    remark: str = Field(default="", description="why nothing further was tried")


class Fit(Document):
    """Configurations of a model on some devices, and their memory."""

    model: str
    num_parameters: int
    hardware: str
    precision: str
    mode: str
    budget: int = Field(description="bytes of a device that may be used")
    least: int = Field(
        description="bytes that the fullest device holds at least, in any layout of this batch"
    )
    least_statement: str = Field(description="what `least` is made of, in words")
    rows: tuple[FitRow, ...]

    @property
    def verdict(self) -> Verdict:
        """Fits if one of the rows does; what no layout can fit does not."""
        found = {row.verdict for row in self.rows}
        if "fits" in found:
            return "fits"
        return "does not fit" if self.least > self.budget else "unknown"


class DeviceCount(Document):
    """A number of devices, with the fastest of the layouts that were priced on it."""

    num_devices: int
    hardware: str
    reaches: bool = Field(description="true if its throughput is at least the one asked for")
    layout: str = ""
    micro_batches: int | None = None
    step_time: Seconds | None = None
    tokens_per_second: float | None = Field(default=None, description="null if nothing fits")
    peak: int | None = Field(default=None, description="predicted bytes per device")
    days: float | None = Field(default=None, description="of all tokens, if they are given")
    price: float | None = Field(
        default=None, description="of all tokens, or of 1e9 of them if they are not given"
    )
    remark: str = Field(default="", description="why nothing fits")


class Size(Document):
    """The fewest devices that reach a throughput, of those that were priced."""

    model: str
    batch_size: int = Field(description="samples of a step, in all micro-batches")
    seq_length: int
    target: float = Field(description="tokens per second")
    tokens: float | None
    least_by_memory: int = Field(description="fewer devices cannot hold the state of the model")
    least_by_arithmetic: int = Field(
        description="fewer devices are too slow even at their peak rate of arithmetic"
    )
    rows: tuple[DeviceCount, ...]
    fewest: int | None
    cheapest: int | None
