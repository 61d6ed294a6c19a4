"""Measures collectives, alone and between other work."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import gcd
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autoshard.launching import synchronize
from autoshard.layouts import P, R, S
from autoshard.measure.calibration.measurements import (
    LARGE_SPREAD,
    CalibrationEffort,
    Timing,
    spread_of,
)
from autoshard.mesh.calibration import CollectiveSample
from autoshard.mesh.topology import INNER, MEASURABLE
from autoshard.runtime.program.local_node import exchange_edges
from autoshard.runtime.resharding import bind_step

_TYPES = {
    "all_gather": (S(0), R),
    "all_reduce": (P, R),
    "all_to_all": (S(0), S(1)),
    "reduce_scatter": (P, S(0)),
    f"all_gather{INNER}": (S(1), R),
    f"reduce_scatter{INNER}": (P, S(1)),
}
"""The SPMD types before and after each collective; a halo exchange does not change the type."""

_WIDTH = 64
"""Maximum number of elements in a row on one rank."""

_WORK_ELEMENTS = 1 << 18
"""Elements processed between two runs, so that caches are in a state as in a program; otherwise
short collectives would take half as long."""

_SKEW_WORK = 0.01
"""Seconds of work before each collective, typical of a layer between two collectives."""

_SKEW_RUNS = 8
"""Number of collectives in a run."""

_SKEW_SIDE = 256
"""Rows and columns of the matrices that ranks multiply."""


class Stopwatch:
    """Measures functions that all ranks start at the same time.

    Args:
        device: the device of this rank.
        effort: number and duration of the runs.
        busy: True to measure CPU time, if the machine has other load: the CPU time of all ranks,
            divided by the number of CPUs, without idle waiting.
    """

    def __init__(
        self, device: torch.device, effort: CalibrationEffort, *, busy: bool = False
    ) -> None:
        self.device = device
        self._effort = effort
        self._busy = busy and device.type == "cpu"
        self._other = torch.ones(_WORK_ELEMENTS, device=device)
        self._unit = 0.0

    def measure(self, run: Callable[[], object]) -> Timing:
        """The median of several runs, each the time of the slowest rank, in seconds.

        If the runs differ much, there are more.
        """
        self._seconds(run)
        slowest = self._slowest([self._seconds(run)])
        effort = self._effort
        count = min(int(effort.seconds / max(slowest[0], 1e-9)), effort.num_runs)
        if self._busy:
            return Timing((self._shared(run, count + 1),))
        for _ in range(effort.num_repeats):
            slowest += self._slowest([self._seconds(run) for _ in range(count)])
            if spread_of(slowest) <= LARGE_SPREAD:
                break
        return Timing((median(slowest),), spread_of(slowest))

    def _work(self) -> torch.Tensor:
        return self._other.neg()

    def _seconds(self, run: Callable[[], object]) -> float:
        self._work()
        dist.barrier()
        synchronize(self.device)
        start = perf_counter()
        run()
        synchronize(self.device)
        return perf_counter() - start

    def _slowest(self, seconds: list[float]) -> list[float]:
        """The maximum over ranks, for each run."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        slowest: list[float] = found.tolist()
        return slowest

    def _shared(self, run: Callable[[], object], count: int) -> float:
        """The mean CPU time of a run on all ranks, divided by the number of CPUs.

        A rank may still be sending when its call returns, so all runs are measured together.
        Ranks do different amounts of work before each run: in a program they arrive at different
        times too, and waking a waiting rank takes CPU time.
        """
        if not self._unit:
            count = self._effort.num_runs
            self._unit = self._together(lambda: None, count) / _units(count)
        total = self._together(run, count)
        return max(total - self._unit * _units(count), 1e-9) / count

    def _together(self, run: Callable[[], object], count: int) -> float:
        rank = dist.get_rank()
        dist.barrier()
        start = process_time()
        for number in range(count):
            for _ in range(_length(rank, number)):
                self._work()
            run()
        dist.barrier()
        found = torch.tensor(process_time() - start, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found) / (os.cpu_count() or 1)


def _length(rank: int, number: int) -> int:
    """Units of work of a rank before a run, 1 to 8, different between ranks."""
    return 1 + (5 * number + 3 * rank) % 8


