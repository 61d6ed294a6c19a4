"""Fits a topology to measurements on the ranks of a cluster."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard.errors import MeshError
from autoshard.mesh import Axis, Device, Link, Mesh, Topology
from autoshard.mesh.calibration import CollectiveSample, fit_device, fit_links, fit_operators
from autoshard.mesh.topology import INNER
from autoshard.runtime.calibration.collectives import (
    Stopwatch,
    measure_collectives,
    measure_skew,
    shared_size,
)
from autoshard.runtime.calibration.kernels import (
    KernelClock,
    measure_copies,
    measure_launch,
    measure_operators,
    measure_products,
)

SIZES = tuple(1 << exponent for exponent in range(10, 29, 2))
"""Measured sizes, bytes: 1 KiB to 256 MiB."""

CHECKED = tuple(1 << exponent for exponent in range(21, 29, 2))
"""Sizes in bytes that are not used for the fit but to check it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured collective that was not used for the fit, and the prediction.

    Attributes:
        axis: name of the mesh axis.
        sample: the measurement.
        predicted: predicted seconds.
    """

    axis: str
    sample: CollectiveSample
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.sample.seconds - 1


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        topology: the fitted topology.
        comparisons: predictions for collectives of other sizes.
        skew: seconds that ranks wait for the last one to arrive; included in the topology's
            collective overhead.
    """

    topology: Topology
    comparisons: tuple[Comparison, ...]
    skew: float


