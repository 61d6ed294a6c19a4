"""Nodes of meshes, their description, meshes as strings, and names of topologies."""

from dataclasses import replace
from typing import Any

import pytest

from autoshard.errors import ArgumentTypeError, MeshError
from autoshard.mesh import (
    AlphaBeta,
    Device,
    Link,
    Mesh,
    Rate,
    Topology,
    get_topology,
    list_topologies,
    make_mesh,
    mesh_from_json,
    mesh_to_json,
    parse_shape,
)

DEVICE = Device("gpu", {"float32": 1e12}, 1e12, 10**9)
THREE_LEVELS = Topology(
    "pod", DEVICE, (Link("a", 8, 4e9), Link("b", 32, 2e9), Link("c", None, 1e9))
)
BOX = Topology("box", DEVICE, (Link("bus", 4, 4e9),))


def test_smaller_nodes_cost_what_a_topology_with_such_nodes_costs() -> None:
    """The same links: 4 devices a node, with the same bandwidth per device between nodes."""
    by_hand = make_mesh((2, 4), intra_bandwidth="450GB/s", inter_bandwidth="50GB/s")
    found = make_mesh((2, 4), topology="h100-sxm", nodes=2)
    for axis in (0, 1):
        for action in ("all_reduce", "all_gather", "all_to_all"):
            for nbytes in (1, 10**6, 10**9):
                expected = by_hand.collective_time(action, axis, nbytes)
                assert found.collective_time(action, axis, nbytes) == expected
    one_node = make_mesh((2, 4), topology="h100-sxm")
    slow, fast = (m.collective_time("all_reduce", 0, 10**9) for m in (found, one_node))
    # Rings reach 0.79 of NVLink's 450 GB/s, and 0.94 of the adapter's 50 GB/s.
    assert slow / fast == pytest.approx(0.79 * 450 / (0.94 * 50), rel=0.01)


def test_nodes_and_gpus_per_node_are_two_ways_to_say_the_same() -> None:
    found = make_mesh((2, 4), topology="h100-sxm", nodes=2)
    assert found == make_mesh((2, 4), topology="h100-sxm", gpus_per_node=4)
    assert found == make_mesh((2, 4), topology="h100-sxm", nodes=2, gpus_per_node=4)
    assert (found.num_nodes, found.devices_per_node) == (2, 4)
    whole = make_mesh((2, 8), topology="h100-sxm", nodes=2)
    assert whole == make_mesh((2, 8), topology="h100-sxm")
    assert mesh_from_json(mesh_to_json(found)).description == found.description


def test_groups_of_nodes_keep_their_number_of_nodes() -> None:
    levels = make_mesh((8, 4), topology=THREE_LEVELS, gpus_per_node=4).topology.levels
    assert [link.size for link in levels] == [4, 16, None]


