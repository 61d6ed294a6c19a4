"""Costs of the reshardings between the layouts of a producer and those of a consumer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.costs import (
    GATHERED_ONCE,
    ForwardBackward,
    Frequency,
    StepCommunication,
)
from autoshard.graph import Tensor
from autoshard.layouts import ChainCosts, Layout, ReshardingTable


@dataclass(frozen=True, eq=False)
class EdgeCosts:
    """Costs of the reshardings of one use, between R source and C target layouts.

    Attributes:
        table: reshardings of the value.
        tensor: the value.
        axis_sizes: size of each non-trivial axis.
        sources: index of each source layout in the table, shape [R].
        rows: for each strategy of the source, the index of its layout in `sources`.
        targets: index of each target layout in the table, shape [C]; a layout occurs several
            times if the compute that overlaps with the resharding differs.
        cols: for each strategy of the target, the index of its layout in `targets`.
        compute: seconds of compute in a micro-batch that can overlap, shape [C] each; None without
            overlap.
        micro_batches: number of micro-batches of a training step.
        of_parameter: True if the source is a parameter as it is stored, so that some reshardings
            can run once per training step.
        accumulation_time: seconds to sum a byte of gradients over micro-batches.
        accumulation_factor: bytes of the sum relative to those of a gradient; 0 if there is none.
        contention: fraction of overlapped seconds by which compute takes longer.
        shard_accumulation_factor: the same of the sum of gradients in the source layout, which is
            kept where gradients are reduced in every micro-batch.
        keeps_shards: True for an activation that is not kept gathered for backward, which
            gathers it again.
    """

    table: ReshardingTable
    tensor: Tensor
    axis_sizes: tuple[int, ...]
    sources: IntArray
    rows: IntArray
    targets: IntArray
    cols: IntArray
    compute: ForwardBackward[FloatArray] | None
    micro_batches: int = 1
    contention: float = 0.0
    of_parameter: bool = False
    accumulation_time: float = 0.0
    accumulation_factor: float = 0.0
    shard_accumulation_factor: float = 0.0
    keeps_shards: bool = False
    _seconds: dict[Frequency, FloatArray] = field(default_factory=dict)

    @cached_property
    def fastest(self) -> FloatArray:
        """Exposed seconds per training step at the fastest frequency, shape [R, C]."""
        if not self.can_run_once.any():
            return self.seconds
        least = self.seconds
        for frequency in (Frequency.GATHER_STEP, Frequency.STEP):
            least = np.minimum(least, self.seconds_of(frequency))
        return least

    def frequencies(self, source: int, target: int) -> tuple[Frequency, ...]:
        """The possible frequencies for a strategy of the source and one of the target.

        The first one needs no memory between micro-batches.
        """
        pair = self.rows[source], self.cols[target]
        waits = self.micro_batches > 1 and self._waiting[pair] > 0
        least = Frequency.REDUCE_STEP if waits else Frequency.MICRO_BATCH
        more = (Frequency.GATHER_STEP, Frequency.STEP) if self.can_run_once[pair] else ()
        return (least, *more)

    def fastest_frequency(self, source: int, target: int) -> Frequency:
        """The fastest frequency for a strategy of the source and one of the target."""
        pair, found = (self.rows[source], self.cols[target]), self.frequencies(source, target)
        return min(found, key=lambda frequency: self.seconds_of(frequency)[pair])

    @property
    def seconds(self) -> FloatArray:
        """Exposed seconds per training step of each resharding, shape [R, C].

        It runs in every micro-batch, as far as that saves memory; inf if it is impossible.
        """
        return self.seconds_of(Frequency.REDUCE_STEP)

    def seconds_of(self, frequency: Frequency) -> FloatArray:
        """Exposed seconds per training step of each resharding, inf if impossible, shape [R, C]."""
        if frequency in self._seconds:
            return self._seconds[frequency]
        if self.micro_batches == 1 and self.compute is None and not self.keeps_shards:
            # The parts of each pass do not matter.
            seconds = self._total
        else:
            communication = self._communication(frequency)
            seconds = communication.seconds()
            if self.compute is not None:
                seconds = seconds - communication.overlapped(self.compute)
            if self.keeps_shards:
                seconds = seconds + np.where(self.gathers_again, communication.again(), 0.0)
        if frequency is Frequency.STEP and self.accumulation_time:
            growth = self.target_bytes[None, :] - self.source_bytes[:, None]
            seconds = seconds + self.accumulation_time * growth
        if frequency in GATHERED_ONCE:
            seconds = np.where(self.can_run_once, seconds, np.inf)
        self._seconds[frequency] = seconds
        return seconds

    @property
    def regather_seconds(self) -> FloatArray:
        """Additional exposed seconds if the resharding is re-gathered in backward, shape [R, C]."""
        communication = self._communication(Frequency.REDUCE_STEP)
        if self.compute is None:
            return np.where(self.gathers_again, 0.0, communication.again())
        once, twice = (
            communication.overlapped(self.compute, again=again) for again in (False, True)
        )
        return communication.again() - (twice - once)

    @cached_property
    def can_run_once(self) -> BoolArray:
        """For each resharding, True if it may run once for all micro-batches, shape [R, C].

        Only reshardings that gather a parameter, in a bucket, are offered.
        """
        if self.micro_batches == 1 or not self.of_parameter:
            return np.broadcast_to(np.False_, (len(self.sources), len(self.targets)))
        return self._chains.is_bucketable & ~self.is_noop

    @cached_property
    def is_noop(self) -> BoolArray:
        """For each resharding, True if its forward part does nothing, shape [R, C]."""
        return self._chains.is_noop

    @cached_property
    def gathers_again(self) -> BoolArray:
        """For each resharding, True if it is an all-gather that backward repeats, shape [R, C].

        What it costs is part of `seconds`.
        """
        if not self.keeps_shards:
            return np.broadcast_to(np.False_, (len(self.sources), len(self.targets)))
        is_whole = np.array([not layout.is_partial for layout in self.source_layouts])
        return is_whole[:, None] & (self.source_bytes[:, None] < self.target_bytes)

    @cached_property
    def source_layouts(self) -> list[Layout]:
        """The R source layouts."""
        return [self.table.layouts[i] for i in self.sources.tolist()]

    @cached_property
    def target_layouts(self) -> list[Layout]:
        """The C target layouts."""
        return [self.table.layouts[i] for i in self.targets.tolist()]

    @cached_property
    def source_bytes(self) -> FloatArray:
        """Bytes per device in each source layout, shape [R]."""
        return local_bytes(self.tensor, self.source_layouts, self.axis_sizes)

    @cached_property
    def target_bytes(self) -> FloatArray:
        """Bytes per device in each target layout, shape [C]."""
        return local_bytes(self.tensor, self.target_layouts, self.axis_sizes)

    @cached_property
    def accumulation_growth(self) -> FloatArray:
        """Bytes that sums of full gradients take beyond sums of their shards, shape [R, C]."""
        full = self.accumulation_factor * self.target_bytes
        return full[None, :] - self.shard_accumulation_factor * self.source_bytes[:, None]

    def compute_of(self, strategy: int) -> ForwardBackward[float] | None:
        """Seconds of compute that can overlap with the resharding for a strategy of the target."""
        if self.compute is None:
            return None
        col = self.cols[strategy]
        return ForwardBackward(float(self.compute.forward[col]), float(self.compute.backward[col]))

    @property
    def _chains(self) -> ChainCosts:
        return self.table.costs(self.sources, self.targets)

    @cached_property
    def _total(self) -> FloatArray:
        """Seconds of forward and backward, shape [R, C]."""
        return self._chains.seconds

    @property
    def is_possible(self) -> BoolArray:
        """True for each resharding that constraints allow, shape [R, C]."""
        return np.isfinite(self._total)

    def _communication(self, frequency: Frequency) -> StepCommunication[FloatArray]:
        both, possible = self._total, self.is_possible
        forward = np.where(possible, self._chains.forward, 0.0)
        backward = np.subtract(both, forward, out=np.zeros_like(both), where=possible)
        run = ForwardBackward(forward, np.maximum(backward, 0.0))
        return StepCommunication(
            both, run, self._waiting, self.micro_batches, frequency, self.contention
        )

    @cached_property
    def _waiting(self) -> FloatArray:
        """Seconds of the reductions of gradients that may wait without memory, shape [R, C]."""
        if not self.of_parameter:
            return np.broadcast_to(0.0, (len(self.sources), len(self.targets)))
        return np.where(self._chains.is_bucketable, self._chains.waiting, 0.0)


def local_bytes(tensor: Tensor, layouts: Iterable[Layout], axis_sizes: Sequence[int]) -> FloatArray:
    """Bytes of a rank's shard of a tensor, in each of some layouts."""
    elements = [prod(layout.local_shape(tensor.shape, axis_sizes)) for layout in layouts]
    return np.array(elements, dtype=float) * tensor.dtype.itemsize
