"""Times of a stage: passes of all micro-batches and the end add up to the plan's total cost."""

from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from support.models import Planner, bert, gpt2, graph_of, llama, small_graph
from torch import nn

from autoshard.costs import GATHERED_ONCE
from autoshard.graph import graph_from_json
from autoshard.plan import Plan
from autoshard.plan.document import StageTimes
from autoshard.pricing.stage_times import splits_backward, stage_times

MESH = slow_devices(dp=2, tp=2)
ROUNDING = 1e-9

GATHERED = {"inputs": {"*": "S(0),R"}, "parameters": {"*mlp*weight": "S(0),S(1)"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "checkpoints": {"activation_checkpointing": "always"},
    "checkpoints and overlap": {"activation_checkpointing": "always", "overlap": True},
    "resharded again": {"reshard_after_forward": "always", "overlap": True},
    "micro-batches": {"micro_batches": 3},
    "two micro-batches": {"micro_batches": 2, "optimizer": "sgd"},
    "micro-batches and overlap": {"micro_batches": 4, "overlap": True, "in_flight": 2},
    "micro-batches, resharded again": {"micro_batches": 3, "reshard_after_forward": "always"},
    "micro-batches, checkpoints": {
        "micro_batches": 8,
        "activation_checkpointing": "always",
        "accumulation_dtype": "bfloat16",
    },
}


def times_of(plan: Plan) -> StageTimes:
    (stage,) = plan.stages
    return stage_times(stage, graph_from_json(stage.program), plan.mesh, plan.options)


def total(plan: Plan, times: StageTimes) -> float:
    number = plan.stages[0].micro_batches
    return number * (times.forward + times.backward_input + times.backward_weight) + times.end


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPTIONS)
def test_passes_and_end_add_up_to_the_cost_of_the_plan(name: str, planned: Planner) -> None:
    plan = planned(small_graph(gpt2), MESH, pins=GATHERED, **OPTIONS[name])
    times = times_of(plan)
    assert plan.costs is not None
    assert total(plan, times) == pytest.approx(plan.costs.total, rel=ROUNDING)
    assert min(times.forward, times.backward_input, times.end) > 0
    assert (times.backward_weight > 0) == splits_backward(plan.stages[0])


@pytest.mark.matrix
@pytest.mark.parametrize("model", [bert, llama])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 5}, {"mode": "inference"}])
def test_other_models_too(model: Any, options: dict[str, Any], planned: Planner) -> None:
    plan = planned(small_graph(model), slow_devices(a=4), **options)
    times = times_of(plan)
    assert plan.costs is not None
    assert total(plan, times) == pytest.approx(plan.costs.total, rel=ROUNDING)
    if options.get("mode") == "inference":
        assert times.backward_input == times.backward_weight == 0


def test_what_runs_once_is_at_the_end(planned: Planner) -> None:
    pins = {"inputs": {"*": "S(0)"}, "parameters": {"*": "S(0)"}}
    graph = small_graph(gpt2)
    once = planned(graph, slow_devices(a=4), pins=pins, micro_batches=4)
    each = planned(
        graph, slow_devices(a=4), pins=pins, micro_batches=4, reshard_after_forward="always"
    )
    assert any(c.frequency in GATHERED_ONCE for c in once.stages[0].reshardings)
    early, late = times_of(once), times_of(each)
    assert early.end > late.end
    assert early.forward < late.forward
    assert early.backward_input < late.backward_input


class TwoProducts(nn.Module):
    """The first product has no gradient of its input, the second has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(256, 256))
        self.second = nn.Parameter(torch.ones(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first @ self.second).sum()


def test_half_of_the_backward_of_a_product_is_the_gradient_of_its_weight(planned: Planner) -> None:
    graph = graph_of((TwoProducts(), {"x": torch.ones(4096, 256)}))
    plan = planned(graph, slow_devices(a=1))
    forward = {node.name: node.time for node in plan.stages[0].nodes}
    products = [seconds for name, seconds in forward.items() if "mm" in name or "matmul" in name]
    assert len(products) == 2
    times = times_of(plan)
    # Forward and one gradient for the first, forward and two gradients for the second.
    assert products[1] == pytest.approx(1.5 * products[0], rel=0.01)
    assert times.backward_weight == pytest.approx(products[0], rel=0.01)
    assert times.backward_input > 0.5 * products[0]


def test_recomputation_is_in_backward_of_all_gradients(planned: Planner) -> None:
    graph = small_graph(gpt2)
    plain = planned(graph, MESH)
    again = planned(graph, MESH, activation_checkpointing="always", pins=_pins(plain))
    assert again.costs is not None
    assert again.costs.recompute > 0
    before, after = times_of(plain), times_of(again)
    assert after.forward == pytest.approx(before.forward, rel=ROUNDING)
    assert before.backward_weight > 0
    assert after.backward_weight == 0  # all gradients at once, so that nothing runs three times
    added = after.backward_input - before.backward_input - before.backward_weight
    assert added == pytest.approx(again.costs.recompute, rel=ROUNDING)


def _pins(plan: Plan) -> dict[str, dict[str, str]]:
    """Pins of all layouts of a plan."""
    (stage,) = plan.stages
    return {
        "inputs": {i.target: i.layout for i in stage.inputs if i.kind == "user"},
        "parameters": {i.target: i.layout for i in stage.inputs if i.kind == "parameter"},
        "nodes": {
            node.name: f"{' '.join(node.inputs)} -> {' '.join(node.outputs)}"
            for node in stage.nodes
        },
    }
