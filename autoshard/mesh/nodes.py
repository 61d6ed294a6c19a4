"""Nodes of a topology: the devices that the innermost links connect; their number and size."""

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

from autoshard.base.quantities import format_rate
from autoshard.errors import MeshError
from autoshard.mesh.topology import Topology

_MAX_LISTED = 8
"""Maximum number of possibilities in a message."""

_MAX_TRIED = 1 << 12
"""Largest divisor that is tried: enough for every mesh that can be made."""


def node_size(
    num_devices: int, nodes: int | None, gpus_per_node: int | None, *, most: int | None = None
) -> int | None:
    """Number of devices of a node; None if neither nodes nor gpus_per_node is given.

    Args:
        num_devices: number of devices of the mesh.
        nodes: number of nodes of the mesh.
        gpus_per_node: number of devices of a node; must agree with `nodes`, if both are given.
        most: largest number of devices of a node, for messages.

    Raises:
        MeshError: the devices cannot be divided so; the message lists what is possible.
    """
    for name, value in (("nodes", nodes), ("gpus_per_node", gpus_per_node)):
        if value is not None and (value < 1 or num_devices % value):
            raise MeshError(
                f"{num_devices} devices cannot be divided evenly with {name} {value}; "
                f"{_possible(num_devices, most)}"
            )
    if nodes is not None and gpus_per_node is not None and nodes * gpus_per_node != num_devices:
        raise MeshError(
            f"{nodes} nodes of {gpus_per_node} devices have {nodes * gpus_per_node} devices, but "
            f"the mesh has {num_devices}; give one of nodes and gpus_per_node"
        )
    return gpus_per_node if nodes is None else num_devices // nodes


def set_node_size(topology: Topology, num_devices: int, size: int) -> Topology:
    """Return a topology whose nodes have the given number of devices, which may not be more.

    The bandwidths of a device within its node and between nodes stay the same. If several levels
    of links are between nodes, their groups keep their number of nodes.

    Raises:
        MeshError: the topology has no such nodes; the message lists what is possible.
    """
    largest = topology.devices_per_node
    if largest is None:
        raise MeshError(
            f"topology {topology.name!r} connects all devices by one kind of link, "
            f"{topology.levels[0].name!r}, so it has no nodes of several devices; leave out nodes "
            "and gpus_per_node, or choose a topology with links inside and between nodes"
        )
    if size > largest:
        raise MeshError(
            f"topology {topology.name!r} has {largest} devices a node, not {size}; "
            f"{_possible(num_devices, largest)}"
        )
    if size < num_devices and len(topology.levels) == 1:
        raise MeshError(
            f"topology {topology.name!r} has no links between nodes, so it has one node of "
            f"{num_devices} devices"
        )
    outer = (
        replace(link, size=None if link.size is None else link.size // largest * size)
        for link in topology.levels[1:]
    )
    return replace(topology, levels=(replace(topology.levels[0], size=size), *outer))


def describe_devices(topology: Topology, num_devices: int) -> str:
    """Describe devices, nodes and links in one line.

    For example "2 nodes x 4 NVIDIA H100 SXM (NVLink 450 GB/s; 50 GB/s a device between nodes)".
    """
    notes = "; ".join(_link_notes(topology, num_devices))
    text = f"{_counts(topology, num_devices)}{f' ({notes})' if notes else ''}"
    if topology.assumed == "topology":
        return f"{text}; assumed: {topology.name} (no topology given)"
    if topology.assumed == "device":
        return f"{text}; assumed: {topology.device.name} (only bandwidths given)"
    return text


def _possible(num_devices: int, most: int | None) -> str:
    sizes = sorted(_divisors(num_devices), reverse=True)
    pairs = [f"{num_devices // size} x {size}" for size in sizes if most is None or size <= most]
    return f"possible numbers of nodes x devices: {', '.join(pairs[:_MAX_LISTED])}"


def _divisors(number: int) -> set[int]:
    """The divisors of a number; only the smallest and largest of a number beyond any mesh."""
    small = [d for d in range(1, min(isqrt(number), _MAX_TRIED) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}


def _counts(topology: Topology, num_devices: int) -> str:
    device, size = topology.device.name, topology.devices_per_node
    if num_devices == 1 or size is None:
        return f"{num_devices} x {device}"
    size = min(size, num_devices)
    nodes = -(-num_devices // size)
    if num_devices % size:
        return f"{num_devices} x {device} on {nodes} nodes of at most {size}"
    return f"{nodes} {'node' if nodes == 1 else 'nodes'} x {size} {device}"


def _link_notes(topology: Topology, num_devices: int) -> Iterator[str]:
    """Bandwidths of the links that the devices use, innermost first."""
    if num_devices == 1:
        return
    inner, *outer = topology.levels
    used = [inner] if inner.size != 1 else []
    if inner.size is None or num_devices <= inner.size:
        yield f"{inner.name}, {format_rate(inner.bandwidth)} a device"
    else:
        if inner.size > 1:
            yield f"{inner.name} {format_rate(inner.bandwidth)}"
        groups = "nodes"
        for link in outer:
            used.append(link)
            yield f"{format_rate(link.bandwidth)} a device between {groups}"
            if link.size is None or num_devices <= link.size:
                break
            groups = f"groups of {link.size} devices"
    if any(link.collectives for link in used):
        yield "measured"
