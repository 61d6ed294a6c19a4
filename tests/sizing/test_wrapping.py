"""Units of `fully_shard`: their unsharded parameters, by arithmetic over the model."""

import pytest
from support.meshes import slow_devices
from support.models import Planner, graph_of, llama, meta

from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.lowering.holders import UNSHARDED, Part, all_holdings
from autoshard.plan import Plan
from autoshard.sizing.held import held_memory, plan_timeline
from autoshard.sizing.wrapping import wrapped

MESH = slow_devices(a=4)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(llama, layers=3))


@pytest.fixture(scope="module")
def plan(planned: Planner, graph: Graph) -> Plan:
    return planned(graph, MESH, algo="fsdp2", reshard_after_forward="always")


def sizes(graph: Graph, layer: str = "") -> int:
    """Bytes of the parameters in a layer; of those outside of all layers without one."""
    found = 0
    for one in graph.parameters:
        is_inside = one.target.startswith("model.layers.")
        if one.target.startswith(f"{layer}.") if layer else not is_inside:
            found += graph.values[one.name].nbytes
    return found


def unsharded(plan: Plan, pattern: str, *, reshards: bool = True) -> dict[str, int]:
    """Bytes of unsharded parameters between forward and backward, by unit."""
    found = plan_timeline(plan)
    at_turn: dict[str, int] = {}
    for held in wrapped(found, [pattern], reshards=reshards):
        if held.kept and held.part is Part.UNSHARDED_PARAMETERS:
            at_turn[held.name] = at_turn.get(held.name, 0) + held.nbytes
    return at_turn


def test_between_the_passes_the_root_is_unsharded_and_the_last_all_gather_is_there(
    graph: Graph, plan: Plan
) -> None:
    root, layer = sizes(graph), sizes(graph, "model.layers.2")
    # Backward gathers the last layer at once.
    expected = {"(root)": root, "model.layers.2": 2 * layer}
    assert unsharded(plan, "model.layers.?") == expected
    every = unsharded(plan, "model.layers.?", reshards=False)
    assert every == expected | {
        "model.layers.0": sizes(graph, "model.layers.0"),
        "model.layers.1": sizes(graph, "model.layers.1"),
    }


def test_everything_but_unsharded_parameters_stays(plan: Plan) -> None:
    found = plan_timeline(plan)
    of_units = set(wrapped(found, ["model.layers.?"], reshards=True))
    other = {held for held in all_holdings(found) if held.part not in UNSHARDED}
    other = {held for held in other if held.part is not Part.WORKING or not held.of_parameter}
    assert other <= of_units
    assert {held.part for held in of_units - other} == UNSHARDED
    units, kinds = held_memory(plan, ["model.layers.?"])
    whole, _ = held_memory(plan, ["model"])
    assert sum(units.parts.values()) == sum(kinds.values()) < sum(whole.parts.values())


def test_a_module_that_does_not_exist_is_named(plan: Plan) -> None:
    with pytest.raises(OptionError, match=r"no module with sharded parameters matches 'layers'"):
        held_memory(plan, ["layers"])
