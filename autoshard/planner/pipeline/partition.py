"""Partition of a program into pipeline stages on parts of a mesh: dynamic programming and search.

A partition divides the ranges between consecutive cut points 0..P-1 into stages, and the devices
into consecutive sub-meshes, one per stage. Its price is the step time of its schedule, which only a
simulation tells. Every schedule takes at least

    last(0) + max over stages s of: through(0) + ... + through(s - 1) + busy(s),

where a stage is busy with all micro-batches, and a micro-batch passes through all earlier stages
before the first and after the last of them. Dynamic programming over
suffixes minimises this bound exactly; a depth-first search that is guided by it enumerates
partitions until the bound of all others exceeds the best simulated time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.base.arrays import FloatArray

MAX_SIMULATIONS = 2_000
"""Maximum number of partitions that are simulated."""


@dataclass(frozen=True, slots=True)
class RangeTable:
    """Seconds of every range of a program as a stage on one sub-mesh.

    Ranges [i, j) of cut points are entries [i, j] of matrices of shape [P, P].

    Attributes:
        devices: number of devices of the sub-mesh.
        through: seconds that a micro-batch passes through the stage on the way to and from the
            next ones; inf where the range cannot be a stage.
        busy: seconds of all micro-batches.
        last: seconds after them that every step takes if the range is the first stage.
    """

    devices: int
    through: FloatArray
    busy: FloatArray
    last: FloatArray


@dataclass(frozen=True, slots=True)
class PlacedRange:
    """A stage of a partition.

    Attributes:
        start: index of its first cut point.
        stop: index of the first cut point of the next stage.
        table: index of the sub-mesh among the tables.
        offset: number of its first device.
    """

    start: int
    stop: int
    table: int
    offset: int


Partition = tuple[PlacedRange, ...]


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """The best partition found.

    Attributes:
        partition: its stages in order.
        seconds: its simulated step time.
        bound: proven lower bound of the step time of every partition.
        num_simulated: number of partitions that were simulated.
    """

    partition: Partition
    seconds: float
    bound: float
    num_simulated: int


class PartitionProblem:
    """Partitions of a program into a number of stages that use all devices.

    Args:
        tables: for each number of remaining stages (index 0: the last stage of the pipeline), the
            table of each kind of sub-mesh. Tables differ where stages hold different numbers of
            micro-batches in memory.
        num_devices: number of devices.
        fits: returns True if a sub-mesh with a number of devices may begin at a device.
    """

    def __init__(
        self,
        tables: Sequence[Sequence[RangeTable]],
        num_devices: int,
        fits: Callable[[int, int], bool] = lambda _offset, _devices: True,
    ) -> None:
        self._tables = tables
        self._num_devices = num_devices
        self._fits = fits
        self._last_point = tables[0][0].through.shape[0] - 1
        self._bounds: list[dict[int, FloatArray]] = []
        self._fill()

    @property
    def num_stages(self) -> int:
        """Number of stages of every partition."""
        return len(self._tables)

    @property
    def bound(self) -> float:
        """Proven lower bound of the step time of every partition; inf if there is none."""
        first = self._children(_Node(0.0, 0, self._num_devices, 0.0, 0.0, ()))
        return min((child.bound for child in first), default=float("inf"))

    def best(
        self,
        simulate: Callable[[Partition], float],
        *,
        below: float = float("inf"),
        max_simulations: int = MAX_SIMULATIONS,
        is_over: Callable[[], bool] = lambda: False,
    ) -> PartitionResult | None:
        """The partition with the least simulated step time.

        Args:
            simulate: returns the step time of a partition, at least its lower bound.
            below: only partitions faster than this are of interest.
            max_simulations: maximum number of simulations; partitions that were left out then
                lower the bound.
            is_over: returns True if the search must end, with the same effect.

        Returns:
            None if there is no partition faster than `below`.
        """
        best: Partition | None = None
        found, number = below, 0
        stack = [_Node(0.0, 0, self._num_devices, 0.0, 0.0, ())]
        while stack and number < max_simulations and not is_over():
            node = stack.pop()
            if node.bound >= found:
                continue
            if len(node.done) < self.num_stages:
                children = (child for child in self._children(node) if child.bound < found)
                # The child with the least bound is visited first.
                stack.extend(sorted(children, key=lambda child: -child.bound))
                continue
            number += 1
            seconds = simulate(node.done)
            if seconds < found:
                best, found = node.done, seconds
        if best is None:
            return None
        # What was cut off has a bound of at least `found`; what is still on the stack was not
        # looked at. It is there only if the search ended early.
        bound = min((node.bound for node in stack), default=found)
        return PartitionResult(best, found, min(found, max(bound, self.bound)), number)

    def _fill(self) -> None:
        """Least bound of each suffix: [number of stages][devices] -> by first cut point."""
        for remaining in range(1, self.num_stages + 1):
            row: dict[int, FloatArray] = {}
            for devices in self._reachable(remaining):
                best = np.full(self._last_point + 1, np.inf)
                for table, after in self._options(remaining, devices):
                    # Alpa (Zheng et al., OSDI 2022) minimises a sum plus a multiple of a maximum,
                    # and has to try all values of the maximum. This bound is a maximum of sums,
                    # which needs none: its least value for a suffix is made of that of the next
                    # one. In all S x D x K x P^2 additions, for S stages, D numbers of devices and
                    # K kinds of sub-meshes.
                    bound = np.maximum(table.busy, table.through + after[None, :])
                    best = np.minimum(best, bound.min(axis=1))
                row[devices] = best
            self._bounds.append(row)

    def _reachable(self, remaining: int) -> list[int]:
        """Numbers of devices that the last stages can have."""
        before = [0] if remaining == 1 else list(self._bounds[remaining - 2])
        sizes = {table.devices for table in self._tables[remaining - 1]}
        sums = {devices + size for devices in before for size in sizes}
        return sorted(devices for devices in sums if devices <= self._num_devices)

    def _options(self, remaining: int, devices: int) -> Iterator[tuple[RangeTable, FloatArray]]:
        """Tables of the next stage, each with the least bound of the stages after it."""
        for table in self._tables[remaining - 1]:
            after = self._after(remaining - 1, devices - table.devices)
            if after is not None and self._fits(self._num_devices - devices, table.devices):
                yield table, after

    def _after(self, stages: int, devices: int) -> FloatArray | None:
        """Least bound of the last stages, by the cut point where they begin; None for none."""
        if stages > 0:
            return self._bounds[stages - 1].get(devices)
        if devices != 0:
            return None
        end = np.full(self._last_point + 1, np.inf)
        end[self._last_point] = 0.0
        return end

    def _children(self, node: "_Node") -> Iterator["_Node"]:
        remaining = self.num_stages - len(node.done)
        tables = self._tables[remaining - 1]
        for table, after in self._options(remaining, node.devices):
            busy = np.maximum(node.before + table.busy[node.point], node.largest)
            passed = node.before + table.through[node.point]
            if not node.done:
                busy, passed = busy + table.last[node.point], passed + table.last[node.point]
            bounds = np.maximum(busy, passed + after)
            number = next(i for i, one in enumerate(tables) if one is table)
            for stop in np.flatnonzero(np.isfinite(bounds)).tolist():
                stage = PlacedRange(node.point, stop, number, self._num_devices - node.devices)
                yield _Node(
                    bound=float(bounds[stop]),
                    point=stop,
                    devices=node.devices - table.devices,
                    before=float(passed[stop]),
                    largest=float(busy[stop]),
                    done=(*node.done, stage),
                )


class _Node(NamedTuple):
    """A node of the search: a partition of a prefix.

    Attributes:
        bound: lower bound of every partition that begins so.
        point: cut point where the next stage begins.
        devices: number of devices that are left.
        before: seconds of a micro-batch through all stages so far.
        largest: largest lower bound of these stages.
        done: these stages.
    """

    bound: float
    point: int
    devices: int
    before: float
    largest: float
    done: Partition


def all_partitions(
    num_points: int,
    num_stages: int,
    sizes: Sequence[int],
    num_devices: int,
    fits: Callable[[int, int], bool] = lambda _offset, _devices: True,
) -> Iterator[Partition]:
    """Every partition, for comparison with small problems.

    Args:
        num_points: P; stages divide the ranges between cut points 0..P-1.
        num_stages: number of stages.
        sizes: number of devices of each kind of sub-mesh.
        num_devices: number of devices.
        fits: as for `PartitionProblem`.
    """

    def extend(done: Partition, point: int, offset: int) -> Iterator[Partition]:
        if len(done) == num_stages:
            if point == num_points - 1 and offset == num_devices:
                yield done
            return
        for stop in range(point + 1, num_points):
            for number, devices in enumerate(sizes):
                if offset + devices <= num_devices and fits(offset, devices):
                    stage = PlacedRange(point, stop, number, offset)
                    yield from extend((*done, stage), stop, offset + devices)

    yield from extend((), 0, 0)
