"""Seconds of every range of a program as a stage that must fit into memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.plan.document import StageTimes
from autoshard.planner.pipeline.partition import RangeTable
from autoshard.planner.pipeline.range_costs import Segments

MEMORY_MARGIN = 1.05
"""Factor on the estimated bytes of a range: a plan has temporary tensors that are not counted."""


@dataclass(frozen=True)
class StageTable:
    """Seconds and bytes of every range [i, j) of cut points as a stage, shape [P, P] each.

    Attributes:
        devices: number of devices of the stage.
        forward: seconds of forward of a micro-batch.
        backward_input: seconds of the gradients of activations, with recomputation.
        backward_weight: seconds of the gradients of parameters.
        end: seconds per step.
        nbytes: estimated peak memory; inf for ranges that do not fit into the budget.
        send: seconds to send what crosses a cut to the next stage, by the cut, shape [P].
        send_gradient: seconds to send its gradient back, shape [P].
    """

    devices: int
    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    end: FloatArray
    nbytes: FloatArray
    send: FloatArray
    send_gradient: FloatArray

    def times(self, start: int, stop: int) -> StageTimes:
        """Seconds of one range."""
        return StageTimes(
            forward=float(self.forward[start, stop]),
            backward_input=float(self.backward_input[start, stop]),
            backward_weight=float(self.backward_weight[start, stop]),
            end=float(self.end[start, stop]),
            send=float(self.send[stop]),
            send_gradient=float(self.send_gradient[start]),
        )

    def range_table(self, micro_batches: int, *, per_rank: int = 1) -> RangeTable:
        """The table for the dynamic program over partitions.

        Args:
            micro_batches: number of micro-batches per step.
            per_rank: number of stages of a rank, which is busy with all of them.
        """
        fits = np.where(np.isfinite(self.nbytes), 0.0, np.inf)
        work = self.forward + self.backward_input + self.backward_weight
        through = work + self.send[None, :] + self.send_gradient[None, :]
        busy = per_rank * micro_batches * work
        return RangeTable(self.devices, through + fits, busy + fits, self.end)


class RangeSums:
    """Sums of the costs of segments over every range, shape [P, P] each.

    Args:
        part: costs of the segments between cut points.
    """

    def __init__(self, part: Segments) -> None:
        self.forward = _ranges(part.forward)
        self.backward_input = _ranges(part.backward_input)
        self.backward_weight = _ranges(part.backward_weight)
        self.end = _ranges(part.end)
        self._saved = MEMORY_MARGIN * _ranges(part.saved)
        self._kept = np.minimum(MEMORY_MARGIN * _ranges(part.kept), self._saved)
        self._fixed = MEMORY_MARGIN * (_ranges(part.state) + _largest(part.working))
        self._block = MEMORY_MARGIN * _largest(part.block)
        self._blocks = _ranges(part.blocks)
        self._recomputed = _ranges(part.recomputed)
        self._is_empty = np.tri(len(self.forward), dtype=bool)

    def fitted(self, budget: float, in_flight: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of recomputation of a micro-batch, and bytes; inf for ranges that do not fit.

        As many blocks are recomputed as the budget needs.

        Args:
            budget: bytes per device.
            in_flight: number of micro-batches whose activations a stage holds.
        """
        is_larger = self._fixed + in_flight * self._saved > budget
        # A block that is recomputed is in memory as a whole for one micro-batch.
        fixed = self._fixed + np.where(is_larger, self._block, 0.0)
        saving = in_flight * (self._saved - self._kept)
        excess = np.where(is_larger, fixed + in_flight * self._saved - budget, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Whole blocks are recomputed; nan or inf where there are none, or recomputing saves
            # nothing.
            share = np.ceil(excess / saving * self._blocks) / self._blocks
        share = np.where(is_larger, share, 0.0)
        fits = np.isfinite(share) & (share <= 1.0) & ~self._is_empty
        share = np.where(fits, share, 0.0)
        nbytes = np.where(fits, fixed + in_flight * self._saved - share * saving, np.inf)
        return share * self._recomputed, nbytes


def stage_table(
    sums: Sequence[RangeSums],
    devices: int,
    *,
    budget: float,
    in_flight: int,
    send: FloatArray,
    send_gradient: FloatArray,
) -> StageTable:
    """Seconds of every range, with as little recomputation as its memory needs.

    Of the plans of the program the fastest one that fits is taken.

    Args:
        sums: costs of all ranges in each plan.
        devices: number of devices of a stage.
        budget: bytes per device.
        in_flight: number of micro-batches whose activations the stage holds.
        send: seconds to send what crosses each cut, shape [P].
        send_gradient: the same of its gradient.
    """
    options: list[tuple[FloatArray, ...]] = []
    for plan in sums:
        recomputed, nbytes = plan.fitted(budget, in_flight)
        backward = plan.backward_input + recomputed
        options.append((plan.forward, backward, plan.backward_weight, plan.end, nbytes))
    picked = options[0]
    for other in options[1:]:
        better = _seconds(other) < _seconds(picked)
        pairs = zip(other, picked, strict=True)
        picked = tuple(np.where(better, new, old) for new, old in pairs)
    forward, backward_input, backward_weight, end, nbytes = picked
    return StageTable(
        devices, forward, backward_input, backward_weight, end, nbytes, send, send_gradient
    )


def _seconds(option: Sequence[FloatArray]) -> FloatArray:
    """Seconds of a micro-batch by which options are compared; inf where a range does not fit."""
    forward, backward_input, backward_weight, _, nbytes = option
    total = forward + backward_input + backward_weight
    found: FloatArray = np.where(np.isfinite(nbytes), total, np.inf)
    return found


def _ranges(segments: FloatArray) -> FloatArray:
    """Sums over ranges [i, j) of segments, shape [P, P]; 0 where j <= i."""
    # All P^2 ranges as differences of prefix sums; rounding must not make an empty one negative.
    sums = np.concatenate([[0.0], np.cumsum(segments)])
    differences: FloatArray = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return differences


def _largest(segments: FloatArray) -> FloatArray:
    """Largest entry over ranges [i, j) of segments, shape [P, P]."""
    number = len(segments)
    found = np.zeros((number + 1, number + 1))
    for i in range(number):
        found[i, i + 1 :] = np.maximum.accumulate(segments[i:])
    return found
