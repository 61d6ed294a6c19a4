"""Fits a topology to measurements on the ranks of a cluster."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard.errors import MeshError
from autoshard.launching import own_gpu
from autoshard.measure.calibration import kernels
from autoshard.measure.calibration.collectives import (
    Stopwatch,
    measure_collectives,
    measure_skew,
    shared_size,
)
from autoshard.measure.calibration.measurements import (
    FULL,
    QUICK,
    CalibrationEffort,
    CalibrationProgress,
    Measurements,
    Timing,
)
from autoshard.mesh import Axis, Device, Link, Mesh, Topology
from autoshard.mesh.calibration import CollectiveSample, fit_device, fit_links, fit_operators
from autoshard.mesh.topology import INNER, MEASURABLE

_HIGH_LOAD = 0.5
"""Load average per CPU from which other work disturbs a calibration."""


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
        remarks: what makes the result doubtful: other work on the machine.
        num_kept: number of measurements of an interrupted calibration that were used.
    """

    topology: Topology
    comparisons: tuple[Comparison, ...]
    skew: float
    remarks: tuple[str, ...] = ()
    num_kept: int = 0


def calibrate(
    shape: Sequence[int] | None = None,
    *,
    links: Topology | None = None,
    name: str = "calibrated",
    effort: CalibrationEffort = FULL,
    busy: bool = False,
    partial_file: Path | None = None,
    report: Callable[[CalibrationProgress], None] = lambda _: None,
) -> Calibration:
    """Measure collectives, matrix products and copies, and fit a topology to them.

    Call it on every rank of a job started by torchrun. Each machine is a node of LOCAL_WORLD_SIZE
    ranks, with one link level inside nodes and one between them.

    Args:
        shape: size of each mesh axis to measure; by default nodes by ranks per node. An axis
            must be either inside nodes or between them.
        links: a topology whose links are taken as they are, so that only the device is measured;
            one rank is then enough.
        name: name of the topology.
        effort: how much is measured.
        busy: True to measure the CPU time of collectives, if the machine has other load;
            operators on CPUs are always measured in CPU time.
        partial_file: keeps the measurements while there is no topology. A calibration that is
            interrupted continues from it; the caller deletes it.
        report: called on the first rank before each measurement.

    Raises:
        MeshError: the shape does not fit the ranks, there is one rank and no `links`, or no
            topology fits the measurements, which are then deleted.
    """
    load = _load_remark()
    run = _CalibrationRun(
        links, effort, tuple(shape or ()), busy=busy, path=partial_file, report=report
    )
    try:
        topology, comparisons, skew = run.fitted_links()
        device = run.fitted_device()
    except MeshError:
        run.measurements.discard()
        raise
    remarks = (*load, *run.measurements.remarks())
    source = f"{topology.source}{'; ' * bool(remarks)}{'; '.join(remarks)}"
    topology = replace(topology, name=name, device=device, source=source)
    return Calibration(topology, comparisons, skew, remarks, run.measurements.num_kept)


