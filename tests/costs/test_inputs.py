"""Seconds of the inputs of a step."""

from dataclasses import replace

import numpy as np
import pytest
from support.meshes import slow_devices
from support.models import mlp, small_graph

from autoshard.errors import MeshError
from autoshard.mesh import Device, make_mesh
from autoshard.plan import PlanOptions
from autoshard.pricing.prices import Prices

DEVICE = Device("toy", {"float32": 1e9}, memory_bandwidth=1000.0, memory=1 << 40)


def seconds_of_inputs(device: Device, kind: str) -> float:
    graph = small_graph(mlp)
    mesh = slow_devices(a=2)
    mesh = make_mesh((2,), topology=replace(mesh.topology, device=device))
    prices = Prices(graph, mesh, PlanOptions())
    found = [i for i in graph.inputs if i.kind == kind]
    assert found
    return sum(float(prices.input(i, [graph.values[i.name].shape])[0][0]) for i in found)


def test_user_inputs_arrive_at_the_bandwidth_of_the_host() -> None:
    here, waited = DEVICE, replace(DEVICE, host_bandwidth=10.0)
    assert seconds_of_inputs(waited, "user") == pytest.approx(100 * seconds_of_inputs(here, "user"))
    assert seconds_of_inputs(waited, "parameter") == seconds_of_inputs(here, "parameter")


def test_memory_can_be_slower_than_the_host() -> None:
    assert replace(DEVICE, host_bandwidth=1e6).input_bandwidth == DEVICE.memory_bandwidth


@pytest.mark.parametrize("wrong", [-1.0, np.inf, np.nan])
def test_an_impossible_bandwidth_is_refused(wrong: float) -> None:
    with pytest.raises(MeshError, match="host_bandwidth of device 'toy'"):
        replace(DEVICE, host_bandwidth=wrong)
