"""Seconds of what ranks do, together and each by itself."""

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

T = TypeVar("T")

_MOST = 20
"""How often a thing runs, beside once to warm up."""

_ENOUGH = 0.5
"""Seconds after which it need not run more often."""

_BETWEEN = 1 << 18
"""Elements that are worked on between two runs, so that each finds caches as a program leaves
them; a collective that follows another at once takes half as long where it is short."""


def sharing(per_node: int) -> float:
    """Seconds that pass while the ranks of a node each take one second of processor time.

    What one rank takes, it takes from the others where there are fewer processors than ranks.
    """
    return max(per_node / (os.cpu_count() or 1), 1 / torch.get_num_threads())


class Stopwatch:
    """Measures what all ranks start at the same time.

    Args:
        device: what a rank runs on.
        busy: whether to count processor time, since the machine has other work. What ranks
            take together is shared by the processors; waiting for nothing is not seen.
    """

    def __init__(self, device: torch.device, *, busy: bool = False) -> None:
        self.device = device
        self._busy = busy and device.type == "cpu"
        self._other = torch.ones(_BETWEEN, device=device)
        self._unit = 0.0

    def measure(self, run: Callable[[], object]) -> float:
        """The median of some runs; each takes as long as the slowest rank needs."""
        self._seconds(run)
        slowest = self._slowest([self._seconds(run)])
        count = min(int(_ENOUGH / max(slowest[0], 1e-9)), _MOST)
        if self._busy:
            return self._shared(run, count + 1)
        slowest += self._slowest([self._seconds(run) for _ in range(count)])
        return median(slowest)

    def _work(self) -> torch.Tensor:
        return self._other.neg()

    def _seconds(self, run: Callable[[], object]) -> float:
        self._work()
        dist.barrier()
        self._wait()
        start = perf_counter()
        run()
        self._wait()
        return perf_counter() - start

    def _slowest(self, seconds: list[float]) -> list[float]:
        """The longest time of all ranks, for each run."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        slowest: list[float] = found.tolist()
        return slowest

    def _shared(self, run: Callable[[], object], count: int) -> float:
        """Processor time of a run, on all ranks, over the processors; the mean of some runs.

        A rank goes on sending when its own part is done, so only many runs together say what
        one takes. Ranks work differently long before each, since in a program they do not
        arrive together either, and whoever has to wait pays for being woken.
        """
        if not self._unit:
            self._unit = self._together(lambda: None, _MOST) / _units(_MOST)
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

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _length(rank: int, number: int) -> int:
    """Units of work of a rank before a run: 1 to 8, others for other ranks."""
    return 1 + (5 * number + 3 * rank) % 8


def _units(count: int) -> float:
    """Units before so many runs, the mean of all ranks."""
    num_ranks = dist.get_world_size()
    units = sum(_length(rank, i) for rank in range(num_ranks) for i in range(count))
    return units / num_ranks


class KernelClock:
    """Measures what each rank does by itself while the others do the same.

    On processors it counts processor time, times what the ranks share: of a kernel that is
    shorter than the system's time slices, wall time would not tell that others wait for it.

    Args:
        device: what a rank runs on.
        per_node: ranks that share the processors.
    """

    def __init__(self, device: torch.device, per_node: int) -> None:
        self._device = device
        self._on_processors = device.type == "cpu"
        self._sharing = sharing(per_node) if self._on_processors else 1.0

    def seconds(self, run: Callable[[], T]) -> tuple[float, T]:
        """How long something takes on this rank, and what it makes."""
        now = process_time if self._on_processors else perf_counter
        self._wait()
        start = now()
        result = run()
        self._wait()
        return (now() - start) * self._sharing, result

    def measure(self, run: Callable[[], object], *, count: int = _MOST) -> float:
        """The median of some runs, the mean of all ranks."""
        run()
        found = [median(self.seconds(run)[0] for _ in range(count))]
        return float(self.over_ranks(np.array(found))[0])

    def over_ranks(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean over ranks of figures that each has."""
        found = torch.from_numpy(seconds).to(self._device)
        dist.all_reduce(found)
        mean: NDArray[np.float64] = (found / dist.get_world_size()).cpu().numpy()
        return mean

    def _wait(self) -> None:
        if not self._on_processors:
            torch.accelerator.synchronize(self._device)