class _CalibrationRun:
    """The measurements of a calibration on this rank."""

    def __init__(
        self,
        links: Topology | None,
        effort: CalibrationEffort,
        shape: tuple[int, ...],
        *,
        busy: bool,
        path: Path | None,
        report: Callable[[CalibrationProgress], None],
    ) -> None:
        self._num_ranks = int(os.environ["WORLD_SIZE"])
        self._per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self._links, self._effort, self._busy = links, effort, busy
        self._device = _device()
        self._levels = _levels(self._num_ranks, self._per_node)
        shape = shape or (self._num_ranks // self._per_node, self._per_node)
        self._mesh = _mesh(shape, self._num_ranks, self._levels, self._device)
        if links is None and self._num_ranks == 1:
            raise MeshError(
                "one rank has no links to measure; take those of a topology that is known "
                "(--links NAME or FILE), and only the device is measured"
            )
        self._axes = _axes(self._mesh) if links is None else {}
        num_collectives = len(self._axes) * effort.num_passes * len(MEASURABLE) * len(self._sizes)
        num_skews = 0 if links is not None or busy else effort.num_passes
        num_kernels = kernels.num_kernels(self._device) + effort.num_rounds + 1
        settings = {
            "torch": torch.__version__,
            "ranks": [self._num_ranks, self._per_node],
            "device": self._device.type,
            "mesh": shape,
            "links": links is None,
            "busy": busy,
            "effort": asdict(effort),
        }
        total = num_collectives + num_skews + num_kernels
        self.measurements = Measurements(settings, total, path=path, report=report)

    @property
    def _sizes(self) -> list[int]:
        return sorted({*self._effort.sizes, *self._effort.checked})

    def _take(self, stage: str, prefix: str = "") -> kernels.Take:
        def take(name: str, measure: Callable[[], Timing]) -> Timing:
            return self.measurements.take(stage, f"{prefix}{name}", measure)

        return take

    def fitted_links(self) -> tuple[Topology, tuple[Comparison, ...], float]:
        """A topology with measured links, comparisons of other sizes, and the skew."""
        made = f"measured on {self._num_ranks} ranks, {self._per_node} per node, torch"
        made = f"{made} {torch.__version__}{', quick' * (self._effort == QUICK)}"
        if self._links is not None:
            source = f"device {made}; links of {self._links.name}"
            return replace(self._links, source=source), (), 0.0
        stopwatch = Stopwatch(self._device, self._effort, busy=self._busy)
        samples = list(self._samples(stopwatch))
        checked = self._effort.checked
        fitted = [sample for _, sample in samples if not is_checked(sample, checked)]
        links, overhead = fit_links(fitted, self._levels)
        skew = self._skew(stopwatch)
        alone = replace(self._mesh.topology, levels=links, collective_overhead=overhead)
        comparisons = tuple(_compared(Mesh(self._mesh.axes, alone), samples, checked))
        in_a_step = replace(alone, collective_overhead=overhead + skew, source=made)
        return in_a_step, comparisons, skew

    def _samples(self, stopwatch: Stopwatch) -> Iterator[tuple[str, CollectiveSample]]:
        """The name of each axis of several ranks, with a sample for each action and size.

        A sample is the median of several passes over all sizes, which spreads other load evenly.
        """
        groups = init_device_mesh(
            self._device.type, self._mesh.axis_sizes, mesh_dim_names=self._mesh.axis_names
        )
        for axis, level in self._axes.items():
            group = groups.get_group(axis)
            stage = f"collectives over {axis} of {group.size()} ranks"
            passes = [
                list(
                    measure_collectives(
                        group, level, self._sizes, stopwatch, self._take(stage, f"{axis} {i} ")
                    )
                )
                for i in range(self._effort.num_passes)
            ]
            for samples in zip(*passes, strict=True):
                yield axis, replace(samples[0], seconds=median(s.seconds for s in samples))

    def _skew(self, stopwatch: Stopwatch) -> float:
        """Seconds that ranks wait at a collective for the last one."""
        if self._busy:  # waiting is then due to other load
            return 0.0
        take, measure = self._take("waiting of ranks"), partial(measure_skew, stopwatch)
        found = [take(f"skew {i}", measure) for i in range(self._effort.num_passes)]
        return max(median(timing.seconds[0] for timing in found), 0.0)

    def fitted_device(self) -> Device:
        """The device, with its measured operators."""
        device, per_node = self._device, self._per_node
        if device.type == "cuda":
            name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
        else:
            name = f"processor shared by {per_node} ranks"
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
        clock = kernels.KernelClock(device, per_node, self._effort)
        launch = partial(kernels.measure_launch, device, clock)
        (overhead,) = self._take("kernel launches")("launch", launch).seconds
        copies = list(kernels.measure_copies(device, clock, self._take("copies")))
        products = list(kernels.measure_products(device, clock, self._take("matrix products")))
        found = fit_device(name, copies, products, overhead, memory)
        samples = kernels.measure_operators(
            device, found, clock, self._effort, self._take("operators")
        )
        return fit_operators(found, samples)


def _load_remark() -> tuple[str, ...]:
    """A sentence on the load of the machine before the calibration, if it is high."""
    load, num_cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load < _HIGH_LOAD * num_cpus:
        return ()
    return (f"the load average was {load:.1f} on {num_cpus} CPUs before",)


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
        return [("intra-node", None)]
    return [("intra-node", per_node), ("network", None)]


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return own_gpu()


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


@contextmanager
def process_groups() -> Iterator[bool]:
    """A context with the default process group; yields whether this is rank 0."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
