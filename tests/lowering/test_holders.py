"""The holders of memory at each moment add up to the timeline."""

from typing import Any

import numpy as np
import pytest
from support.meshes import slow_devices
from support.models import Planner, graph_of, llama, meta

from autoshard.graph import Graph
from autoshard.lowering.holders import Part, all_holdings, holdings, summed
from autoshard.sizing.held import held_memory, plan_timeline

MESH = slow_devices(a=4)
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {"algo": "fsdp2", "reshard_after_forward": "always"},
    "recomputed": {
        "algo": "fsdp2",
        "activation_checkpointing": "always",
        "reshard_after_forward": "always",
    },
    "ddp, micro-batches": {"algo": "ddp", "micro_batches": 2},
    "inference": {"mode": "inference"},
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(llama, layers=3))


@pytest.mark.parametrize("name", OPTIONS)
def test_holdings_add_up_to_the_memory_of_every_moment(
    planned: Planner, graph: Graph, name: str
) -> None:
    found = plan_timeline(planned(graph, MESH, **OPTIONS[name]))
    total = np.zeros(len(found.moments) + 1, np.int64)
    for held in all_holdings(found):
        total[held.first] += held.nbytes
        total[held.last + 1] -= held.nbytes
    assert (total.cumsum()[:-1] == found.total).all()
    at_peak = holdings(found, found.peak_moment)
    assert sum(held.nbytes for held in at_peak) == found.peak


def test_gathered_parameters_and_their_gradients_are_told_from_activations(
    planned: Planner, graph: Graph
) -> None:
    plan = planned(graph, MESH, **OPTIONS["fsdp2"])
    parts = summed(all_holdings(plan_timeline(plan)), lambda held: held.part)
    assert parts[Part.UNSHARDED_PARAMETERS] > 0
    assert parts[Part.UNSHARDED_GRADIENTS] > 0
    assert Part.RECOMPUTED not in parts
    targets = {placed.target for placed in plan.stages[0].parameters}
    gathered = [x for x in all_holdings(plan_timeline(plan)) if x.part is Part.UNSHARDED_PARAMETERS]
    assert {held.name for held in gathered if held.module} <= targets


def test_what_recomputation_keeps_is_all_that_is_kept(planned: Planner, graph: Graph) -> None:
    plan = planned(graph, MESH, **OPTIONS["recomputed"])
    held, kinds = held_memory(plan)
    assert sum(kinds.values()) == plan.memory.peak
    assert plan.memory.turn is not None
    assert sum(held.kept_despite.values()) == sum(held.activations.values())
    assert sum(held.activations.values()) == plan.memory.per_micro_batch
    without, _ = held_memory(planned(graph, MESH, algo="fsdp2", activation_checkpointing="never"))
    assert not without.kept_despite
    assert sum(without.activations.values()) > sum(held.activations.values())
