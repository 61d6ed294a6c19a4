"""A calibration on real gloo ranks, of few sizes; figures differ from machine to machine."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from support.shared_folder import shared_folder

from autoshard.costs import Category
from autoshard.errors import MeshError
from autoshard.measure.calibration import FULL, QUICK, Calibration, CalibrationProgress, calibrate
from autoshard.mesh import get_topology, make_mesh
from autoshard.mesh.topology import INNER, MEASURABLE

NUM_RANKS = 4
FEW = replace(
    QUICK,
    sizes=(1 << 10, 1 << 16, 1 << 22),
    checked=(1 << 18,),
    elements=(1 << 14, 1 << 16),
    num_rounds=1,
    num_runs=3,
    num_repeats=1,
    seconds=0.02,
)
"""Few runs: no figure is compared with another machine's."""


def as_torchrun(per_node: int, num_ranks: int = NUM_RANKS) -> None:
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(per_node)}


def one_node() -> None:
    as_torchrun(NUM_RANKS)
    told: list[CalibrationProgress] = []
    found = calibrate(effort=FEW, report=told.append)
    (link,) = found.topology.levels
    assert link.size is None
    assert set(link.collectives) == set(MEASURABLE)
    assert {(c.sample.action, c.sample.nbytes) for c in found.comparisons} == {
        (action, 1 << 18) for action in MEASURABLE
    }
    # What ranks wait for each other is priced, and is no part of what is compared.
    assert 0 <= found.skew <= found.topology.collective_overhead
    overhead = found.topology.collective_overhead - found.skew
    alone = make_mesh((4,), topology=replace(found.topology, collective_overhead=overhead))
    mesh = make_mesh((2, 2), topology=found.topology)
    for comparison in found.comparisons:
        sample = comparison.sample
        assert 0 < sample.seconds < 60
        assert comparison.predicted > 0
        action = sample.action.removesuffix(INNER)
        inner = action != sample.action
        seconds = alone.collective_time(action, 0, sample.nbytes, inner=inner)
        assert comparison.predicted == pytest.approx(seconds, abs=1e-9)
        assert mesh.collective_time(action, 0, 1 << 28, inner=inner) > comparison.predicted
    check_device(found)
    # Only the first rank reports, and all that it announced was measured.
    if dist.get_rank():
        assert not told
    else:
        assert [progress.done for progress in told] == list(range(told[-1].total))
        assert {"copies", "matrix products", "operators"} <= {p.stage for p in told}


def check_device(found: Calibration) -> None:
    device = found.topology.device
    assert device.peak("float32") > 1e6
    assert set(Category) <= set(device.operators)
    assert all(p.forward.overhead or p.forward.times for p in device.operators.values())
    assert {"aten.transpose.int", "aten.exp.default"} <= set(device.operators)


def two_nodes() -> None:
    """Two nodes of two ranks, as far as torchrun's variables say."""
    as_torchrun(2)
    with pytest.raises(MeshError, match="both inside nodes and between them"):
        calibrate((4,))
    with pytest.raises(MeshError, match=r"8 devices, but 4 ranks"):
        calibrate((2, 4))
    found = calibrate(effort=replace(FEW, checked=()), busy=True)
    assert [(link.name, link.size) for link in found.topology.levels] == [
        ("intra-node", 2),
        ("network", None),
    ]
    assert found.comparisons == ()


def known_links() -> None:
    """Links of a preset, which a single device needs; here each rank is one of four."""
    as_torchrun(1, 1)
    with pytest.raises(MeshError, match=r"one rank has no links to measure.*--links"):
        calibrate()
    as_torchrun(NUM_RANKS)
    links = get_topology("h200-sxm")
    found = calibrate(links=links, name="mine", effort=FEW)
    check_device(found)
    assert found.comparisons == ()
    assert found.topology == replace(
        links, name="mine", device=found.topology.device, source=found.topology.source
    )
    assert "links of h200-sxm" in found.topology.source


def interrupted() -> None:
    """What was measured before is used again, up to a line that was being written."""
    as_torchrun(NUM_RANKS)
    links = get_topology("cpu-10gbe")
    with shared_folder() as folder:
        file = Path(folder) / "topology.json.partial"

        def run(seconds: float = FEW.seconds) -> Calibration:
            effort = replace(FEW, seconds=seconds)
            return calibrate(links=links, effort=effort, partial_file=file)

        def keep(count: int, damaged: str = "") -> None:
            dist.barrier()
            if dist.get_rank() == 0:
                lines = file.read_text().splitlines()[: 1 + count]
                file.write_text("\n".join([*lines, damaged]))
            dist.barrier()

        def count_lines() -> int:
            dist.barrier()  # the first rank writes the last line after the others have it
            return len(file.read_text().splitlines())

        first = run()
        assert first.num_kept == 0
        num_lines = count_lines()
        again = run()
        assert again.num_kept == num_lines - 1
        assert again.topology.device == first.topology.device
        keep(7, '["product float32 (102')
        continued = run()
        assert continued.num_kept == 7
        assert count_lines() == num_lines
        # Copies were measured first, operators last.
        bandwidth = first.topology.device.memory_bandwidth
        assert continued.topology.device.memory_bandwidth == bandwidth
        assert continued.topology.device.operators != first.topology.device.operators
        assert run(0.01).num_kept == 0, "other settings"


def quick_is_less() -> None:
    """The number of measurements and of their runs, which do not depend on the machine."""
    full, quick = (
        (len({*e.sizes, *e.checked}) * e.num_passes, max(e.sizes), e.num_runs * e.seconds)
        for e in (FULL, QUICK)
    )
    assert all(10 * few <= many for few, many in zip(quick, full, strict=True))


CASES: dict[str, Callable[[], None]] = {
    "one node": one_node,
    "two nodes": two_nodes,
    "known links": known_links,
    "interrupted": interrupted,
    "quick": quick_is_less,
}
