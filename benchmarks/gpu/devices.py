"""What differs between a GPU and a CPU, on which all of it is tried: clock, memory, and trace."""

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity

Step = Callable[[], object]
"""A training step."""


class Device(Protocol):
    """The device that is measured.

    Attributes:
        device: as torch names it.
        compiler: backend of `torch.compile`.
        activities: what the profiler traces.
        kernels: categories of a trace's events that are work of the device.
    """

    device: torch.device
    compiler: str
    activities: Sequence[ProfilerActivity]
    kernels: frozenset[str]

    def seconds(self, step: Step, count: int) -> list[float]:
        """The duration of each of several steps, one after the other."""

    def allocated(self) -> int:
        """Bytes that are allocated now."""

    def reset_peak(self) -> None:
        """Begin to look for the most bytes that are allocated."""

    def peak(self) -> int:
        """The most bytes that were allocated since then."""

    def release(self) -> None:
        """Free what nothing refers to."""


class Cuda:
    """A GPU: time is that between events, so the host may run ahead as it does in training."""

    compiler = "inductor"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    kernels = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.cuda.init()  # a device mesh would choose a device by the rank otherwise

    def seconds(self, step: Step, count: int) -> list[float]:
        """The duration of each of several steps, one after the other."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)]

    def allocated(self) -> int:
        """Bytes that tensors have now."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        """Begin to look for the most bytes that tensors have."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most bytes that tensors had since then."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        """Free what nothing refers to, so that other processes can have it."""
        gc.collect()
        torch.cuda.empty_cache()


class Cpu:
    """A CPU: wall time, and the resident memory of the process."""

    compiler = "aot_eager"
    activities = (ProfilerActivity.CPU,)
    kernels = frozenset({"cpu_op"})

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.device = torch.device("cpu")

    def seconds(self, step: Step, count: int) -> list[float]:
        """The duration of each of several steps, one after the other."""
        marks = [perf_counter()]
        for _ in range(count):
            step()
            marks.append(perf_counter())
        return [other - one for one, other in pairwise(marks)]

    def allocated(self) -> int:
        """Resident bytes of the process."""
        return _status("VmRSS")

    def reset_peak(self) -> None:
        """Begin to look for the most resident bytes."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> int:
        """The most resident bytes since then."""
        return _status("VmHWM")

    def release(self) -> None:
        """Free what nothing refers to."""
        gc.collect()


def _status(name: str) -> int:
    """Bytes in a line of the process's status, such as `VmRSS:  1234 kB`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(value) << 10


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Cpu, "cuda": Cuda}
"""Devices by the names that torch gives to their types."""
