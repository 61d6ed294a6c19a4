"""What reshardings and collectives inside operators cost where others share or hide them."""

from collections.abc import Callable

import pytest
from support.meshes import slow_devices
from support.models import Planner, graph_of, mlp

from autoshard.graph import Graph
from autoshard.plan import Plan
from autoshard.pricing.charges import bucket_charges


@pytest.fixture
def graph() -> Graph:
    return graph_of(mlp())


def test_a_bucket_has_at_most_all_parameters(graph: Graph) -> None:
    nbytes = {p.name: graph.values[p.name].nbytes for p in graph.parameters}
    found = bucket_charges(graph, slow_devices(dp=4), bucket_bytes=1 << 40)
    assert {name: charge.fill_factor * nbytes[name] for name, charge in found.items()} == (
        pytest.approx(dict.fromkeys(nbytes, sum(nbytes.values())))
    )


def test_only_parameters_that_are_smaller_share_a_bucket(graph: Graph) -> None:
    found = bucket_charges(graph, slow_devices(dp=4), bucket_bytes=1000)
    assert sorted(charge.fill_factor for charge in found.values()) == pytest.approx(
        [1000 / (128 * 4), 1000 / (64 * 4)]
    )


def test_larger_buckets_cost_less(planned: Planner) -> None:
    small, large = (
        planned(
            mlp(), slow_devices(dp=4), algo="fsdp2", runtime="other", bucket_bytes=size
        ).costs.communication
        for size in (64, 1 << 20)
    )
    assert large < small


def _seconds(plan: Plan, is_weight: Callable[[str], bool]) -> float:
    return sum(c.time for c in plan.stages[0].reshardings if is_weight(c.value))


def test_activations_of_products_cost_what_is_exposed(planned: Planner) -> None:
    alone, hidden = (
        planned(
            mlp(), slow_devices(tp=4), algo="megatron", runtime="other", activation_overlap=share
        )
        for share in (0.0, 0.75)
    )
    parameters = {p.name for p in graph_of(mlp()).parameters}
    of_activations = [_seconds(p, lambda v: v not in parameters) for p in (alone, hidden)]
    assert of_activations[0] > 0
    assert of_activations[1] == pytest.approx(of_activations[0] / 4, rel=1e-3)
