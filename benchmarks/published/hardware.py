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
    "A100": "a100-sxm-80gb",
    "H100": "h100-sxm",
    "H200": "h200-sxm",
    "B200": "b200-sxm",
    "GB200": "gb200-nvl72",
    "B300": "b300-sxm",
    "GB300": "gb300-nvl72",
}
"""Presets by GPU."""
_GPU = re.compile(r"\b(A100|H100|H200|G?B200|G?B300)\b")

_MIB = 1 << 20
_REPORTED: Mapping[str, int] = {
    "a100-sxm-40gb": 40_960 * _MIB,
    "a100-sxm-80gb": 81_920 * _MIB,
    "h100-sxm": 81_559 * _MIB,
    "h200-sxm": 143_771 * _MIB,
    "b200-sxm": 183_359 * _MIB,
    "gb200-nvl72": 189_471 * _MIB,
    "b300-sxm": 275_040 * _MIB,
    "gb300-nvl72": 284_208 * _MIB,
}
"""Bytes of memory that nvidia-smi reports, by preset; presets have the gigabytes of data sheets."""
_HBM2E = 2.4e12
"""Bytes per second of the memory of the H100 with 96 GB, which is HBM2e."""
_GIGABIT = 1e9 / 8
_OMNI_PATH = 100 * _GIGABIT
"""Bytes per second of a link of Omni-Path of its first generation."""
_RACK, _RACK_PART = 72, 64
"""GPUs of an NVL72 rack, and how many of them a job of several racks uses."""


def preset_of(row: Row) -> str | None:
    """Name of the preset for the GPUs of a row; None if there is none."""
    text = row["gpu_type"].upper()
    found = _GPU.search(text)
    if found is None or "PCI" in text or re.search(r"\bNVL\b", text):
        return None
    is_small = found[1] == "A100" and re.search(r"\b40 ?GB?\b", text)
    return TOPOLOGIES["A100-40GB" if is_small else found[1]]


def memory_of(row: Row) -> int | None:
    """Bytes of memory that nvidia-smi reports of a GPU of a row; None if there is no preset."""
    preset = preset_of(row)
    return None if preset is None else _REPORTED[preset]


def node_size(row: Row) -> int:
    """GPUs that NVLink connects, of a job that fills several nodes."""
    if "NVL72" in row["interconnect"] or re.search(r"\bGB\d", row["gpu_type"]):
        return _RACK_PART
    return row.number("gpus_per_node") or 1


def topology_of(row: Row) -> Topology | None:
    """The topology of a row; None if there is no preset for its GPUs."""
    preset = preset_of(row)
    if preset is None:
        return None
    topology = get_topology(preset)
    device = topology.device
    if preset == "h100-sxm" and re.search(r"\b96 ?GB\b", row["gpu_type"]):
        device = replace(device, memory_bandwidth=_HBM2E)
    watts, rates = re.search(r"\b(\d{3,4}) ?W\b", row["gpu_type"]), device.kernels
    if watts and rates is not None:
        clock = rates.clock * clock_at(float(watts[1]), rates.power)
        device = replace(device, kernels=replace(rates, clock=clock))
    inner, *outer = topology.levels
    gpus = row.number("gpus") or 1
    is_rack = inner.size == _RACK
    size = inner.size if is_rack and gpus <= _RACK else node_size(row)
    if gpus >= size:
        inner = replace(inner, size=size)
    rate = _network(row)
    if rate is not None:
        outer = [network(outer[0].name, rate), *outer[1:]]
    return replace(topology, device=device, levels=(inner, *outer))


def _network(row: Row) -> float | None:
    """Bytes per second of a GPU's share of the network of a node; None if it is not stated."""
    text, per_node = row["interconnect"], row.number("gpus_per_node") or 1
    adapters = re.search(r"\b(\d+) ?x ?(\d+) ?Gb(?:it|ps|/s| )", text)
    if adapters:
        return int(adapters[1]) * int(adapters[2]) * _GIGABIT / per_node
    links = re.search(r"\b(\d+) Omni-Path", text)
    if links:
        return int(links[1]) * _OMNI_PATH / per_node
    rate = re.search(r"\b(\d+) ?Gb(?:it)?(?:ps|/s) ?(?:/|per) ?(node|GPU)", text)
    if rate is None:
        return None
    return int(rate[1]) * _GIGABIT / (per_node if rate[2] == "node" else 1)
