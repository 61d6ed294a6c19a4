"""What collectives take longer between other work than by themselves.

Ranks that work before a collective do not arrive at it together, least where they share
processors, and each waits for the last. What is measured from a common start does not see that.
"""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from autoshard.runtime.calibration.stopwatch import Stopwatch

_WORK = 0.01
"""Seconds of work before each collective: what a layer does between two of them."""

_IN_A_ROW = 8
"""Collectives in a run."""

_SIDE = 256
"""Rows and columns of the matrices that ranks multiply."""


def measure_skew(stopwatch: Stopwatch, num_passes: int) -> float:
    """Seconds that ranks wait for the last of them at a collective, beside what it takes.

    Args:
        stopwatch: measures, on the device that a rank runs on.
        num_passes: medians of so many count.
    """
    matrix = torch.ones(_SIDE, _SIDE, device=stopwatch.device)
    tensor = torch.ones(_SIDE, device=stopwatch.device)
    seconds = stopwatch.measure(lambda: matrix @ matrix)
    count = max(round(_WORK / max(seconds, 1e-9)), 1)

    def work() -> None:
        for _ in range(count):
            _ = matrix @ matrix

    def reduce() -> None:
        dist.all_reduce(tensor)

    def both() -> None:
        work()
        reduce()

    found = [
        stopwatch.measure(_repeated(both)) / _IN_A_ROW
        - stopwatch.measure(_repeated(work)) / _IN_A_ROW
        - stopwatch.measure(reduce)
        for _ in range(num_passes)
    ]
    return max(median(found), 0.0)


def _repeated(run: Callable[[], None]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(_IN_A_ROW):
            run()

    return several
