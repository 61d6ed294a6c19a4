"""Matrix products and copies, over sizes; all ranks run them at the same time."""

from collections.abc import Iterator
from functools import partial

import torch

from autoshard.mesh.calibration import CopySample, ProductSample
from autoshard.runtime.calibration.stopwatch import KernelClock

_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}
_EXTENTS = {
    "cpu": (
        *((n, n, n) for n in (128, 256, 512, 1024)),
        *((1024, 256, n) for n in (16, 32, 64, 256, 1024)),
        *((1024, n, 256) for n in (16, 64)),
        *((n, 256, 1024) for n in (16, 64, 256)),
    ),
    "cuda": (
        *((n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
        *((8192, 4096, n) for n in (64, 256, 1024)),
        *((n, 4096, 4096) for n in (64, 256, 1024)),
    ),
}
"""Rows, terms of a sum, and columns, by type of device."""

_COPIED = {"cpu": (1 << 20, 1 << 22, 1 << 24, 1 << 26), "cuda": (1 << 24, 1 << 26, 1 << 28)}
"""Bytes of the tensors that are copied, by type of device."""


def measure_launch(device: torch.device, clock: KernelClock) -> float:
    """Seconds of the smallest operator."""
    one = torch.ones(1, device=device)
    count = 100

    def run() -> None:
        for _ in range(count):
            torch.neg(one)

    return clock.measure(run) / count


def measure_products(device: torch.device, clock: KernelClock) -> Iterator[ProductSample]:
    """Products of matrices, square ones and such as slices of a model's are."""
    for name in _DTYPES.get(device.type, ("float32",)):
        for extents in _EXTENTS.get(device.type, _EXTENTS["cpu"]):
            rows, terms, columns = extents
            kind = {"dtype": getattr(torch, name), "device": device}
            multiply = partial(torch.mm, torch.ones(rows, terms, **kind))
            seconds = clock.measure(partial(multiply, torch.ones(terms, columns, **kind)))
            yield ProductSample(name, extents, seconds)


def measure_copies(device: torch.device, clock: KernelClock) -> Iterator[CopySample]:
    """Copies that read as much as they write."""
    for nbytes in _COPIED.get(device.type, _COPIED["cpu"]):
        tensor = torch.ones(nbytes // torch.float32.itemsize, device=device)
        yield CopySample(2 * nbytes, clock.measure(tensor.neg))
