"""Construction of meshes from shapes, topologies, nodes and bandwidths."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import SupportsIndex

from autoshard.base.arguments import check_arguments
from autoshard.base.quantities import MIN_PLAUSIBLE_RATE, format_rate
from autoshard.errors import MeshError
from autoshard.mesh.mesh import Axis, Mesh, check_num_devices
from autoshard.mesh.nccl import NVLS_HOPPER, network, nvlink
from autoshard.mesh.nodes import node_size, set_node_size
from autoshard.mesh.presets import (
    DEFAULT_CPU_TOPOLOGY,
    DEFAULT_TOPOLOGY,
    GLOO_OVERHEAD,
    TCP_LATENCY,
    get_topology,
)
from autoshard.mesh.shapes import (
    check_axis_names,
    check_num_axes,
    default_axis_names,
    parse_shape,
)
from autoshard.mesh.topology import Link, Topology, check_backend, read_rate

_MAX_LATENCY = 1.0
"""A longer latency, seconds, was probably meant in another unit."""

_OVERHEADS = {"nccl": 0.0, "gloo": GLOO_OVERHEAD}
_DEFAULTS = {"nccl": DEFAULT_TOPOLOGY, "gloo": DEFAULT_CPU_TOPOLOGY}


@check_arguments
def make_mesh(
    shape: str | Sequence[int],
    *,
    axes: Sequence[str] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    intra_bandwidth: str | float | None = None,
    inter_bandwidth: str | float | None = None,
    intra_latency: float | None = None,
    inter_latency: float | None = None,
    backend: str | None = None,
) -> Mesh:
    """Return a mesh over a topology, or over a two-level cluster given by bandwidths.

    The levels of links are those of the topology, and an axis may span several levels. Devices are
    numbered node by node, and the last axis varies fastest.

    Args:
        shape: size of each axis, outermost first: `(2, 4)`, `"2x4"`, `"2,4"`, or with names,
            `"dp=2,tp=4"`.
        axes: name of each axis; by default axis0, axis1 and so on. Names have no effect on costs;
            an outermost axis `pp` is for pipelines.
        mesh_dim_names: the same as `axes`, under the name that `init_device_mesh` uses.
        topology: name of a preset, or a topology.
        nodes: number of nodes. By default the nodes are those of the topology: h100-sxm has 8
            devices a node. With bandwidths, the last axis is within a node by default and the
            other axes are between nodes.
        gpus_per_node: number of devices of a node, instead of `nodes`.
        intra_bandwidth: bytes per second per device and direction within a node, such as
            `"450GB/s"`. The device type is then that of the backend's default topology.
        inter_bandwidth: bytes per second per device and direction between nodes; required with
            `intra_bandwidth` if the mesh has more than one node.
        intra_latency: seconds per step within a node, of all algorithms. By default each algorithm
            and protocol of NCCL has its own, as in h100-sxm; gloo has that of TCP.
        inter_latency: seconds per step between nodes; by default as for intra_latency.
        backend: "nccl" or "gloo"; by default that of the topology, or "nccl". Without a topology,
            it selects h100-sxm or cpu-100gbe.

    Raises:
        MeshError: an argument is invalid, or arguments contradict each other.

    Example:
        >>> make_mesh("2x4", topology="h100-sxm", nodes=2).description
        '2 nodes x 4 NVIDIA H100 SXM (NVLink 450 GB/s; 50 GB/s a device between nodes)'
    """
    if backend is not None:
        check_backend(backend)
    mesh_axes = _axes(shape, _one_of(axes, mesh_dim_names))
    num_devices = prod(axis.size for axis in mesh_axes)
    check_num_devices([num_devices])
    links = {
        "intra_bandwidth": _rate("intra_bandwidth", intra_bandwidth),
        "inter_bandwidth": _rate("inter_bandwidth", inter_bandwidth),
        "intra_latency": _latency("intra_latency", intra_latency),
        "inter_latency": _latency("inter_latency", inter_latency),
    }
    given = {name: value for name, value in links.items() if value is not None}
    if not given:
        return Mesh(
            mesh_axes, resolve_topology(topology, num_devices, nodes, gpus_per_node, backend)
        )
    if topology is not None:
        raise MeshError(
            f"both a topology and {', '.join(given)} are given; a topology has its own links, "
            "so leave one of the two out"
        )
    size = node_size(num_devices, nodes, gpus_per_node) or mesh_axes[-1].size
    return Mesh(mesh_axes, _two_level(size, num_devices // size, given, backend or "nccl"))


def resolve_topology(
    topology: str | Topology | None,
    num_devices: int,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    backend: str | None = None,
) -> Topology:
    """Return the topology of a mesh of a number of devices, with nodes of the given size.

    Args:
        topology: as in `make_mesh`.
        num_devices: number of devices of the mesh.
        nodes: as in `make_mesh`.
        gpus_per_node: as in `make_mesh`.
        backend: as in `make_mesh`.

    Raises:
        MeshError: the topology is unknown, or the devices cannot be divided among its nodes so.
    """
    known = _known(topology, backend)
    size = node_size(num_devices, nodes, gpus_per_node, most=known.devices_per_node)
    return known if size is None else set_node_size(known, num_devices, size)


def _axes(shape: str | Sequence[int], names: Sequence[str] | None) -> tuple[Axis, ...]:
    if isinstance(shape, str):
        shape, found = parse_shape(shape)
        if names is not None and found is not None:
            raise MeshError(f"the axes are named twice: {found} in the shape, and {tuple(names)}")
        names = found if names is None else names
    if not shape:
        raise MeshError("the shape of the mesh is empty; for one device, use (1,)")
    check_num_axes(len(shape))
    for size in shape:
        if not isinstance(size, SupportsIndex):
            raise MeshError(f"the size of an axis is {size!r}; give whole numbers, such as (2, 4)")
    names = default_axis_names(len(shape)) if names is None else names
    check_axis_names(names, shape)
    return tuple(Axis(name, size) for name, size in zip(names, shape, strict=True))


def _one_of(
    axes: Sequence[str] | None, mesh_dim_names: Sequence[str] | None
) -> Sequence[str] | None:
    if axes is not None and mesh_dim_names is not None:
        raise MeshError("axes and mesh_dim_names mean the same; give one of them")
    return mesh_dim_names if axes is None else axes


def _rate(name: str, value: str | float | None) -> float | None:
    """A bandwidth, bytes per second.

    Raises:
        MeshError: it cannot be read, or it is slower than any link, as a number without its unit.
    """
    if value is None:
        return None
    rate = read_rate(value, name)
    if rate < MIN_PLAUSIBLE_RATE:
        raise MeshError(
            f"{name} {value} is {format_rate(rate)}, slower than any link of a mesh; give a number "
            "with its unit, such as 450GB/s"
        )
    return rate


def _latency(name: str, value: float | None) -> float | None:
    if value is not None and value > _MAX_LATENCY:
        raise MeshError(f"{name} is {value:g} s a step; it is in seconds, such as 5e-6")
    return value


def _known(topology: str | Topology | None, backend: str | None) -> Topology:
    if topology is None:
        return replace(get_topology(_DEFAULTS[backend or "nccl"]), assumed="topology")
    found = get_topology(topology) if isinstance(topology, str) else topology
    if backend not in (None, found.backend):
        raise MeshError(
            f"backend {backend!r} contradicts topology {found.name!r}, whose links are described "
            f"for {found.backend!r}; leave one of the two out"
        )
    return found


def _two_level(size: int, num_nodes: int, given: Mapping[str, float], backend: str) -> Topology:
    if "intra_bandwidth" not in given:
        raise MeshError(f"{', '.join(given)} given without intra_bandwidth, which is required")
    if "inter_bandwidth" not in given and num_nodes > 1:
        raise MeshError(
            f"inter_bandwidth is required: the mesh has {num_nodes} nodes of {size} devices; if "
            "all devices are on one node, give nodes=1"
        )
    links = [_link("intra-node", size, "intra", given, backend)]
    if "inter_bandwidth" in given:
        links.append(_link("inter-node", None, "inter", given, backend))
    return Topology(
        name="custom",
        device=get_topology(_DEFAULTS[backend]).device,
        levels=tuple(links),
        backend=backend,
        collective_overhead=_OVERHEADS[backend],
        source="bandwidths given by the user",
        assumed="device",
    )


def _link(
    name: str, size: int | None, prefix: str, given: Mapping[str, float], backend: str
) -> Link:
    bandwidth, latency = given[f"{prefix}_bandwidth"], given.get(f"{prefix}_latency")
    if latency is not None or backend == "gloo":
        return Link(name, size, bandwidth, TCP_LATENCY if latency is None else latency)
    return network(name, bandwidth) if size is None else nvlink(name, size, bandwidth, NVLS_HOPPER)
