"""The memory that a program needs at least, by arithmetic, and that of real plans."""

from collections.abc import Callable
from typing import Any

import pytest
from scenarios.architectures import mlp as chain
from support.meshes import slow_devices
from support.models import Planner, gpt2, graph_of, llama, meta, residuals

from autoshard.base.outcome import SolveStatus
from autoshard.graph import Graph
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.planner.memory.least_activations import least_activations
from autoshard.planner.memory.least_memory import LeastMemory

MESH = slow_devices(a=2, b=2)
MODELS: dict[str, Callable[[], Graph]] = {
    "gpt2": lambda: graph_of(meta(gpt2, batch=16, sequence=32)),
    "llama": lambda: graph_of(meta(llama, layers=3)),
    "residuals": lambda: graph_of(meta(residuals, layers=4, batch=512)),
    "chain": lambda: chain(layers=6, batch=256, width=32),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "free": {},
    "nothing recomputed": {
        "activation_checkpointing": "never",
        "reshard_after_forward": "never",
    },
    "all recomputed": {"activation_checkpointing": "always", "reshard_after_forward": "always"},
    "several micro-batches": {"activation_checkpointing": "always", "micro_batches": 4},
}


@pytest.fixture(scope="module", params=MODELS)
def graph(request: pytest.FixtureRequest) -> Graph:
    return MODELS[request.param]()


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPTIONS)
def test_no_plan_has_less(planned: Planner, graph: Graph, name: str) -> None:
    plan = planned(graph, MESH, **OPTIONS[name])
    activations = least_activations(graph, plan.options)
    kept = plan.memory.turn - plan.memory.parameters - plan.memory.optimizer
    assert 0 < activations <= MESH.num_devices * kept
    # A budget for which activations are counted.
    asked = plan.options.with_values(memory_budget=plan.memory.peak)
    assert LeastMemory.of(graph, MESH, asked).fits


def test_more_layers_keep_more_although_each_is_recomputed() -> None:
    few, many = (graph_of(meta(residuals, layers=number, batch=512)) for number in (3, 6))
    options = PlanOptions()
    more = least_activations(many, options) - least_activations(few, options)
    # Each layer keeps its input: 512 x 32 numbers of 4 bytes.
    assert more == 3 * 512 * 32 * 4
    never = PlanOptions(activation_checkpointing="never")
    assert least_activations(many, never) > least_activations(many, options)


@pytest.mark.thorough
def test_activations_alone_can_exceed_all_devices() -> None:
    graph = graph_of(meta(residuals, layers=100, batch=1 << 20))
    assert len(graph.nodes) > 500
    plan = make_plan(graph, 8, memory_budget=10**9)
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    assert "activations that no recomputation avoids 1" in plan.reason
    assert "without activations" not in plan.reason
    assert not plan.provenance.statistics
    pipeline = make_plan(graph, 8, memory_budget=10**9, stages=2, micro_batches=4)
    assert pipeline.certificate.status is SolveStatus.INFEASIBLE
    assert "gradients" in pipeline.reason
