"""Device meshes: named axes over a topology, and the cost model of collectives.

A collective costs `fixed + slope * bytes` seconds. Let an axis have n ranks, of which r_l share
a group at link level l (innermost l = 0, and r_{-1} = 1), in g_l groups (g_{-1} = n). B is the
size of the larger of a rank's tensor before and after, bw_l a device's bandwidth and lat_l the
latency of a step at level l.

All-gather and reduce-scatter take the faster of two algorithms, as NCCL does:

* ring: n - 1 steps, of which g_{l-1} - g_l cross level l; each of the r_{l-1} ranks of a group
  transfers its share of the ring over its own link, on all levels at the same time:
  sum_l (g_{l-1} - g_l) lat_l + max_l (n-1)/n B / (r_{l-1} bw_l);
* stages, for short messages: recursive doubling level by level, outermost first, so that
  each byte enters a group once:
  sum_l [ceil(log2(g_{l-1} / g_l)) lat_l + (1/r_{l-1} - 1/r_l) B / bw_l]. Long messages run
  as rings, so the term in B is never taken below the ring's.

All-reduce is a reduce-scatter and an all-gather: both twice. All-to-all exchanges B/n with each
peer in turn; bytes that leave a group go over the sender's own link, on all levels at the same
time: sum_l (r_l - r_{l-1}) lat_l + max_l (1 - r_{l-1}/n) B / bw_l. A halo exchange sends B to the
two neighbouring ranks at the same time, priced with the slowest link that any of them crosses,
independently of the number of ranks: max_l lat_l + max_l B / bw_l. Every collective also has the
topology's fixed overhead. A link may have a separate, measured rate for a collective, and a lower
bandwidth for the bytes of a message beyond some size.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), for the volumes and the steps of ring, recursive doubling and
pairwise exchange; nccl-tests, doc/PERFORMANCE.md, for bus bandwidth; NCCL,
src/graph/tuning.cc, for the split of a ring's steps between the links inside and between
nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, gcd, log2, prod
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from autoshard.errors import MeshError
from autoshard.integers import format_integer
from autoshard.mesh.nodes import describe_devices
from autoshard.mesh.shapes import check_num_axes
from autoshard.mesh.topology import (
    COLLECTIVES,
    INNER,
    Link,
    Rate,
    Topology,
    check_collective,
    check_name,
    check_not_negative,
    check_unique,
)
from autoshard.schemas import listed_errors, type_adapter


class Line(NamedTuple):
    """Seconds as a function of bytes: `fixed + slope * nbytes`, with a larger slope after bends.

    Attributes:
        fixed: seconds for 0 bytes.
        slope: seconds per byte.
        bends: (bytes, increase of the slope from there, relative to `slope`).
    """

    fixed: float
    slope: float
    bends: tuple[tuple[int, float], ...] = ()

    def seconds(self, nbytes: int) -> float:
        """Seconds for a number of bytes."""
        counted: float = nbytes
        for start, growth in self.bends:
            counted += growth * max(nbytes - start, 0)
        return self.fixed + self.slope * counted


@dataclass(frozen=True, slots=True)
class Span:
    """Distribution of the ranks of an axis over the groups of one link level.

    Attributes:
        num_groups: number of groups that have ranks of the axis.
        ranks_per_group: number of ranks of the axis in a group; the minimum if groups differ.
    """

    num_groups: int
    ranks_per_group: int


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


def lines(action: str, num_ranks: int, spans: Sequence[Span], links: Sequence[Link]) -> list[Line]:
    """Price of a collective with each algorithm; the minimum at a size is its price.

    Args:
        action: name of the collective (`MEASURABLE`).
        num_ranks: number of ranks; more than one.
        spans: distribution of the ranks over each link level, innermost first.
        links: the levels.
    """
    check_collective(action.removesuffix(INNER))
    crossings = list(_crossings(action, num_ranks, spans, links))
    if action == "all_to_all":
        return [_exchange(num_ranks, crossings)]
    if action == "halo_exchange":
        return [_neighbours(crossings)]
    passes = 2 if action == "all_reduce" else 1
    ring, stages = _ring(num_ranks, crossings), _stages(crossings)
    stages = stages._replace(slope=max(ring.slope, stages.slope))
    return [Line(passes * x.fixed, passes * x.slope, ring.bends) for x in (ring, stages)]


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Link level that an axis crosses: r_{l-1}, r_l, g_{l-1}, g_l, bw_l and lat_l."""

    ranks_inside: int
    ranks: int
    groups_inside: int
    groups: int
    link: Rate


