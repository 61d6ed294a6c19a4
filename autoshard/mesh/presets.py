"""Preset topologies, with published figures and their sources.

Peaks are dense: no structured sparsity. float32 is the rate without TF32, which PyTorch
disables by default. NVLink, PCIe and network figures are per device and per direction.

Rates of collectives on GPUs are those of `nccl`. The others are round estimates: 3 us for a
kernel launch, and for gloo 25 us per TCP message and 50 us per collective.

Sources of the rates of kernels are listed in `autoshard.mesh.kernel_presets`.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from types import MappingProxyType

from autoshard.base.arguments import check_arguments
from autoshard.errors import MeshError
from autoshard.mesh.kernel_presets import (
    AMPERE,
    B200,
    B300,
    CDNA3,
    GB200,
    GB300,
    HOPPER,
    clock_at,
)
from autoshard.mesh.nccl import (
    NVLS_BLACKWELL,
    NVLS_HOPPER,
    Figures,
    infinity_fabric,
    network,
    nvlink,
    pcie,
)
from autoshard.mesh.topology import Device, KernelRates, Link, Topology

DEFAULT_TOPOLOGY = "h100-sxm"
"""Default topology of a mesh."""

DEFAULT_CPU_TOPOLOGY = "cpu-100gbe"
"""Default topology of a mesh for the gloo backend."""

GLOO_OVERHEAD = 50e-6
TCP_LATENCY = 25e-6
_KERNEL_LAUNCH = 3e-6

# 16 GT/s on 16 lanes, 128b/130b coded: PCI Express base specification 4.0.
_PCIE_4_X16 = 31.5e9

_A100_PEAKS = {"float64": 19.5e12, "float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}
_HOPPER_PEAKS = {
    "float64": 66.9e12,
    "float32": 66.9e12,
    "float16": 989.4e12,
    "bfloat16": 989.4e12,
    "float8_e4m3fn": 1978.9e12,
    "float8_e5m2": 1978.9e12,
}
_CDNA3_PEAKS = {
    "float64": 81.7e12,
    "float32": 163.4e12,
    "float16": 1307.4e12,
    "bfloat16": 1307.4e12,
    "float8_e4m3fn": 2614.9e12,
    "float8_e5m2": 2614.9e12,
}
_BLACKWELL_PEAKS = {"float64": 40e12, "float32": 80e12}


def _blackwell_peaks(half: float) -> dict[str, float]:
    return {
        **_BLACKWELL_PEAKS,
        "float16": half,
        "bfloat16": half,
        "float8_e4m3fn": 2 * half,
        "float8_e5m2": 2 * half,
    }


def _gpu(
    name: str,
    peaks: dict[str, float],
    bandwidth: float,
    memory: float,
    kernels: KernelRates | None = None,
) -> Device:
    return Device(
        name=name,
        peak_flops=peaks,
        memory_bandwidth=bandwidth,
        memory=int(memory),
        launch_overhead=_KERNEL_LAUNCH,
        kernels=kernels,
    )


def _sxm(
    name: str,
    device: Device,
    size: int,
    *,
    bandwidths: tuple[float, float],
    nvls: Figures | None,
    source: str,
) -> Topology:
    inside, between = bandwidths
    links = (nvlink("NVLink", size, inside, nvls), network("network", between))
    return Topology(name, device, links, source=source)


def _pcie(name: str, device: Device, size: int, *, between: float, source: str) -> Topology:
    links = (pcie("PCIe", size, _PCIE_4_X16), network("network", between))
    return Topology(name, device, links, source=source)


# 56 cores at the base clock of 2.0 GHz. AVX-512: 2 fused multiply-adds of 16 float32 (8
# float64) per cycle; AMX: 1024 bfloat16 operations per cycle. 8 channels of DDR5-4800.
_XEON = Device(
    name="Intel Xeon Platinum 8480+ host",
    peak_flops={"float64": 3.584e12, "float32": 7.168e12, "bfloat16": 114.7e12},
    memory_bandwidth=307.2e9,
    memory=512_000_000_000,
    launch_overhead=_KERNEL_LAUNCH,
)


def _cpu(name: str, ethernet: float, source: str) -> Topology:
    return Topology(
        name=name,
        device=_XEON,
        levels=(Link("Ethernet", None, ethernet, TCP_LATENCY),),
        backend="gloo",
        collective_overhead=GLOO_OVERHEAD,
        source=f"{source}; Intel ARK, Xeon Platinum 8480+, with 8 x 64 GB DDR5-4800",
    )


_GENERATIONS = {
    **dict.fromkeys(("a100-sxm-40gb", "a100-sxm-80gb"), "Ampere"),
    **dict.fromkeys(("h100-sxm", "h200-sxm"), "Hopper"),
    **dict.fromkeys(("b200-sxm", "b300-sxm", "gb200-nvl72", "gb300-nvl72"), "Blackwell"),
}
"""GPU generations of presets with NVLink."""

_SPACES = re.compile(r"[\s_-]+")
_MIN_LIKENESS = 0.75
"""Minimum likeness of a word to one of a preset that is suggested."""

_PREFERRED = {"a100": "a100-sxm-80gb"}
"""The presets of short names that several presets have."""

_TOPOLOGIES = MappingProxyType(
    {
        topology.name: topology
        for topology in (
            _sxm(
                "a100-sxm-40gb",
                _gpu("NVIDIA A100 SXM 40GB", _A100_PEAKS, 1.555e12, 40e9, AMPERE),
                8,
                bandwidths=(300e9, 25e9),
                nvls=None,
                source="NVIDIA A100 datasheet; DGX A100: 8 x 200 Gb/s HDR for 8 GPUs",
            ),
            _sxm(
                "a100-sxm-80gb",
                _gpu("NVIDIA A100 SXM 80GB", _A100_PEAKS, 2.039e12, 80e9, AMPERE),
                8,
                bandwidths=(300e9, 25e9),
                nvls=None,
                source="NVIDIA A100 datasheet; DGX A100: 8 x 200 Gb/s HDR for 8 GPUs",
            ),
            _sxm(
                "h100-sxm",
                _gpu("NVIDIA H100 SXM", _HOPPER_PEAKS, 3.35e12, 80e9, HOPPER),
                8,
                bandwidths=(450e9, 50e9),
                nvls=NVLS_HOPPER,
                source="NVIDIA H100 datasheet and Hopper architecture white paper; "
                "DGX H100: 8 x 400 Gb/s ConnectX-7 for 8 GPUs",
            ),
            _sxm(
                "h200-sxm",
                _gpu("NVIDIA H200 SXM", _HOPPER_PEAKS, 4.8e12, 141e9, HOPPER),
                8,
                bandwidths=(450e9, 50e9),
                nvls=NVLS_HOPPER,
                source="NVIDIA H200 datasheet; DGX H200: 8 x 400 Gb/s ConnectX-7 for 8 GPUs",
            ),
            _sxm(
                "b200-sxm",
                _gpu("NVIDIA B200 SXM", _blackwell_peaks(2250e12), 8e12, 180e9, B200),
                8,
                bandwidths=(900e9, 50e9),
                nvls=NVLS_BLACKWELL,
                source="NVIDIA Blackwell architecture technical brief (HGX B200); DGX B200 "
                "datasheet: 1440 GB and 64 TB/s for 8 GPUs, 8 x 400 Gb/s ConnectX-7",
            ),
            _sxm(
                "b300-sxm",
                _gpu("NVIDIA B300 SXM", _blackwell_peaks(2250e12), 8e12, 288e9, B300),
                8,
                bandwidths=(900e9, 100e9),
                nvls=NVLS_BLACKWELL,
                source="NVIDIA HGX B300 datasheet: 2.3 TB and 64 TB/s HBM3e for 8 GPUs; DGX B300: "
                "8 x 800 Gb/s ConnectX-8 for 8 GPUs",
            ),
            _sxm(
                "gb200-nvl72",
                _gpu("NVIDIA GB200", _blackwell_peaks(2500e12), 8e12, 186e9, GB200),
                72,
                bandwidths=(900e9, 50e9),
                nvls=NVLS_BLACKWELL,
                source="NVIDIA GB200 NVL72 datasheet, each figure by 72: 13.4 TB and 576 TB/s "
                "HBM3e, 180 PFLOP/s dense bfloat16; 400 Gb/s ConnectX-7 per GPU",
            ),
            _sxm(
                "gb300-nvl72",
                _gpu("NVIDIA GB300", _blackwell_peaks(2500e12), 8e12, 279e9, GB300),
                72,
                bandwidths=(900e9, 100e9),
                nvls=NVLS_BLACKWELL,
                source="NVIDIA GB300 NVL72 datasheet, each figure by 72: 20.1 TB and 576 TB/s "
                "HBM3e, 180 PFLOP/s dense bfloat16; 800 Gb/s ConnectX-8 per GPU",
            ),
            _pcie(
                "a100-pcie-80gb",
                _gpu(
                    "NVIDIA A100 PCIe 80GB",
                    _A100_PEAKS,
                    1.935e12,
                    80e9,
                    replace(AMPERE, power=300.0, clock=clock_at(300.0, AMPERE.power)),
                ),
                4,
                between=2.5e9,
                source="NVIDIA A100 datasheet; Azure NC96ads A100 v4: 4 GPUs, 80 Gb/s per "
                "machine (its NVLink bridges between pairs are not counted)",
            ),
            _pcie(
                "l40s-pcie",
                _gpu(
                    "NVIDIA L40S",
                    {
                        "float64": 1.43e12,
                        "float32": 91.6e12,
                        "float16": 362.05e12,
                        "bfloat16": 362.05e12,
                        "float8_e4m3fn": 733e12,
                        "float8_e5m2": 733e12,
                    },
                    864e9,
                    48e9,
                ),
                8,
                between=6.25e9,
                source="NVIDIA L40S datasheet; AWS g6e.48xlarge: 8 GPUs, 400 Gb/s per machine",
            ),
            Topology(
                "mi300x-oam",
                _gpu("AMD Instinct MI300X", _CDNA3_PEAKS, 5.3e12, 192e9, CDNA3),
                (infinity_fabric("Infinity Fabric", 8, 7 * 64e9), network("network", 50e9)),
                source="AMD Instinct MI300X data sheet: 7 links of 64 GB/s to the other GPUs of a "
                "node; Azure ND MI300X v5: 8 x 400 Gb/s InfiniBand for 8 GPUs",
            ),
            _cpu("cpu-10gbe", 1.25e9, "IEEE 802.3ae, 10 Gb/s per host"),
            _cpu("cpu-100gbe", 12.5e9, "IEEE 802.3ba, 100 Gb/s per host"),
        )
    }
)


def list_topologies() -> tuple[str, ...]:
    """Names of all preset topologies, sorted."""
    return tuple(sorted(_TOPOLOGIES))


@check_arguments
def get_topology(name: str) -> Topology:
    """Return a preset topology by name.

    Case does not matter, and words may be left out where only one preset has the others: `H100`
    is `h100-sxm`; `a100` is `a100-sxm-80gb`. For a mesh whose nodes have fewer devices than
    those of the preset, see `nodes` of `make_mesh`.

    Raises:
        MeshError: the name is unknown, or several presets have its words; the message names
            presets like it.
    """
    found = _TOPOLOGIES.get(name)
    if found is not None:
        return found
    lower = name.strip().lower()
    if lower in _PREFERRED:
        return _TOPOLOGIES[_PREFERRED[lower]]
    words = set(_SPACES.split(lower))
    matches = [known for known in list_topologies() if words <= set(known.split("-"))]
    if len(matches) == 1:
        return _TOPOLOGIES[matches[0]]
    if matches:
        raise MeshError(f"topology {name!r} could be {_either(matches)}; give the whole name")
    likeness = {
        known: max(
            SequenceMatcher(None, word, part).ratio() for word in words for part in known.split("-")
        )
        for known in list_topologies()
    }
    most = max(likeness.values())
    near = [known for known, found in likeness.items() if found == most >= _MIN_LIKENESS]
    if near:
        raise MeshError(f"topology {name!r} is unknown; did you mean {_either(near)}?")
    raise MeshError(f"topology {name!r} is unknown; choose one of {', '.join(list_topologies())}")


def generation_of(topology: Topology) -> str | None:
    """GPU generation of the hardware of a mesh, such as Hopper.

    None for other hardware, for PCIe, and if device or links have other figures than those of a
    preset; only the number of devices of a node may differ.
    """
    for name, generation in _GENERATIONS.items():
        preset = _TOPOLOGIES[name]
        if topology.device == preset.device and _has_links(topology, preset):
            return generation
    return None


def _has_links(topology: Topology, preset: Topology) -> bool:
    """True if all links of a topology are those of the preset, of groups of any size."""
    known = [replace(link, size=None) for link in preset.levels]
    return all(replace(link, size=None) in known for link in topology.levels)


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
