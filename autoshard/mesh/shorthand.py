"""A mesh from its shape and a word or two about the links."""

from collections.abc import Sequence
from math import prod

from autoshard.errors import MeshError
from autoshard.mesh.mesh import Axis, Mesh
from autoshard.mesh.presets import (
    DEFAULT_CPU_TOPOLOGY,
    DEFAULT_TOPOLOGY,
    GLOO_OVERHEAD,
    NCCL_OVERHEAD,
    NETWORK_LATENCY,
    NVLINK_LATENCY,
    TCP_LATENCY,
    get_topology,
)
from autoshard.mesh.topology import Link, Topology, check_backend

_LATENCIES = {"nccl": (NVLINK_LATENCY, NETWORK_LATENCY), "gloo": (TCP_LATENCY, TCP_LATENCY)}
_OVERHEADS = {"nccl": NCCL_OVERHEAD, "gloo": GLOO_OVERHEAD}
_DEFAULTS = {"nccl": DEFAULT_TOPOLOGY, "gloo": DEFAULT_CPU_TOPOLOGY}


def make_mesh(
    shape: Sequence[int],
    *,
    axes: Sequence[str] | None = None,
    topology: str | Topology | None = None,
    intra_bandwidth: float | None = None,
    inter_bandwidth: float | None = None,
    intra_latency: float | None = None,
    inter_latency: float | None = None,
    backend: str | None = None,
) -> Mesh:
    """A mesh over a known topology, or over the two-level cluster that two bandwidths describe.

    With bandwidths, the last axis is one node and the earlier axes lie between nodes; the
    devices are those of the backend's default topology. With a topology, or with neither,
    nodes have the topology's size and an axis may lie on several levels.

    Args:
        shape: size of each axis, outermost first.
        axes: name of each axis; by default ("tp",), ("dp", "tp"), ("dp0", "dp1", "tp") and
            so on. Names are labels and steer nothing.
        topology: a preset's name, or a topology.
        intra_bandwidth: bytes per second per device and direction inside a node.
        inter_bandwidth: likewise between nodes; needed where an earlier axis is larger than 1.
        intra_latency: seconds per step inside a node; by default the backend's usual figure.
        inter_latency: likewise between nodes.
        backend: "nccl" or "gloo"; by default the topology's, and "nccl" without one. Without
            a topology it picks h100-sxm or cpu-100gbe.

    Raises:
        MeshError: the arguments contradict each other, or one of them is impossible.
    """
    if backend is not None:
        check_backend(backend)
    link_options = {
        "intra_bandwidth": intra_bandwidth,
        "inter_bandwidth": inter_bandwidth,
        "intra_latency": intra_latency,
        "inter_latency": inter_latency,
    }
    given = {name: value for name, value in link_options.items() if value is not None}
    mesh_axes = _axes(shape, axes)
    if not given:
        return Mesh(mesh_axes, _known(topology, backend))
    if topology is not None:
        raise MeshError(
            f"both a topology and {', '.join(given)} are given; a topology has its own links, "
            "so leave one of the two out"
        )
    return Mesh(mesh_axes, _two_level(shape, given, backend or "nccl"))


def _axes(shape: Sequence[int], names: Sequence[str] | None) -> tuple[Axis, ...]:
    if not shape:
        raise MeshError("the shape of the mesh is empty; one device is the shape (1,)")
    if names is None:
        outer = len(shape) - 1
        names = ["dp", "tp"] if outer == 1 else [*(f"dp{i}" for i in range(outer)), "tp"]
    if len(names) != len(shape):
        raise MeshError(f"{len(names)} axis names are given for {len(shape)} axes")
    return tuple(Axis(name, size) for name, size in zip(names, shape, strict=True))


def _known(topology: str | Topology | None, backend: str | None) -> Topology:
    if topology is None:
        return get_topology(_DEFAULTS[backend or "nccl"])
    found = get_topology(topology) if isinstance(topology, str) else topology
    if backend not in (None, found.backend):
        raise MeshError(
            f"backend {backend!r} contradicts topology {found.name!r}, whose links are described "
            f"for {found.backend!r}; leave one of the two out"
        )
    return found


def _two_level(shape: Sequence[int], given: dict[str, float], backend: str) -> Topology:
    if "intra_bandwidth" not in given:
        raise MeshError(f"{', '.join(given)} given without intra_bandwidth; give it too")
    num_nodes = prod(shape[:-1])
    if "inter_bandwidth" not in given and num_nodes > 1:
        raise MeshError(
            f"the mesh {tuple(shape)} has {num_nodes} nodes (all axes but the last lie between "
            "nodes), but inter_bandwidth is not given; give it too"
        )
    intra_latency, inter_latency = _LATENCIES[backend]
    links = [
        Link(
            "intra",
            shape[-1],
            given["intra_bandwidth"],
            given.get("intra_latency", intra_latency),
        )
    ]
    if "inter_bandwidth" in given:
        latency = given.get("inter_latency", inter_latency)
        links.append(Link("inter", None, given["inter_bandwidth"], latency))
    return Topology(
        name="custom",
        device=get_topology(_DEFAULTS[backend]).device,
        levels=tuple(links),
        backend=backend,
        collective_overhead=_OVERHEADS[backend],
        source="bandwidths given by the user",
    )