def _crossings(
    action: str, num_ranks: int, spans: Sequence[Span], links: Sequence[Link]
) -> Iterable[_Crossing]:
    chain = [Span(num_ranks, 1), *spans]
    for (inside, span), link in zip(pairwise(chain), links, strict=True):
        if span.num_groups < inside.num_groups:
            yield _Crossing(
                ranks_inside=inside.ranks_per_group,
                ranks=span.ranks_per_group,
                groups_inside=inside.num_groups,
                groups=span.num_groups,
                link=link.rate(action),
            )


def _ring(num_ranks: int, crossings: Sequence[_Crossing]) -> Line:
    volume = (num_ranks - 1) / num_ranks
    slopes = [volume / (c.ranks_inside * c.link.bandwidth) for c in crossings]
    return Line(
        sum((c.groups_inside - c.groups) * c.link.latency for c in crossings),
        max(slopes),
        _bends(slopes, crossings),
    )


def _stages(crossings: Sequence[_Crossing]) -> Line:
    return Line(
        sum(ceil(log2(c.groups_inside / c.groups)) * c.link.latency for c in crossings),
        sum((1 / c.ranks_inside - 1 / c.ranks) / c.link.bandwidth for c in crossings),
    )


def _exchange(num_ranks: int, crossings: Sequence[_Crossing]) -> Line:
    slopes = [(1 - c.ranks_inside / num_ranks) / c.link.bandwidth for c in crossings]
    return Line(
        sum((c.ranks - c.ranks_inside) * c.link.latency for c in crossings),
        max(slopes),
        _bends(slopes, crossings),
    )


def _neighbours(crossings: Sequence[_Crossing]) -> Line:
    slopes = [1 / c.link.bandwidth for c in crossings]
    return Line(max(c.link.latency for c in crossings), max(slopes), _bends(slopes, crossings))


def _bends(
    slopes: Sequence[float], crossings: Sequence[_Crossing]
) -> tuple[tuple[int, float], ...]:
    """Bends of the link that is the bottleneck of long messages."""
    rate = crossings[slopes.index(max(slopes))].link
    inverses = [1.0, *(rate.bandwidth / bend.bandwidth for bend in rate.bends)]
    growths = (after - before for before, after in pairwise(inverses))
    return tuple((bend.nbytes, growth) for bend, growth in zip(rate.bends, growths, strict=True))


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

    def collective_time(self, action: str, axis: int, nbytes: int, *, inner: bool = False) -> float:
        """Seconds of a collective over one axis, with all groups of the axis at the same time.

        Args:
            action: all_gather, all_reduce, all_to_all, halo_exchange or reduce_scatter.
            axis: index of the axis.
            nbytes: bytes of a rank's tensor before or after, whichever is larger; for a halo
                exchange, bytes of the rank that sends or receives most.
            inner: True if the collective is along a dim other than the first.

        Raises:
            MeshError: the collective or the axis does not exist.
        """
        candidates = self._lines.get((action, axis, inner))
        if candidates is None:
            check_collective(action)
            self._check_axis(axis)
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
        # Other collectives have the same price for all dims.
        name = action + INNER * (inner and action in {"all_gather", "reduce_scatter"})
        found = lines(name, num_ranks, self._spans[axis], self.topology.levels)
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
