"""Topologies fitted to synthetic measurements of known topologies, and their files."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli.options import read_topology
from autoshard.errors import MeshError
from autoshard.mesh import (
    COLLECTIVES,
    Bend,
    Link,
    Mesh,
    Rate,
    Topology,
    calibration,
    get_topology,
    make_mesh,
    topology_from_json,
    topology_to_json,
)
from autoshard.mesh.calibration import BENDS, CollectiveSample, fit_links
from autoshard.mesh.topology import INNER

SIZES = [1 << exponent for exponent in range(10, 29)]
NODE = Link(
    "node",
    4,
    2e9,
    1e-5,
    {
        "all_to_all": Rate(5e8, 3e-5, (Bend(BENDS[1], 3e8), Bend(BENDS[3], 1e8))),
        "all_reduce": Rate(1e9, 2e-5, (Bend(BENDS[0], 9e8),)),
    },
)
NETWORK = Link("network", None, 1e8, 1e-4, {"reduce_scatter": Rate(5e7, 2e-4)})
LEVELS = [("node", 4), ("network", None)]


def topology(*links: Link) -> Topology:
    device = get_topology("cpu-10gbe").device
    return Topology("made up", device, links, "gloo", collective_overhead=3e-5)


def samples(mesh: Mesh, *levels: int) -> list[CollectiveSample]:
    return [
        CollectiveSample(
            action, level, mesh.axis_sizes[axis], size, mesh.collective_time(action, axis, size)
        )
        for axis, level in enumerate(levels)
        for action in COLLECTIVES
        for size in SIZES
    ]


def test_a_fit_finds_the_links_that_made_the_measurements() -> None:
    known = make_mesh((2, 4), topology=topology(NODE, NETWORK))
    links, overhead = fit_links(samples(known, 1, 0), LEVELS)
    found = make_mesh((2, 4), topology=replace(topology(*links), collective_overhead=overhead))
    for action in COLLECTIVES:
        for axis in (0, 1):
            for size in (3000, 3_000_000, 100_000_000):
                expected = known.collective_time(action, axis, size)
                assert found.collective_time(action, axis, size) == pytest.approx(
                    expected, rel=1e-4
                )
    bends = links[0].collectives["all_to_all"].bends
    assert [bend.nbytes for bend in bends if bend.bandwidth < 2.9e8] == [BENDS[3]]


def test_a_fit_lies_between_measurements_that_scatter() -> None:
    known = make_mesh((4,), topology=topology(NODE))
    noisy = [
        replace(sample, seconds=sample.seconds * (1.1 if i % 2 else 0.9))
        for i, sample in enumerate(samples(known, 0))
    ]
    links, overhead = fit_links(noisy, LEVELS[:1])
    found = make_mesh((4,), topology=replace(topology(*links), collective_overhead=overhead))
    for sample in samples(known, 0):
        predicted = found.collective_time(sample.action, 0, sample.nbytes)
        assert predicted == pytest.approx(sample.seconds, rel=0.1)


def test_without_all_gathers_there_is_no_fit() -> None:
    known = make_mesh((4,), topology=topology(NODE))
    others = [sample for sample in samples(known, 0) if sample.action != "all_gather"]
    with pytest.raises(MeshError, match="no all_gather was measured over link 'node'"):
        fit_links(others, LEVELS[:1])


def test_times_that_do_not_grow_are_no_link() -> None:
    flat = [CollectiveSample("all_gather", 0, 4, size, 1e3 / size) for size in SIZES]
    with pytest.raises(MeshError, match="does not grow with its bytes"):
        fit_links(flat, LEVELS[:1])


def test_a_topology_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(topology_to_json(topology(NODE, NETWORK)))
    assert read_topology(str(path)) == topology(NODE, NETWORK)
    assert read_topology("h100-sxm") == "h100-sxm"
    path.write_text(path.read_text().replace('"latency"', '"lateness"', 1))
    with pytest.raises(MeshError, match=r"links.json: topology.levels.0.lateness"):
        read_topology(str(path))


@pytest.mark.parametrize(
    "bends",
    [
        (Bend(5, 2.0),),
        (Bend(5, 0.5), Bend(5, 0.4)),
        (Bend(5, 0.4), Bend(9, 0.5)),
    ],
)
def test_bends_ascend_and_become_slower(bends: tuple[Bend, ...]) -> None:
    with pytest.raises(MeshError, match="bends of a collective"):
        Rate(1.0, 0.0, bends)


def test_bends_are_few() -> None:
    with pytest.raises(MeshError, match="65 bends; the limit is 64"):
        Rate(1.0, 0.0, tuple(Bend(nbytes, 0.5) for nbytes in range(2, 67)))


def test_a_rate_is_of_a_collective() -> None:
    with pytest.raises(MeshError, match="'gossip' is not a collective"):
        Link("link", None, 1.0, collectives={"gossip": Rate(1.0)})


def test_a_bend_counts_only_what_lies_beyond() -> None:
    plain = topology(replace(NODE, collectives={}))
    slower = topology(
        replace(NODE, collectives={"all_gather": Rate(2e9, 1e-5, (Bend(1000, 1e9),))})
    )
    before, after = (make_mesh((4,), topology=links) for links in (plain, slower))
    times = [after.collective_time("all_gather", 0, n) for n in (1000, 3000)]
    assert times[0] == before.collective_time("all_gather", 0, 1000)
    assert times[1] == pytest.approx(before.collective_time("all_gather", 0, 5000))
    assert topology_from_json(topology_to_json(slower)) == slower


def test_gathers_of_inner_dims_have_figures_of_their_own() -> None:
    plain = topology(NODE)
    own = Rate(1e9, 4e-5)
    slower = topology(replace(NODE, collectives={**NODE.collectives, f"all_gather{INNER}": own}))
    before, after = (make_mesh((4,), topology=links) for links in (plain, slower))
    for action in COLLECTIVES:
        outer = before.collective_time(action, 0, 1 << 20)
        assert after.collective_time(action, 0, 1 << 20) == outer
        assert before.collective_time(action, 0, 1 << 20, inner=True) == outer
    # Long messages go round the ring: three steps, and three quarters of the bytes.
    expected = 3e-5 + 3 * 4e-5 + 0.75 * (1 << 28) / 1e9
    assert after.collective_time("all_gather", 0, 1 << 28, inner=True) == pytest.approx(
        expected, rel=1e-3
    )
    with pytest.raises(MeshError, match="'all_reduce of inner dims' is not a collective"):
        Link("link", None, 1.0, collectives={f"all_reduce{INNER}": own})


def test_measurements_that_other_work_disturbed_count_little() -> None:
    known = make_mesh((4,), topology=topology(NODE))
    disturbed = [
        replace(sample, seconds=sample.seconds * (6.0 if i % 9 == 4 else 1.0 + i % 3 * 0.02))
        for i, sample in enumerate(samples(known, 0))
    ]
    links, overhead = fit_links(disturbed, LEVELS[:1])
    found = make_mesh((4,), topology=replace(topology(*links), collective_overhead=overhead))
    for sample in samples(known, 0):
        predicted = found.collective_time(sample.action, 0, sample.nbytes)
        assert predicted == pytest.approx(sample.seconds, rel=0.2)


def test_a_slope_of_rounding_errors_is_none() -> None:
    """Small tensors take equally long; what the fit leaves as their slope is no bandwidth."""
    rate = calibration._rate([1e-4, 1e-34, *[0.0] * (len(BENDS) - 1), 1e-9], "all_gather")
    assert rate.bandwidth == pytest.approx(1e11)
    assert rate.bends[-1].bandwidth == pytest.approx(1e9)
