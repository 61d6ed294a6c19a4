"""Seconds of every range of a program as a stage that must fit into memory."""

from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.plan.document import StageTimes
from autoshard.planner.pipeline.partition import RangeTable
from autoshard.planner.pipeline.range_costs import RangeCosts, Segments

_MEMORY_MARGIN = 1.05
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

    def range_table(
        self, micro_batches: int, *, splits_backward: bool, per_rank: int = 1
    ) -> RangeTable:
        """The table for the dynamic program over partitions.

        Args:
            micro_batches: number of micro-batches per step.
            splits_backward: True if gradients of parameters may be computed later.
            per_rank: number of stages of a rank, which is busy with all of them.
        """
        fits = np.where(np.isfinite(self.nbytes), 0.0, np.inf)
        work = self.forward + self.backward_input + self.backward_weight
        there = self.send[None, :]
        if splits_backward:
            through = self.forward + there
            busy = per_rank * (micro_batches * work + self.end)
            last = np.zeros_like(work)
        else:
            back = self.send_gradient[None, :]
            through = work + there + back
            busy = per_rank * micro_batches * work
            last = self.end
        return RangeTable(self.devices, through + fits, busy + fits, last)


def stage_table(
    costs: RangeCosts,
    *,
    budget: float,
    in_flight: int,
    send: FloatArray,
    send_gradient: FloatArray,
) -> StageTable:
    """Seconds of every range, with as little recomputation as its memory needs.

    Of the two plans of the program the faster one that fits is taken. If neither fits, a part of
    the blocks is recomputed.

    Args:
        costs: of the ranges.
        budget: bytes per device.
        in_flight: number of micro-batches whose activations the stage holds.
        send: seconds to send what crosses each cut, shape [P].
        send_gradient: the same of its gradient.
    """
    options = [_option(part, budget, in_flight) for part in costs.variants]
    total = [np.where(np.isfinite(o[4]), o[0] + o[1] + o[2] + 1e-3 * o[3], np.inf) for o in options]
    best = np.argmin(np.stack(total), axis=0)
    picked = [
        np.take_along_axis(np.stack(x), best[None], axis=0)[0] for x in zip(*options, strict=True)
    ]
    forward, backward_input, backward_weight, end, nbytes = picked
    return StageTable(
        costs.mesh.num_devices,
        forward,
        backward_input,
        backward_weight,
        end,
        nbytes,
        send,
        send_gradient,
    )


def _option(
    part: Segments, budget: float, in_flight: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    saved = _MEMORY_MARGIN * in_flight * _ranges(part.saved)
    kept = np.minimum(_MEMORY_MARGIN * in_flight * _ranges(part.kept), saved)
    fixed = _MEMORY_MARGIN * (_ranges(part.state) + _largest(part.working))
    is_larger = fixed + saved > budget
    # A block that is recomputed is in memory as a whole for one micro-batch.
    fixed = fixed + np.where(is_larger, _MEMORY_MARGIN * _largest(part.block), 0.0)
    excess = np.where(is_larger, fixed + saved - budget, 0.0)
    blocks = _ranges(part.blocks)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(is_larger, np.ceil(excess / (saved - kept) * blocks) / blocks, 0.0)
    fits = np.isfinite(share) & (share <= 1.0)
    share = np.where(fits, share, 0.0)
    nbytes = np.where(fits, fixed + saved - share * (saved - kept), np.inf)
    nbytes[np.tri(len(nbytes), dtype=bool)] = np.inf
    return (
        _ranges(part.forward),
        _ranges(part.backward_input) + share * _ranges(part.recomputed),
        _ranges(part.backward_weight),
        _ranges(part.end),
        nbytes,
    )


def _ranges(segments: FloatArray) -> FloatArray:
    """Sums over ranges [i, j) of segments, shape [P, P]; 0 where j <= i."""
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