def test_bandwidths_may_have_nodes_other_than_the_last_axis() -> None:
    links = {"intra_bandwidth": "100GB/s", "inter_bandwidth": "80Gb/s"}
    mesh = make_mesh((4, 2), nodes=2, **links)
    assert [(link.size, link.bandwidth) for link in mesh.topology.levels] == [
        (4, 100e9),
        (None, 10e9),
    ]
    assert make_mesh((2, 4), intra_bandwidth=1e9, nodes=1).num_nodes == 1


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8,), {"nodes": 3}, "cannot be divided evenly with nodes 3; .*: 1 x 8, 2 x 4, 4 x 2, 8 x"),
        ((8,), {"nodes": 0}, "evenly with nodes 0"),
        ((8,), {"gpus_per_node": -2}, "evenly with gpus_per_node -2"),
        ((3, 8), {"gpus_per_node": 12}, "'h100-sxm' has 8 devices a node, not 12; .*: 3 x 8, 4 x"),
        ((16,), {"nodes": 2, "gpus_per_node": 4}, "2 nodes of 4 devices have 8 devices, but .* 16"),
        (
            (8,),
            {"nodes": 2, "topology": "cpu-100gbe"},
            "one kind of link, 'Ethernet', so",
        ),
        ((4,), {"nodes": 2, "topology": BOX}, "'box' has no links between nodes"),
        (
            (8,),
            {"nodes": 2, "intra_bandwidth": 1e9},
            "inter_bandwidth is required: .* 2 nodes",
        ),
    ],
)
def test_impossible_nodes_are_refused(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        make_mesh(shape, **options)


LINKS = {"intra_bandwidth": 100e9, "inter_bandwidth": 10e9}
MEASURED = replace(
    THREE_LEVELS,
    levels=(Link("intra-node", None, 5e9, collectives={"all_reduce": Rate(4e9)}),),
)


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ("8", {"topology": "h100-sxm"}, "1 node x 8 NVIDIA H100 SXM (NVLink, 450 GB/s a device)"),
        (
            "2x4",
            {"topology": "h100-sxm", "nodes": 2},
            "2 nodes x 4 NVIDIA H100 SXM (NVLink 450 GB/s; 50 GB/s a device between nodes)",
        ),
        (
            "4",
            {},
            (
                "1 node x 4 NVIDIA H100 SXM (NVLink, 450 GB/s a device); "
                "assumed: h100-sxm (no topology given)"
            ),
        ),
        ("1", {"topology": "h100"}, "1 x NVIDIA H100 SXM"),
        (
            "8",
            {"topology": "h100", "gpus_per_node": 1},
            "8 nodes x 1 NVIDIA H100 SXM (50 GB/s a device between nodes)",
        ),
        (
            "12",
            {"topology": "h100"},
            (
                "12 x NVIDIA H100 SXM on 2 nodes of at most 8 (NVLink 450 GB/s; "
                "50 GB/s a device between nodes)"
            ),
        ),
        (
            "8",
            {"topology": "cpu-10gbe"},
            "8 x Intel Xeon Platinum 8480+ host (Ethernet, 1.25 GB/s a device)",
        ),
        (
            "2x4",
            LINKS,
            (
                "2 nodes x 4 NVIDIA H100 SXM (intra-node 100 GB/s; 10 GB/s a device between nodes)"
                "; assumed: NVIDIA H100 SXM (only bandwidths given)"
            ),
        ),
        (
            "64",
            {"topology": THREE_LEVELS},
            (
                "8 nodes x 8 gpu (a 4 GB/s; 2 GB/s a device between nodes; "
                "1 GB/s a device between groups of 32 devices)"
            ),
        ),
        (
            "16",
            {"topology": THREE_LEVELS},
            "2 nodes x 8 gpu (a 4 GB/s; 2 GB/s a device between nodes)",
        ),
        (
            "4",
            {"topology": MEASURED},
            "4 x gpu (intra-node, 5 GB/s a device; measured)",
        ),
    ],
)
def test_a_mesh_describes_itself(shape: str, options: dict[str, Any], text: str) -> None:
    mesh = make_mesh(shape, **options)
    assert mesh.description == text
    assert mesh_from_json(mesh_to_json(mesh)).description == text


def test_prices_of_alpa_are_described() -> None:
    mesh = make_mesh((2,), topology="h100")
    text = Mesh(mesh.axes, mesh.topology, AlphaBeta((1.0,), (1.0,))).description
    assert text.endswith("; collectives cost what Alpa's alpha and beta say")


def test_what_is_assumed_does_not_change_the_mesh() -> None:
    assert make_mesh((8,)) == make_mesh((8,), topology="h100-sxm")
    wrong: Any = "weather"
    with pytest.raises(MeshError, match="assumed is 'weather'"):
        replace(BOX, assumed=wrong)