def calibrate(
    shape: Sequence[int] | None = None,
    *,
    name: str = "calibrated",
    sizes: Sequence[int] = SIZES,
    checked: Sequence[int] = CHECKED,
    elements: Sequence[int] | None = None,
    num_passes: int = 3,
    busy: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure collectives, matrix products and copies, and fit a topology to them.

    Call it on every rank of a job started by torchrun. Each machine is a node of LOCAL_WORLD_SIZE
    ranks, with one link level inside nodes and one between them.

    Args:
        shape: size of each mesh axis to measure; by default nodes by ranks per node. An axis
            must be either inside nodes or between them.
        name: name of the topology.
        sizes: sizes of collectives to fit to, bytes.
        checked: other sizes, at which the fit is checked, bytes.
        elements: sizes of activations for operators; by default typical ones of the device.
        num_passes: number of measurements of each size, of which the median is taken.
        busy: True to measure the CPU time of collectives, if the machine has other load;
            operators on CPUs are always measured in CPU time.
        report: called with a description of the next measurement.

    Raises:
        MeshError: the shape does not fit the ranks, or no topology fits the measurements.
    """
    num_ranks, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    levels = _levels(num_ranks, per_node)
    device = _device()
    mesh = _mesh(tuple(shape or (num_ranks // per_node, per_node)), num_ranks, levels, device)
    every = sorted({*sizes, *checked})
    stopwatch = Stopwatch(device, busy=busy)
    samples = list(_measured(mesh, every, stopwatch, num_passes, report))
    fitted = [sample for _, sample in samples if not is_checked(sample, checked)]
    links, overhead = fit_links(fitted, levels)
    # On a busy machine, the waiting time is due to other load.
    skew = 0.0 if busy else measure_skew(stopwatch, num_passes)
    report("matrix products, copies and operators")
    topology = Topology(
        name=name,
        device=_fitted(device, per_node, elements, num_passes),
        levels=links,
        backend="nccl" if device.type == "cuda" else "gloo",
        collective_overhead=overhead,
        source=f"measured on {num_ranks} ranks, {per_node} per node, torch {torch.__version__}",
    )
    alone = Mesh(mesh.axes, topology)
    comparisons = tuple(_compared(alone, samples, checked))
    in_a_step = replace(topology, collective_overhead=overhead + skew)
    return Calibration(in_a_step, comparisons, skew)


def _measured(
    mesh: Mesh,
    sizes: Sequence[int],
    stopwatch: Stopwatch,
    num_passes: int,
    report: Callable[[str], None],
) -> Iterator[tuple[str, CollectiveSample]]:
    """The name of each axis of more than one rank, with a sample for each action and size.

    A sample is the median of several passes over all sizes, which spreads other load evenly.
    """
    groups = init_device_mesh(
        stopwatch.device.type, mesh.axis_sizes, mesh_dim_names=mesh.axis_names
    )
    for axis, level in _axes(mesh).items():
        report(f"collectives over {axis}, {sizes[0]} to {sizes[-1]} bytes")
        passes = [
            list(measure_collectives(groups.get_group(axis), level, sizes, stopwatch))
            for _ in range(num_passes)
        ]
        for samples in zip(*passes, strict=True):
            yield axis, replace(samples[0], seconds=median(s.seconds for s in samples))


def is_checked(sample: CollectiveSample, checked: Sequence[int]) -> bool:
    """True if a sample is for the check of the fit; measured sizes are rounded up."""
    return sample.nbytes in {shared_size(nbytes, sample.num_ranks) for nbytes in checked}


def _compared(
    mesh: Mesh, samples: Iterable[tuple[str, CollectiveSample]], checked: Sequence[int]
) -> Iterator[Comparison]:
    """Compare the samples that were not used for the fit with its predictions."""
    for axis, sample in samples:
        if is_checked(sample, checked):
            action, inner = sample.action.removesuffix(INNER), sample.action.endswith(INNER)
            index = mesh.axis_names.index(axis)
            seconds = mesh.collective_time(action, index, sample.nbytes, inner=inner)
            yield Comparison(axis, sample, seconds)


def _levels(num_ranks: int, per_node: int) -> list[tuple[str, int | None]]:
    if num_ranks == per_node:
        return [("node", None)]
    return [("node", per_node), ("network", None)]


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _mesh(
    shape: tuple[int, ...],
    num_ranks: int,
    levels: Sequence[tuple[str, int | None]],
    device: torch.device,
) -> Mesh:
    """The mesh to measure, with placeholder performance figures."""
    if prod(shape) != num_ranks:
        raise MeshError(
            f"the mesh {shape} has {prod(shape)} devices, but {num_ranks} ranks run; pass a shape "
            f"of {num_ranks} devices"
        )
    links = tuple(Link(name, size, 1.0) for name, size in levels)
    unknown = Device("unknown", {"float32": 1.0}, memory_bandwidth=1.0, memory=1)
    axes = tuple(Axis(f"axis{i}", size) for i, size in enumerate(shape))
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Mesh(axes, Topology("unknown", unknown, links, backend))


def _axes(mesh: Mesh) -> dict[str, int]:
    """The link level that each axis of more than one rank crosses."""
    found = {}
    for i, axis in enumerate(mesh.axes):
        groups = [axis.size, *(span.num_groups for span in mesh.spans(i))]
        crossed = [level for level in range(len(groups) - 1) if groups[level + 1] < groups[level]]
        if len(crossed) > 1:
            raise MeshError(
                f"axis {i} of {axis.size} ranks is both inside nodes and between them; pass a "
                f"shape whose axes are either inside nodes or between them"
            )
        if crossed:
            found[axis.name] = crossed[0]
    missing = [link.name for i, link in enumerate(mesh.topology.levels) if i not in found.values()]
    if missing:
        raise MeshError(
            f"no axis of {mesh.axis_sizes} uses {' and '.join(missing)} links; calibrate on "
            f"several ranks, with a shape that has such an axis"
        )
    return found


def _fitted(
    device: torch.device, per_node: int, elements: Sequence[int] | None = None, num_passes: int = 3
) -> Device:
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    else:
        name = f"processor shared by {per_node} ranks"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    clock = KernelClock(device, per_node)
    copies, products = measure_copies(device, clock), measure_products(device, clock)
    found = fit_device(name, copies, products, measure_launch(device, clock), memory)
    rounds = 2 * num_passes + 1
    samples = measure_operators(device, found, clock, elements=elements, num_rounds=rounds)
    return fit_operators(found, samples)


@contextmanager
def process_groups() -> Iterator[bool]:
    """A context with the default process group; yields whether this is rank 0."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
