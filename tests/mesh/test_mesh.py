from math import prod
from typing import Any

import numpy as np
import pytest

from autoshard.errors import MeshError
from autoshard.layouts import Layout, Pricer, ReshardingTable
from autoshard.mesh import (
    AlphaBeta,
    Axis,
    Device,
    Link,
    Mesh,
    Span,
    Topology,
    get_topology,
    make_mesh,
)

DEVICE = Device("gpu", {"float32": 1e12}, 1e12, 10**9, launch_overhead=2e-6)


def nodes_of_eight(*shape: int) -> Mesh:
    levels = (Link("nvlink", 8, 100e9, 1e-6), Link("network", None, 10e9, 5e-6))
    return make_mesh(shape, topology=Topology("cluster", DEVICE, levels))


@pytest.mark.parametrize(
    ("shape", "spans"),
    [
        ((8,), [(Span(1, 8), Span(1, 8))]),
        ((2, 8), [(Span(2, 1), Span(1, 2)), (Span(1, 8), Span(1, 8))]),
        (
            (2, 4, 4),
            [(Span(2, 1), Span(1, 2)), (Span(2, 2), Span(1, 4)), (Span(1, 4), Span(1, 4))],
        ),
        ((4, 2), [(Span(1, 4), Span(1, 4)), (Span(1, 2), Span(1, 2))]),
        ((16,), [(Span(2, 8), Span(1, 16))]),
        ((1,), [(Span(1, 1), Span(1, 1))]),
        # Nodes of 8 hold 8 and 4 of these ranks, so the second node limits the ring.
        ((12,), [(Span(2, 4), Span(1, 12))]),
        # Ranks 0 to 5 share a node, 6 to 11 straddle two.
        ((2, 6), [(Span(2, 1), Span(1, 2)), (Span(2, 2), Span(1, 6))]),
    ],
)
def test_axes_lie_over_link_levels_as_devices_are_numbered(
    shape: tuple[int, ...], spans: list[tuple[Span, ...]]
) -> None:
    mesh = nodes_of_eight(*shape)
    assert [mesh.spans(axis) for axis in range(len(shape))] == spans


def test_a_mesh_knows_its_axes() -> None:
    mesh = make_mesh((2, 4, 8))
    assert mesh.axis_names == ("axis0", "axis1", "axis2")
    assert mesh.axis_sizes == (2, 4, 8)
    assert mesh.num_devices == 64


