from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from autoshard.errors import MeshError
from autoshard.mesh import (
    Axis,
    Device,
    Link,
    OperatorFit,
    RooflineFit,
    Topology,
    get_topology,
    list_topologies,
    make_mesh,
)
from autoshard.mesh.topology import MAX_DTYPES, MAX_SOURCE

DEVICE = Device("gpu", {"float32": 1e12, "bfloat16": 8e12}, memory_bandwidth=1e12, memory=10**9)
NODE = Link("nvlink", 8, 100e9, 1e-6)
NETWORK = Link("network", None, 10e9, 5e-6)
FITS = OperatorFit(RooflineFit(0.0, 1.0), RooflineFit(0.0, 1.0))


def test_an_unlisted_dtype_has_the_peak_of_float32() -> None:
    assert DEVICE.peak("bfloat16") == 8e12
    assert DEVICE.peak("int64") == 1e12


@pytest.mark.parametrize("value", [0, -1.0, nan, inf])
@pytest.mark.parametrize("field", ["memory_bandwidth", "memory"])
def test_an_impossible_device_is_refused(field: str, value: float) -> None:
    impossible: dict[str, Any] = {field: value}
    with pytest.raises(MeshError, match=rf"{field} of device 'gpu' is {value}"):
        replace(DEVICE, **impossible)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_flops": {"bfloat16": 1e12}}, "no peak_flops for float32"),
        ({"peak_flops": {"float32": nan}}, r"peak_flops\['float32'\] of device 'gpu' is nan"),
        ({"launch_overhead": -1e-6}, "launch_overhead of device 'gpu'"),
        ({"name": " gpu"}, "spaces"),
        ({"name": "gpu\x1b[2J"}, "device 'gpu.x1b.2J' must have a name without control"),
        ({"name": "g" * 256}, "must have a name of at most 255 characters"),
        ({"operators": {"": FITS}}, "operator of device 'gpu' '' must have a name"),
        ({"operators": {"o" * 256: FITS}}, "at most 255 characters"),
        ({"operators": {"aten.add\n": FITS}}, "without control characters"),
    ],
)
def test_an_impossible_device_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        replace(DEVICE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "link 'nvlink' has size 0"),
        ({"size": -8}, "size -8"),
        ({"bandwidth": 0.0}, "bandwidth of link 'nvlink' is 0.0"),
        ({"bandwidth": inf}, "bandwidth of link 'nvlink' is inf"),
        ({"bandwidth": nan}, "bandwidth of link 'nvlink' is nan"),
        ({"latency": -1.0}, "latency of link 'nvlink' is -1.0"),
        ({"name": ""}, "must have a name"),
    ],
)
def test_an_impossible_link_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        replace(NODE, **changes)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((), "no levels"),
        ((NETWORK, NODE), "only the outermost level may be unlimited"),
        ((NODE, replace(NETWORK, size=12)), "groups 12 devices, which is not a larger multiple"),
        ((NODE, replace(NETWORK, size=8)), "groups 8 devices, which is not a larger multiple"),
        ((NODE, replace(NETWORK, name="nvlink")), "link 'nvlink' is named twice"),
    ],
)
def test_levels_must_nest(levels: tuple[Link, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Topology("cluster", DEVICE, levels)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(MeshError, match="backend 'mpi' is unknown; choose one of nccl, gloo"):
        Topology("cluster", DEVICE, (NODE,), backend="mpi")


def test_a_topology_holds_what_its_outermost_level_holds() -> None:
    assert Topology("box", DEVICE, (NODE,)).max_devices == 8
    assert Topology("cluster", DEVICE, (NODE, NETWORK)).max_devices is None


def test_names_may_be_long() -> None:
    assert len(replace(DEVICE, name="g" * 255).name) == 255


@pytest.mark.parametrize("name", ["a\x00b", "a\nb", "n" * 256])
def test_a_name_is_short_and_printable(name: str) -> None:
    with pytest.raises(MeshError, match=r"topology .* must have a name"):
        Topology(name, DEVICE, (NODE,))
    with pytest.raises(MeshError, match=r"link .* must have a name"):
        replace(NODE, name=name)
    with pytest.raises(MeshError, match=r"axis .* must have a name"):
        Axis(name, 2)


@pytest.mark.parametrize("name", ["", "a\x00b", "n" * 256])
def test_a_dtype_has_a_name(name: str) -> None:
    with pytest.raises(MeshError, match=r"dtype of device '.*' .* must have a name"):
        replace(DEVICE, peak_flops={"float32": 1e12, name: 1e12})


def test_texts_and_tables_of_a_topology_have_limits() -> None:
    assert len(Topology("box", DEVICE, (NODE,), source="s" * MAX_SOURCE).source) == MAX_SOURCE
    with pytest.raises(
        MeshError, match=r"source of topology 'box' has 4,097 characters; the limit"
    ):
        Topology("box", DEVICE, (NODE,), source="s" * (MAX_SOURCE + 1))
    peaks = dict.fromkeys(("float32", *(f"float{i}x" for i in range(MAX_DTYPES))), 1e12)
    with pytest.raises(MeshError, match=f"peak_flops for {MAX_DTYPES + 1} dtypes"):
        replace(DEVICE, peak_flops=peaks)


@pytest.mark.parametrize("name", list_topologies())
def test_a_preset_is_consistent(name: str) -> None:
    topology = get_topology(name)
    device = topology.device
    assert topology.name == name
    assert topology.source
    assert topology.max_devices is None
    bandwidths = [link.bandwidth for link in topology.levels]
    assert bandwidths == sorted(bandwidths, reverse=True)
    latencies = [link.latency for link in topology.levels]
    assert latencies == sorted(latencies)
    assert topology.levels[0].bandwidth < device.memory_bandwidth
    assert device.peak("float64") <= device.peak("float32") < device.peak("bfloat16")
    assert make_mesh((2,), topology=topology).collective_time("all_gather", 0, 0) > 0
    assert device.launch_overhead > 0


def test_preset_figures_are_those_of_the_datasheets() -> None:
    h100 = get_topology("h100-sxm")
    assert h100.device.peak("bfloat16") == 989.4e12
    assert h100.device.memory_bandwidth == 3.35e12
    assert [(link.size, link.bandwidth) for link in h100.levels] == [(8, 450e9), (None, 50e9)]
    a100 = get_topology("a100-sxm-80gb")
    assert a100.device.peak("float16") == 312e12
    assert [(link.size, link.bandwidth) for link in a100.levels] == [(8, 300e9), (None, 25e9)]
    assert get_topology("gb200-nvl72").levels[0].size == 72


def test_an_unknown_preset_is_refused_with_those_that_exist() -> None:
    with pytest.raises(MeshError, match=r"'tpu-v5' is unknown; choose one of .*h100-sxm"):
        get_topology("tpu-v5")
