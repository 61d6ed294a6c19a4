"""Device meshes: named axes over a topology; `collectives` has the prices of links."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import ceil, gcd, prod
from typing import ClassVar, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from autoshard.base.integers import format_integer
from autoshard.base.schemas import listed_errors, type_adapter
from autoshard.errors import MeshError
from autoshard.mesh.collectives import Line, Span, lines
from autoshard.mesh.nodes import describe_devices
from autoshard.mesh.shapes import check_axis_name, check_num_axes
from autoshard.mesh.topology import (
    COLLECTIVES,
    INNER,
    Topology,
    check_collective,
    check_name,
    check_not_negative,
    check_unique,
)


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The cost model of Alpa: one latency and one inverse bandwidth per axis.

    An alternative to prices from links, for comparison with published results. The unit of prices
    is that of alpha and beta, and local copies are free. The formulas and constants are those of
    alpa/shard_parallel/auto_sharding.py (`LogicalDeviceMesh`).

    Attributes:
        alpha: price of a collective, per axis.
        beta: price of a byte, per axis.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.alpha) != len(self.beta):
            raise MeshError(
                f"alpha has {len(self.alpha)} entries and beta {len(self.beta)}; "
                "give one of each per axis"
            )
        for name, values in (("alpha", self.alpha), ("beta", self.beta)):
            for axis, value in enumerate(values):
                check_not_negative(value, f"{name}[{axis}]")

    def line(self, action: str, axis: int, num_ranks: int) -> Line:
        """Price of a collective over one axis of more than one rank.

        The published all-to-all counts (n-1)/n^2 of the bytes of the whole group, with a penalty
        of n/2; a rank's tensor is 1/n of that. Alpa has no halo exchange; it is priced as one
        message.
        """
        check_collective(action)
        n = num_ranks
        constant, volume = {
            "all_reduce": (0.01, 2 * (n - 1) / n),
            "all_gather": (0.1, (n - 1) / n),
            "reduce_scatter": (0.001, (n - 1) / n),
            "all_to_all": (0.001, (n - 1) / 2),
            "halo_exchange": (0.001, 1.0),
        }[action]
        return Line(self.alpha[axis] + constant, self.beta[axis] * volume)


MAX_DEVICES = 1 << 20
"""Maximum number of devices, which protects against requests that exhaust memory."""


def check_num_devices(shape: Sequence[int]) -> None:
    """Raise MeshError if a mesh has more devices than can be planned for."""
    number = prod(shape)
    if number > MAX_DEVICES:
        raise MeshError(
            f"the mesh has {format_integer(number)} devices; at most {MAX_DEVICES:,} can be "
            f"planned for"
        )


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh.

    Attributes:
        name: a label without effect on costs.
        size: number of ranks along the axis.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    size: int

    def __post_init__(self) -> None:
        check_name(self.name, "axis")
        check_axis_name(self.name)
        if self.size < 1:
            raise MeshError(
                f"axis {self.name!r} has size {format_integer(self.size)}; it needs 1 rank or more"
            )


@dataclass(frozen=True)
class Mesh:
    """Devices arranged along axes, numbered row-major as in PyTorch's `DeviceMesh`.

    The last axis varies fastest, so it uses the innermost links.

    Attributes:
        axes: from the outermost to the innermost.
        topology: the devices, and the links between them.
        collectives: cost model that replaces the prices from links, if given.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    axes: tuple[Axis, ...]
    topology: Topology
    collectives: AlphaBeta | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("the mesh has no axes; for one device, use one axis of size 1")
        check_num_axes(len(self.axes))
        check_unique(self.axis_names, "axis")
        check_num_devices(self.axis_sizes)
        limit = self.topology.max_devices
        if limit is not None and self.num_devices > limit:
            raise MeshError(
                f"the mesh {self.axis_sizes} has {self.num_devices} devices, but topology "
                f"{self.topology.name!r} has {limit}; make the mesh smaller or add a link level"
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
        """Number of devices of the mesh."""
        return prod(self.axis_sizes)

    @property
    def devices_per_node(self) -> int | None:
        """Number of devices of a node; None if the topology has no nodes."""
        size = self.topology.devices_per_node
        return None if size is None else min(size, self.num_devices)

    @property
    def num_nodes(self) -> int | None:
        """Number of nodes; None if the topology has no nodes."""
        size = self.devices_per_node
        return None if size is None else ceil(self.num_devices / size)

    @property
    def description(self) -> str:
        """Devices, nodes and links in one line, and what of it was assumed.

        For example "1 node x 8 NVIDIA H100 SXM (NVLink, 450 GB/s a device)".
        """
        text = describe_devices(self.topology, self.num_devices)
        if self.collectives is not None:
            text += "; collectives cost what Alpa's alpha and beta say"
        return text

    @cached_property
    def axis_groups(self) -> tuple[tuple[int, ...], ...]:
        """Adjacent axes of several ranks that can communicate as one group; empty if none can.

        Axes of one rank between them do not matter. The cost model of Alpa has no price for groups.
        """
        if self.collectives is not None:
            return ()
        axes = [axis for axis, size in enumerate(self.axis_sizes) if size > 1]
        ends = combinations(range(len(axes) + 1), 2)
        return tuple(tuple(axes[a:b]) for a, b in ends if b - a > 1)

    def collective_time(
        self, action: str, axis: int | tuple[int, ...], nbytes: int, *, inner: bool = False
    ) -> float:
        """Seconds of a collective over one axis, with all groups of the axis at the same time.

        Args:
            action: all_gather, all_reduce, all_to_all, halo_exchange or reduce_scatter.
            axis: index of the axis; several, if they communicate as one group (`axis_groups`).
            nbytes: bytes of a rank's tensor before or after, whichever is larger; for a halo
                exchange, bytes of the rank that sends or receives most.
            inner: True if the collective is along a dim other than the first.

        Raises:
            MeshError: the collective or the axis does not exist.
        """
        axes = (axis,) if isinstance(axis, int) else axis
        candidates = self._lines.get((action, axes, inner))
        if candidates is None:
            check_collective(action)
            self._check_axes(axes)
        return min((line.seconds(nbytes) for line in candidates or ()), default=0.0)

    def copy_time(self, nbytes: int) -> float:
        """Seconds of a local copy of `nbytes`, each read and written once."""
        if self.collectives is not None:
            return 0.0
        device = self.topology.device
        return device.launch_overhead + 2 * nbytes / device.stream_bandwidth

    def spans(self, axis: int) -> tuple[Span, ...]:
        """Distribution of the ranks of one axis over each link level, innermost first.

        If groups along the axis differ, the worst case counts: the maximum number of groups, and
        the minimum number of ranks per group.

        Raises:
            MeshError: the axis does not exist.
        """
        self._check_axes((axis,))
        return self._group_spans((axis,))

    def _check_axes(self, axes: tuple[int, ...]) -> None:
        for axis in axes:
            if not 0 <= axis < len(self.axes):
                raise MeshError(f"axis {axis} does not exist; the mesh has {len(self.axes)} axes")
        if len(axes) != 1 and axes not in self.axis_groups:
            raise MeshError(
                f"axes {axes} do not communicate as one group; those that do are "
                f"{', '.join(map(str, self.axis_groups)) or 'none'}"
            )

    def _group_spans(self, axes: tuple[int, ...]) -> tuple[Span, ...]:
        """Distribution of the ranks of adjacent axes over each link level, innermost first."""
        limit = self.num_devices
        num_ranks = prod(self.axis_sizes[axis] for axis in axes)
        stride = prod(self.axis_sizes[axes[-1] + 1 :])
        sizes = [min(link.size or limit, limit) for link in self.topology.levels]
        return tuple(_span(num_ranks, stride, size, limit) for size in sizes)

    @cached_property
    def _lines(self) -> dict[tuple[str, tuple[int, ...], bool], tuple[Line, ...]]:
        alone = [(axis,) for axis, num_ranks in enumerate(self.axis_sizes) if num_ranks > 1]
        return {
            (action, axes, inner): self._lines_over(action, axes, inner=inner)
            for action in COLLECTIVES
            for inner in (False, True)
            for axes in (*alone, *self.axis_groups)
        }

    def _lines_over(self, action: str, axes: tuple[int, ...], *, inner: bool) -> tuple[Line, ...]:
        num_ranks = prod(self.axis_sizes[axis] for axis in axes)
        if self.collectives is not None:
            return (self.collectives.line(action, axes[0], num_ranks),)
        overhead = self.topology.collective_overhead
        # Other collectives have the same price for all dims.
        name = action + INNER * (inner and action in {"all_gather", "reduce_scatter"})
        topology = self.topology
        spans = self._group_spans(axes)
        found = lines(name, num_ranks, spans, topology.levels, topology.backend)
        return tuple(line._replace(fixed=overhead + line.fixed) for line in found)


def _span(num_ranks: int, stride: int, size: int, num_devices: int) -> Span:
    """Span of ranks with a stride over link groups of `size` devices."""
    if size >= num_devices:
        return Span(1, num_ranks)
    if size <= stride:
        return Span(num_ranks, 1)
    # Only the offset of a block within a link group matters, which repeats after a few blocks.
    block = num_ranks * stride
    number = min(num_devices // block, size // gcd(size, block))
    blocks = np.arange(number)[:, None] * block
    firsts = np.unique((blocks + np.arange(stride)) % size)
    groups = (firsts[:, None] + np.arange(num_ranks) * stride) // size
    starts = np.diff(groups, axis=1, prepend=-1) != 0
    runs = np.diff(np.flatnonzero(starts), append=starts.size)
    return Span(int(starts.sum(axis=1).max()), int(runs.min()))


T = TypeVar("T")


def mesh_to_json(mesh: Mesh) -> str:
    """Convert a mesh to a JSON document with all figures, independent of presets."""
    return type_adapter(Mesh).dump_json(mesh).decode()


def mesh_from_json(document: str | bytes) -> Mesh:
    """Parse the JSON of a mesh, as `mesh_to_json` writes it.

    Raises:
        MeshError: the document is not JSON or not a valid mesh, or has unknown fields or inexact
            types; the message lists the errors.
    """
    return _read(type_adapter(Mesh), document, "mesh")


def topology_to_json(topology: Topology, *, indent: int | None = 1) -> str:
    """Convert a topology to a JSON document that can be edited."""
    return type_adapter(Topology).dump_json(topology, indent=indent).decode()


def topology_from_json(document: str | bytes) -> Topology:
    """Parse the JSON of a topology, as `topology_to_json` writes it.

    Raises:
        MeshError: the document is not JSON or not a valid topology, or has unknown fields or
            inexact types; the message lists the errors.
    """
    return _read(type_adapter(Topology), document, "topology")


def _read(adapter: TypeAdapter[T], document: str | bytes, what: str) -> T:
    try:
        return adapter.validate_json(document, strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, (what, *e['loc'])))}: {e['msg'].removeprefix('Value error, ')}"
            for e in listed_errors(error)
        ]
        many = f"the {what} has {error.error_count():,} errors, which are too many to list"
        raise MeshError("; ".join(problems) or many) from None


def mesh_text(mesh: Mesh) -> str:
    """The axes of a mesh, such as `dp=2 x tp=4`."""
    return " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