def test_a_copy_reads_and_writes_every_byte() -> None:
    assert nodes_of_eight(2).copy_time(5 * 10**8) == pytest.approx(2e-6 + 1e-3)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((), "no axes"),
        ((Axis("a", 2), Axis("a", 2)), "axis 'a' is named twice"),
        ((Axis("a", 3), Axis("b", 3)), r"\(3, 3\) has 9 devices, but topology 'box' has 8"),
    ],
)
def test_an_impossible_mesh_is_refused(axes: tuple[Axis, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh(axes, Topology("box", DEVICE, (Link("nvlink", 8, 1e9),)))


def test_an_absurdly_large_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match="at most 1,048,576"):
        make_mesh((2**20, 2**20))


@pytest.mark.parametrize("size", [0, -4])
def test_an_axis_needs_a_rank(size: int) -> None:
    with pytest.raises(MeshError, match=f"axis 'axis0' has size {size}"):
        make_mesh((size, 4))


@pytest.mark.parametrize("axis", [-1, 2])
def test_an_axis_that_does_not_exist_is_refused(axis: int) -> None:
    mesh = make_mesh((1, 2))
    with pytest.raises(MeshError, match=f"axis {axis} does not exist"):
        mesh.spans(axis)
    with pytest.raises(MeshError, match=f"axis {axis} does not exist"):
        mesh.collective_time("all_reduce", axis, 1)


def test_a_mesh_prices_reshardings() -> None:
    mesh = nodes_of_eight(2, 4)
    pricer: Pricer = mesh
    reshardings = ReshardingTable((64, 64), 4, mesh.axis_sizes, differentiable=True, pricer=pricer)
    sharded, whole = Layout.parse("R,S(0)"), Layout.parse("R,R")
    expected = mesh.collective_time("all_gather", 1, 64 * 64 * 4) + mesh.collective_time(
        "reduce_scatter", 1, 64 * 64 * 4
    )
    assert reshardings.cost(sharded, whole) == pytest.approx(expected, abs=2e-9)


def test_the_default_topology_is_an_h100_node() -> None:
    assert make_mesh((2, 8)).topology == get_topology("h100-sxm")
    assert make_mesh((2,), backend="gloo").topology == get_topology("cpu-100gbe")
    assert make_mesh((2,), topology="cpu-10gbe", backend="gloo").topology.backend == "gloo"


def test_bandwidths_make_the_last_axis_a_node() -> None:
    mesh = make_mesh((2, 2, 4), intra_bandwidth=100e9, inter_bandwidth=10e9)
    assert [(link.size, link.bandwidth) for link in mesh.topology.levels] == [
        (4, 100e9),
        (None, 10e9),
    ]
    assert [mesh.spans(axis)[0].num_groups for axis in range(3)] == [2, 2, 1]
    assert mesh.topology.device == get_topology("h100-sxm").device


def test_latencies_and_backend_shape_the_links() -> None:
    mesh = make_mesh(
        (2, 4),
        intra_bandwidth=1e9,
        inter_bandwidth=1e8,
        intra_latency=1e-5,
        inter_latency=2e-5,
        backend="gloo",
    )
    assert [link.latency for link in mesh.topology.levels] == [1e-5, 2e-5]
    assert mesh.topology.backend == "gloo"
    assert mesh.topology.device == get_topology("cpu-100gbe").device


def test_one_node_needs_no_bandwidth_between_nodes() -> None:
    assert len(make_mesh((1, 4), intra_bandwidth=1e9).topology.levels) == 1


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((), {}, "the shape of the mesh is empty"),
        ((), {"intra_bandwidth": 1e9}, "the shape of the mesh is empty"),
        ((2, 2.5), {}, r"the size of an axis is 2.5; give whole numbers, such as \(2, 4\)"),
        ((2, 4), {"axes": ["a"]}, "1 axis names are given for 2 axes"),
        ((2, 4), {"axes": ["a", "a"]}, "named twice"),
        ((2, 4), {"topology": "h10"}, "'h10' is unknown; did you mean h100-sxm"),
        (
            (2, 4),
            {"topology": "h100-sxm", "intra_bandwidth": 1e9},
            "both a topology and intra_bandwidth are given",
        ),
        ((2, 4), {"intra_bandwidth": 1e9}, "inter_bandwidth is required: .* 2 nodes"),
        ((2, 4), {"inter_bandwidth": 1e9}, "without intra_bandwidth"),
        ((2, 4), {"intra_latency": 1e-6}, "without intra_bandwidth"),
        ((2,), {"intra_bandwidth": 0.0}, "intra_bandwidth 0.0 is 0 B/s"),
        ((2,), {"intra_bandwidth": float("nan")}, "intra_bandwidth: nan is not"),
        ((2,), {"intra_bandwidth": 450}, "intra_bandwidth 450 is 450 B/s, .* such as 450GB/s"),
        ((2,), {"intra_bandwidth": 1e9, "intra_latency": 5}, "intra_latency is 5 s a step"),
        ((2,), {"backend": "mpi"}, "backend 'mpi' is unknown"),
        ((2,), {"topology": "h100-sxm", "backend": "gloo"}, "contradicts topology 'h100-sxm'"),
    ],
)
def test_contradictions_are_refused(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        make_mesh(shape, **options)


def test_alpha_and_beta_must_fit_the_mesh() -> None:
    mesh = make_mesh((2, 2))
    with pytest.raises(MeshError, match="1 entries, but the mesh has 2 axes"):
        Mesh(mesh.axes, mesh.topology, AlphaBeta((1.0,), (1.0,)))


@pytest.mark.parametrize(
    "shape", [(2, 3, 4), (4, 3, 2), (6, 10), (5, 2, 3, 2), (1, 48), (3, 1, 16), (7, 9)]
)
def test_spans_are_those_of_every_single_group(shape: tuple[int, ...]) -> None:
    mesh = nodes_of_eight(*shape)
    devices = np.arange(prod(shape)).reshape(shape)
    for axis, num_ranks in enumerate(shape):
        rows = np.moveaxis(devices, axis, -1).reshape(-1, num_ranks)
        for span, link in zip(mesh.spans(axis), mesh.topology.levels, strict=True):
            counts = [
                np.unique(row // (link.size or prod(shape)), return_counts=True) for row in rows
            ]
            assert span.num_groups == max(len(groups) for groups, _ in counts)
            assert span.ranks_per_group == min(sizes.min() for _, sizes in counts)


@pytest.mark.parametrize("action", ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"])
@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 4), (0, 1)), ((2, 1, 4), (0, 2)), ((2, 2, 4), (0, 1, 2))]
)
def test_axes_as_one_group_cost_what_one_axis_of_their_ranks_costs(
    shape: tuple[int, ...], axes: tuple[int, ...], action: str
) -> None:
    mesh = make_mesh(shape)
    assert axes in mesh.axis_groups
    one = make_mesh((prod(shape),), topology=mesh.topology)
    for nbytes in (0, 1 << 16, 1 << 28):
        assert mesh.collective_time(action, axes, nbytes) == one.collective_time(action, 0, nbytes)


def test_a_group_of_the_outer_axes_crosses_what_they_cross() -> None:
    mesh = nodes_of_eight(2, 2, 8)
    expected = nodes_of_eight(4, 8).collective_time("all_gather", 0, 1 << 24)
    assert mesh.collective_time("all_gather", (0, 1), 1 << 24) == expected


def test_axes_that_are_not_adjacent_are_no_group() -> None:
    mesh = nodes_of_eight(2, 2, 2)
    assert mesh.axis_groups == ((0, 1), (0, 1, 2), (1, 2))
    with pytest.raises(MeshError, match=r"axes \(0, 2\) do not communicate as one group"):
        mesh.collective_time("all_gather", (0, 2), 1)


def test_the_cost_model_of_alpa_has_no_groups() -> None:
    mesh = Mesh(
        nodes_of_eight(2, 2).axes, get_topology("h100-sxm"), AlphaBeta((1.0, 1.0), (0.1, 0.1))
    )
    assert mesh.axis_groups == ()


def test_a_name_of_an_axis_is_not_that_of_several() -> None:
    with pytest.raises(MeshError, match=r"axis 'dp\+tp' must have a name without '\+'"):
        Axis("dp+tp", 2)
