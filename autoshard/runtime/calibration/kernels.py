"""Matrix products and copies, over sizes."""

from collections.abc import Iterator
from functools import partial

import torch

from autoshard.costs.compute import MATMUL_EFFICIENCY, TILE
from autoshard.mesh.calibration import DeviceSample
from autoshard.runtime.calibration.stopwatch import Stopwatch

_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}
_EXTENTS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
_COPIED = {"cpu": (1 << 20, 1 << 22, 1 << 24, 1 << 26), "cuda": (1 << 24, 1 << 26, 1 << 28)}
"""Bytes of the tensors that are copied, by type of device."""

_LONG = 0.5
"""Seconds of a product behind which no larger one is tried."""


def measure_launch(device: torch.device) -> float:
    """Seconds of the smallest operator."""
    one = torch.ones(1, device=device)
    count = 100

    def run() -> None:
        for _ in range(count):
            torch.neg(one)

    return Stopwatch(device).measure(run) / count


def measure_kernels(device: torch.device) -> Iterator[DeviceSample]:
    """Products of square matrices, then copies; all ranks run them at the same time."""
    stopwatch = Stopwatch(device)
    for name in _DTYPES.get(device.type, ("float32",)):
        for extent in _EXTENTS.get(device.type, _EXTENTS["cpu"]):
            factor = torch.ones(extent, extent, dtype=getattr(torch, name), device=device)
            seconds = stopwatch.measure(partial(torch.mm, factor, factor))
            efficiency = MATMUL_EFFICIENCY * (extent / (extent + TILE)) ** 3
            yield DeviceSample(name, 2 * extent**3 / efficiency, seconds)
            if seconds > _LONG:
                break
    for nbytes in _COPIED.get(device.type, _COPIED["cpu"]):
        tensor = torch.ones(nbytes // torch.float32.itemsize, device=device)
        yield DeviceSample("", 2 * nbytes, stopwatch.measure(tensor.neg))
