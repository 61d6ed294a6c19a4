"""A calibration on real gloo ranks, of few sizes; figures differ from machine to machine."""

import os
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest

from autoshard.costs import Category
from autoshard.errors import MeshError
from autoshard.mesh import make_mesh
from autoshard.mesh.topology import INNER, MEASURABLE
from autoshard.runtime.calibration import calibrate
from autoshard.runtime.calibration.kernels import KernelClock

NUM_RANKS = 4
ELEMENTS = (1 << 14, 1 << 16)
SIZES = (1 << 10, 1 << 16, 1 << 22)


def as_torchrun(per_node: int) -> None:
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(per_node)}


few_runs = patch.dict(KernelClock.measure.__kwdefaults__, count=4)
"""Medians of four runs of a kernel: no figure is compared with another machine's."""


@few_runs
def one_node() -> None:
    as_torchrun(NUM_RANKS)
    told: list[str] = []
    found = calibrate(
        sizes=SIZES, checked=(1 << 18,), elements=ELEMENTS, num_passes=1, report=told.append
    )
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
    device = found.topology.device
    assert device.peak("float32") > 1e6
    assert set(Category) <= set(device.operators)
    assert all(p.forward.overhead or p.forward.times for p in device.operators.values())
    assert {"aten.transpose.int", "aten.exp.default"} <= set(device.operators)
    assert any("matrix products" in text for text in told)


@few_runs
def two_nodes() -> None:
    """Two nodes of two ranks, as far as torchrun's variables say."""
    as_torchrun(2)
    with pytest.raises(MeshError, match="both inside nodes and between them"):
        calibrate((4,))
    with pytest.raises(MeshError, match=r"8 devices, but 4 ranks"):
        calibrate((2, 4))
    found = calibrate(sizes=SIZES, checked=(), elements=ELEMENTS, num_passes=1, busy=True)
    assert [(link.name, link.size) for link in found.topology.levels] == [
        ("node", 2),
        ("network", None),
    ]
    assert found.comparisons == ()


CASES: dict[str, Callable[[], None]] = {"one node": one_node, "two nodes": two_nodes}