def _units(count: int) -> float:
    """Total units of work before a number of runs, the mean over ranks."""
    num_ranks = dist.get_world_size()
    units = sum(_length(rank, i) for rank in range(num_ranks) for i in range(count))
    return units / num_ranks


def measure_collectives(
    group: ProcessGroup,
    level: int,
    sizes: Iterable[int],
    stopwatch: Stopwatch,
    take: Callable[[str, Callable[[], Timing]], Timing],
) -> Iterator[CollectiveSample]:
    """Measure each collective over the groups of one axis, all groups at the same time.

    Args:
        group: the process group of this rank on the axis.
        level: index of the link level that the axis crosses.
        sizes: bytes of a rank's input or output, whichever is larger; rounded up so that
            the ranks divide them.
        stopwatch: measures the functions.
        take: makes a measurement with a name.
    """
    num_ranks = group.size()
    for nbytes in sizes:
        measured = shared_size(nbytes, num_ranks)
        units = measured // (num_ranks * num_ranks * torch.float32.itemsize)
        # Rows are as wide as those of activations, so that slices are not single elements.
        width = gcd(units, _WIDTH)
        shape = num_ranks * units // width, num_ranks * width
        for action in MEASURABLE:
            timing = take(
                f"{action} of {nbytes} bytes", partial(_timing, action, group, shape, stopwatch)
            )
            yield CollectiveSample(action, level, num_ranks, measured, timing.seconds[0])


def _timing(action: str, group: ProcessGroup, shape: Sequence[int], stopwatch: Stopwatch) -> Timing:
    sharded = _sharded_dim(action)
    local = [n // group.size() if dim == sharded else n for dim, n in enumerate(shape)]
    tensor = torch.ones(local, device=stopwatch.device)
    with torch.no_grad():
        return stopwatch.measure(_run(action, tensor, group, shape))


def _run(
    action: str, tensor: torch.Tensor, group: ProcessGroup, shape: Sequence[int]
) -> Callable[[], object]:
    """A function that runs a collective; a halo exchange sends half to each neighbour."""
    if action in _TYPES:
        return partial(bind_step(*_TYPES[action], group, shape), tensor)
    if group.size() == 2:  # noqa: PLR2004  each rank has one neighbour
        return partial(exchange_edges, tensor, tensor, group)
    to_before, to_after = torch.tensor_split(tensor, 2)
    return partial(exchange_edges, to_before, to_after, group)


def _sharded_dim(action: str) -> int | None:
    """The dim that is sharded before the collective and whole afterwards."""
    if not action.startswith("all_gather"):
        return None
    return 1 if action.endswith(INNER) else 0


def shared_size(nbytes: int, num_ranks: int) -> int:
    """Bytes of the smallest matrix of at least `nbytes` whose rows and columns the ranks divide."""
    unit = num_ranks * num_ranks * torch.float32.itemsize
    return -(-nbytes // unit) * unit


def measure_skew(stopwatch: Stopwatch) -> Timing:
    """Seconds that ranks wait at a collective for the last rank, without the collective itself.

    After other work, ranks arrive at a collective at different times, in particular if they share
    CPUs, and each waits for the last. Measurements with a common start do not include that.

    Args:
        stopwatch: measures the functions.
    """
    matrix = torch.ones(_SKEW_SIDE, _SKEW_SIDE, device=stopwatch.device)
    tensor = torch.ones(_SKEW_SIDE, device=stopwatch.device)
    (seconds,) = stopwatch.measure(lambda: matrix @ matrix).seconds
    count = max(round(_SKEW_WORK / max(seconds, 1e-9)), 1)

    def work() -> None:
        for _ in range(count):
            _ = matrix @ matrix

    def reduce() -> None:
        dist.all_reduce(tensor)

    def both() -> None:
        work()
        reduce()

    together, alone, single = map(stopwatch.measure, (_repeated(both), _repeated(work), reduce))
    seconds = (together.seconds[0] - alone.seconds[0]) / _SKEW_RUNS - single.seconds[0]
    return Timing((seconds,), max(together.spread, alone.spread))


def _repeated(run: Callable[[], None]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(_SKEW_RUNS):
            run()

    return several
