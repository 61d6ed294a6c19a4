"""Meshes on which even small models are worth cutting."""

from dataclasses import replace

from autoshard.mesh import COLLECTIVES, Axis, Device, Link, Mesh, Rate, Topology, make_mesh

SLOW = Device("slow", {"float32": 1e7}, memory_bandwidth=1e8, memory=1 << 34)
"""So slow that links are nearly free beside it."""


def slow_devices(latency: float = 1e-6, **axes: int) -> Mesh:
    """Slow devices on links with a latency; a latency of 1e-3 makes a plan communicate little."""
    links = (Link("fast", None, bandwidth=1e9, latency=latency),)
    topology = Topology("slow devices", SLOW, links, backend="gloo")
    return Mesh(tuple(Axis(name, size) for name, size in axes.items()), topology)


def mase_mesh() -> Mesh:
    """The mesh of MASE's own auto-sharding tests: 2x4, 100e9 and 10e9 bytes per second."""
    return make_mesh((2, 4), intra_bandwidth=100e9, inter_bandwidth=10e9)


def slow_mase_mesh() -> Mesh:
    """The same links between slow devices."""
    mesh = mase_mesh()
    return replace(mesh, topology=replace(mesh.topology, device=SLOW, collective_overhead=0.0))


def roofline_mesh() -> Mesh:
    """Four H100s, priced by their peak and bandwidth alone."""
    mesh = make_mesh((4,))
    device = replace(mesh.topology.device, kernels=None)
    return replace(mesh, topology=replace(mesh.topology, device=device))


def one_rate_mesh(*shape: int) -> Mesh:
    """Nodes of 8 H100s whose links have one rate for all collectives, as if measured."""
    mesh = make_mesh(shape)
    links = (
        Link("inside", 8, 450e9, 0.6e-6, dict.fromkeys(COLLECTIVES, Rate(450e9, 0.6e-6))),
        Link("between", None, 50e9, 2.7e-6, dict.fromkeys(COLLECTIVES, Rate(50e9, 2.7e-6))),
    )
    return replace(mesh, topology=replace(mesh.topology, levels=links, collective_overhead=6.6e-6))
