"""Topologies of published runs: preset, power limit, GPUs of a node and network, as stated."""

import re
from collections.abc import Mapping
from dataclasses import replace

from autoshard.mesh import Topology, get_topology
from autoshard.mesh.kernel_presets import clock_at
from autoshard.mesh.nccl import network
from benchmarks.published.rows import Row

TOPOLOGIES: Mapping[str, str] = {
    "A100-40GB": "a100-sxm-40gb",
    "A100-80GB": "a100-sxm-80gb",
    "H100-80GB": "h100-sxm",
    "H100-96GB": "h100-sxm",
    "H200": "h200-sxm",
    "B200": "b200-sxm",
    "GB200": "gb200-nvl72",
    "B300": "b300-sxm",
    "GB300": "gb300-nvl72",
}
"""Presets by the first part of the column `gpu_type`."""

_HBM2E = 2.4e12
"""Bytes per second of the memory of the H100 with 96 GB, which is HBM2e."""
_RACK, RACK_PART = 72, 64
"""GPUs of an NVL72 rack, and how many of them a job of several racks uses."""


def preset_of(row: Row) -> str | None:
    """Name of the preset for the GPUs of a row; None if there is none."""
    return next((p for gpu, p in TOPOLOGIES.items() if row["gpu_type"].startswith(gpu)), None)


def _node_size(row: Row) -> int:
    """GPUs that NVLink connects."""
    if row["gpu_type"].startswith("GB"):
        return RACK_PART
    return row.number("gpus_per_node") or 1


def topology_of(row: Row) -> Topology | None:
    """The topology of a row; None if there is no preset for its GPUs."""
    preset = preset_of(row)
    if preset is None:
        return None
    topology = get_topology(preset)
    device = topology.device
    if row["gpu_type"].startswith("H100-96GB"):
        device = replace(device, memory_bandwidth=_HBM2E)
    watts, rates = re.search(r"\b(\d{3,4}) ?W\b", row["gpu_type"]), device.kernels
    if watts and rates is not None:
        clock = rates.clock * clock_at(float(watts[1]), rates.power)
        device = replace(device, kernels=replace(rates, clock=clock))
    inner, *outer = topology.levels
    gpus = row.number("gpus") or 1
    is_rack = inner.size == _RACK
    size = inner.size if is_rack and gpus <= _RACK else _node_size(row)
    if gpus >= size:
        inner = replace(inner, size=size)
    rate = _network(row)
    if rate is not None:
        outer = [network(outer[0].name, rate), *outer[1:]]
    return replace(topology, device=device, levels=(inner, *outer))


def _network(row: Row) -> float | None:
    """Bytes per second of a GPU's share of the network of a node; None if it is not stated."""
    text, per_node = row["interconnect"], row.number("gpus_per_node") or 1
    found = re.search(r"(\d+) ?Gbps/node", text)
    return float(found[1]) * 1e9 / 8 / per_node if found else None