@pytest.mark.parametrize(
    ("text", "shape", "names"),
    [
        ("8", (8,), None),
        ("2,4", (2, 4), None),
        ("2x4", (2, 4), None),
        ("2X4", (2, 4), None),
        ("2*4*8", (2, 4, 8), None),
        (" 2 x 4 ", (2, 4), None),
        ("dp=2,tp=4", (2, 4), ("dp", "tp")),
        ("dp=2 x tp=4", (2, 4), ("dp", "tp")),
        ("x=2xxx=4", (2, 4), ("x", "xx")),
    ],
)
def test_a_mesh_as_text(text: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    assert parse_shape(text) == (shape, names)
    mesh = make_mesh(text)
    assert mesh.axis_sizes == shape
    assert mesh.axis_names == (names or tuple(f"axis{i}" for i in range(len(shape))))


@pytest.mark.parametrize("text", ["", "x", "2x", "x4", "2;4", "2 4", "dp=", "=2", "2.5", "-2"])
def test_unreadable_meshes_say_what_to_write(text: str) -> None:
    with pytest.raises(MeshError, match=r"is not a mesh; write the size .* 2x4, .* dp=2,tp=4"):
        make_mesh(text)


def test_names_of_axes_are_given_once_and_for_all_axes() -> None:
    names = ("a", "b")
    assert make_mesh("2x4", mesh_dim_names=names) == make_mesh((2, 4), axes=names)
    with pytest.raises(MeshError, match="names some axes only"):
        make_mesh("dp=2,4")
    with pytest.raises(MeshError, match="the axes are named twice"):
        make_mesh("a=2,b=4", axes=names)
    with pytest.raises(MeshError, match="mean the same; give one of them"):
        make_mesh("2x4", axes=names, mesh_dim_names=names)
    with pytest.raises(ArgumentTypeError, match=r"axes is 'a,b': it should be .* \['a', 'b'\]"):
        make_mesh("2x4", axes="a,b")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("H100 SXM", "h100-sxm"),
        ("h200", "h200-sxm"),
        ("gb300", "gb300-nvl72"),
        ("a100-pcie", "a100-pcie-80gb"),
        ("a100_40gb", "a100-sxm-40gb"),
        ("l40s", "l40s-pcie"),
        ("a100", "a100-sxm-80gb"),
        ("b200", "b200-sxm"),
        ("gb200", "gb200-nvl72"),
        ("MI300X", "mi300x-oam"),
        ("100gbe", "cpu-100gbe"),
    ],
)
def test_part_of_a_name_finds_the_topology(given: str, name: str) -> None:
    assert get_topology(given) is get_topology(name)


@pytest.mark.parametrize("name", ["h100", "a100", "h200", "b200", "gb200", "mi300x", "l40s"])
def test_nodes_of_short_names_may_be_smaller_and_descriptions_have_the_device(name: str) -> None:
    mesh = make_mesh((2, 4), topology=name, nodes=2)
    assert mesh.topology.devices_per_node == 4
    assert mesh.description.startswith(f"2 nodes x 4 {get_topology(name).device.name} ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a100-80gb", "could be a100-pcie-80gb or a100-sxm-80gb; give the whole name"),
        ("h10", r"is unknown; did you mean h100-sxm\?"),
        ("dgx-h100", r"is unknown; did you mean h100-sxm\?"),
        ("abacus", f"is unknown; choose one of {', '.join(list_topologies())}"),
        ("", "is unknown; choose one of"),
    ],
)
def test_other_names_of_topologies_are_refused(given: str, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        get_topology(given)


def test_links_and_devices_take_strings() -> None:
    rate: Any = "450GB/s"
    memory: Any = "80GB"
    assert Link("link", None, rate).bandwidth == 450e9
    device = Device("gpu", {"float32": 1e12}, rate, memory)
    assert (device.memory_bandwidth, device.memory) == (450e9, 80 * 10**9)
    wrong: Any = "450G"
    with pytest.raises(MeshError, match="bandwidth: '450G' could be bytes or bits per second"):
        Link("link", None, wrong)
    with pytest.raises(MeshError, match="memory: 'lots' is not a number of bytes"):
        replace(device, memory="lots")
