"""The device mesh: named axes over a topology, and what collectives over them cost."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from autoshard.errors import MeshError
from autoshard.mesh.checks import check_name, check_unique
from autoshard.mesh.collectives import AlphaBeta, Line, Span, lines
from autoshard.mesh.topology import COLLECTIVES, INNER, Topology, check_collective

MAX_DEVICES = 1 << 20
"""No cluster is larger; the limit keeps absurd requests from exhausting memory."""


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh.

    Attributes:
        name: a label; it does not say what the axis will be used for.
        size: ranks along the axis.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    size: int

    def __post_init__(self) -> None:
        check_name(self.name, "axis")
        if self.size < 1:
            raise MeshError(f"axis {self.name!r} has size {self.size}; it needs 1 rank or more")


@dataclass(frozen=True)
class Mesh:
    """Devices arranged along axes, numbered row-major as in PyTorch's `DeviceMesh`.

    The last axis varies fastest, so it lies on the innermost links.

    Attributes:
        axes: from the outermost to the innermost.
        topology: the devices, and the links between them.
        collectives: prices of collectives that replace those of the links, where given.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    axes: tuple[Axis, ...]
    topology: Topology
    collectives: AlphaBeta | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("the mesh has no axes; one device is the mesh of one axis of size 1")
        check_unique(self.axis_names, "axis")
        limit = self.topology.max_devices or MAX_DEVICES
        if self.num_devices > limit:
            raise MeshError(
                f"the mesh {self.axis_sizes} has {self.num_devices} devices, but topology "
                f"{self.topology.name!r} holds {limit}; make the mesh smaller or add a link level"
            )
        if self.collectives is not None and len(self.collectives.alpha) != len(self.axes):
            raise MeshError(
                f"alpha and beta have {len(self.collectives.alpha)} entries, but the mesh has "
                f"{len(self.axes)} axes; give one of each per axis"
            )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Name of each axis."""
        return tuple(axis.name for axis in self.axes)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return prod(self.axis_sizes)

    def collective_time(self, action: str, axis: int, nbytes: int, *, inner: bool = False) -> float:
        """Seconds that a collective over one axis takes, all its groups at the same time.

        Args:
            action: all_gather, all_reduce, all_to_all, halo_exchange or reduce_scatter.
            axis: index of the axis.
            nbytes: size of the larger of a rank's tensor before and after; of a halo exchange, of
                the rank that sends or receives most.
            inner: whether slices of a dim are moved that is not the first.

        Raises:
            MeshError: the collective or the axis does not exist.
        """
        candidates = self._lines.get((action, axis, inner))
        if candidates is None:
            check_collective(action)
            self._check_axis(axis)
        return min((line.seconds(nbytes) for line in candidates or ()), default=0.0)

    def copy_time(self, nbytes: int) -> float:
        """Seconds that a local copy takes that makes `nbytes`: each byte read and written."""
        if self.collectives is not None:
            return 0.0
        device = self.topology.device
        return device.launch_overhead + 2 * nbytes / device.memory_bandwidth

    def spans(self, axis: int) -> tuple[Span, ...]:
        """How the ranks of one axis lie over each link level, innermost first.

        Where groups along the axis differ, the worst counts: the most groups, and the
        fewest ranks that share one.

        Raises:
            MeshError: the axis does not exist.
        """
        self._check_axis(axis)
        return self._spans[axis]

    def _check_axis(self, axis: int) -> None:
        if not 0 <= axis < len(self.axes):
            raise MeshError(f"axis {axis} does not exist; the mesh has {len(self.axes)} axes")

    @cached_property
    def _spans(self) -> tuple[tuple[Span, ...], ...]:
        limit = self.num_devices
        sizes = [min(link.size or limit, limit) for link in self.topology.levels]
        stride = limit
        spans = []
        for num_ranks in self.axis_sizes:
            stride //= num_ranks
            spans.append(tuple(_span(num_ranks, stride, size, limit) for size in sizes))
        return tuple(spans)

    @cached_property
    def _lines(self) -> dict[tuple[str, int, bool], tuple[Line, ...]]:
        return {
            (action, axis, inner): self._axis_lines(action, axis, inner=inner)
            for action in COLLECTIVES
            for inner in (False, True)
            for axis, num_ranks in enumerate(self.axis_sizes)
            if num_ranks > 1
        }

    def _axis_lines(self, action: str, axis: int, *, inner: bool) -> tuple[Line, ...]:
        num_ranks = self.axis_sizes[axis]
        if self.collectives is not None:
            return (self.collectives.line(action, axis, num_ranks),)
        overhead = self.topology.collective_overhead
        # Only these two move slices that lie apart; an exchange always does.
        name = action + INNER * (inner and action in {"all_gather", "reduce_scatter"})
        found = lines(name, num_ranks, self._spans[axis], self.topology.levels)
        return tuple(line._replace(fixed=overhead + line.fixed) for line in found)


def _span(num_ranks: int, stride: int, size: int, num_devices: int) -> Span:
    """How groups of ranks that lie a stride apart lie over links that join so many devices."""
    if size >= num_devices:
        return Span(1, num_ranks)
    if size <= stride:
        return Span(num_ranks, 1)
    # Where a group begins counts only up to whole links: few of many devices differ in that.
    block = num_ranks * stride
    number = min(num_devices // block, size // gcd(size, block))
    blocks = np.arange(number)[:, None] * block
    firsts = np.unique((blocks + np.arange(stride)) % size)
    groups = (firsts[:, None] + np.arange(num_ranks) * stride) // size
    starts = np.diff(groups, axis=1, prepend=-1) != 0
    runs = np.diff(np.flatnonzero(starts), append=starts.size)
    return Span(int(starts.sum(axis=1).max()), int(runs.min()))
