"""Links between GPUs, with the rates of NCCL's algorithms over them.

The figures are those of NCCL's own model (src/graph/tuning.cc, 2.27: base latencies, latencies by
hop, and bandwidths by protocol), with the latencies of the network taken from trees, which NCCL
uses for rings of one rank a node. Bandwidths are relative to the link's. These were changed to
agree with measurements:

* nccl-tests on 8 H100 (NVIDIA/dgxc-benchmarking, nccl/README.md) and all-reduces on 8 H200 and
  B200 (stas00/ml-engineering, network/README.md): the bandwidth of rings in Simple (355 of
  450 GB/s) and of NVLS, the overhead of NVLS, and the bandwidth of trees in LL;
* the tables that meta-pytorch/autoparallel (autoparallel/cost_models/nccl_cost_model.py) took from
  NCCL 2.27.5 and fitted to nccl-tests on up to 32 nodes of 8 H100: rings in LL and LL128 in a node,
  which many nodes share the flags of; NVLS over nodes, which reaches its bandwidth late; trees over
  nodes; and all-to-all, which NCCL's model does not have;
* NDR adapters of 400 Gb/s transfer 46 to 48 GB/s (NVIDIA/nccl-tests, issue 290).

Blackwell has the share of NVLS that NCCL's model gives it relative to Hopper (0.74 / 0.85); its
other figures, and those of Ampere, are shares of the faster or slower link.
"""

from collections.abc import Mapping
from typing import TypeAlias

from autoshard.mesh.topology import Link, Rate, check_positive

Figures: TypeAlias = tuple[float, float, float]
"""Overhead and latency in microseconds, and share of a link's bandwidth."""

NVLS_HOPPER: Figures = (20.0, 22.0, 0.68)
NVLS_BLACKWELL: Figures = (20.0, 22.0, 0.59)

_NVLINK: Mapping[str, Figures] = {
    "ring LL": (6.6, 1.2, 0.31),
    "ring LL128": (14.0, 1.9, 0.45),
    "ring Simple": (8.4, 3.4, 0.79),
    "tree LL": (6.8, 0.6, 0.35),
    "tree LL128": (14.0, 1.25, 0.45),
    "tree Simple": (8.4, 4.0, 0.54),
    "all_to_all": (46.0, 0.5, 0.74),
    "send": (8.4, 3.4, 0.74),
}

_PCIE: Mapping[str, Figures] = {
    "ring LL": (6.6, 1.0, 0.4),
    "ring LL128": (14.0, 2.5, 0.74),
    "ring Simple": (8.4, 5.7, 0.8),
    "tree LL": (6.8, 1.0, 0.2),
    "tree Simple": (8.4, 4.0, 0.6),
    "all_to_all": (46.0, 1.0, 0.74),
    "send": (8.4, 5.7, 0.8),
}

_NETWORK: Mapping[str, Figures] = {
    "ring LL": (6.6, 5.0, 0.27),
    "ring LL128": (14.0, 8.5, 0.88),
    "ring Simple": (8.4, 14.0, 0.94),
    "tree LL": (6.8, 6.0, 0.1),
    "tree LL128": (14.0, 8.0, 0.5),
    "tree Simple": (8.4, 14.0, 0.75),
    "NVLS": (25.0, 30.0, 0.85),
    "all_to_all": (29.0, 6.0, 0.86),
    "send": (8.4, 14.0, 0.94),
}


def _link(name: str, size: int | None, bandwidth: float, figures: Mapping[str, Figures]) -> Link:
    check_positive(bandwidth, f"bandwidth of link {name!r}")
    algorithms = {
        algorithm: Rate(share * bandwidth, latency * 1e-6, overhead=overhead * 1e-6)
        for algorithm, (overhead, latency, share) in figures.items()
    }
    simple = algorithms["ring Simple"]
    return Link(name, size, bandwidth, simple.latency, algorithms=algorithms)


def nvlink(name: str, size: int | None, bandwidth: float, nvls: Figures | None) -> Link:
    """NVLink between the devices of a node.

    Args:
        name: display name.
        size: devices of a node.
        bandwidth: bytes per second per device and direction.
        nvls: figures of NVLS; None without a switch that sums and multicasts (before NVLink 4).
    """
    return _link(name, size, bandwidth, _NVLINK if nvls is None else {**_NVLINK, "NVLS": nvls})


def pcie(name: str, size: int | None, bandwidth: float) -> Link:
    """PCI Express between the devices of a node; parameters as of `nvlink`."""
    return _link(name, size, bandwidth, _PCIE)


def infinity_fabric(name: str, size: int | None, bandwidth: float) -> Link:
    """AMD Infinity Fabric between the devices of a node, all of them linked to each other.

    RCCL has rings as NCCL does; their rate is 75 % of that of the links (ROCm blogs, "Understanding
    RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X"). Their latencies were not measured:
    they are those of NVLink. A group of a part of a node uses a part of the links of a device,
    which is not modelled: it has the bandwidth of all of them.

    Args:
        name: display name.
        size: devices of a node.
        bandwidth: bytes per second per device and direction, over all of its links.
    """
    overhead, latency, _ = _NVLINK["ring Simple"]
    return _link(name, size, bandwidth, {**_NVLINK, "ring Simple": (overhead, latency, 0.75)})


def network(name: str, bandwidth: float) -> Link:
    """InfiniBand or RoCE between nodes, with the devices' share of the adapters of a node."""
    return _link(name, None, bandwidth, _NETWORK)
