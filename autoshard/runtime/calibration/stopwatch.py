"""Seconds of a thing that ranks do together."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

_MOST = 20
"""How often a thing runs, beside once to warm up."""

_ENOUGH = 0.5
"""Seconds after which it need not run more often."""


class Stopwatch:
    """Measures what all ranks start at the same time.

    Args:
        device: what a rank runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, run: Callable[[], object]) -> float:
        """The median of some runs; each takes as long as the slowest rank needs."""
        self._seconds(run)
        slowest = self._slowest([self._seconds(run)])
        count = min(int(_ENOUGH / max(slowest[0], 1e-9)), _MOST)
        slowest += self._slowest([self._seconds(run) for _ in range(count)])
        return median(slowest)

    def _seconds(self, run: Callable[[], object]) -> float:
        dist.barrier()
        self._wait()
        start = perf_counter()
        run()
        self._wait()
        return perf_counter() - start

    def _slowest(self, seconds: list[float]) -> list[float]:
        """The longest time of all ranks, for each run."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        slowest: list[float] = found.tolist()
        return slowest

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
