"""Plans with overlap of weight collectives and compute, and their check."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support.meshes import slow_devices, slow_mase_mesh
from support.models import Bias, Planner, bert, gpt2, graph_of, llama, meta, mlp, small_graph
from torch import nn

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.mesh import Axis, Device, Link, Mesh, Topology, make_mesh
from autoshard.plan import Plan, PlanOptions, Resharding
from autoshard.planner import explain, make_plan
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.stage_builder import Decisions, StageBuilder
from autoshard.report import compare_plans
from autoshard_solver_cache import NamespacedCache, SolverCache

NEARLY = 1e-5
"""Relative; a millionth of what is hidden is charged."""


def by_hand(bandwidth: float) -> Mesh:
    """Two devices that handle a byte per second, with links of some bytes per second."""
    device = Device("by hand", {"float32": 1e30}, memory_bandwidth=1.0, memory=1 << 20)
    topology = Topology("by hand", device, (Link("link", None, bandwidth),), backend="gloo")
    return Mesh((Axis("dp", 2),), topology)


def resharding_of(plan: Plan, parameter: str) -> Resharding:
    (stage,) = plan.stages
    (name,) = [p.name for p in stage.parameters if p.target == parameter]
    (found,) = [c for c in stage.reshardings if c.value == name]
    return found


DATA_PARALLEL: dict[str, Any] = {
    "pins": {"inputs": {"x": "S(0)"}, "parameters": {"*": "I"}, "nodes": {"add*": "S(0)"}}
}
FULLY_SHARDED: dict[str, Any] = {
    "pins": {
        "inputs": {"x": "S(0)"},
        "parameters": {"*": "S(0)"},
        "nodes": {"add*": "S(0) R -> S(0)"},
    }
}
FORWARD = 4 * 32 + 32 + 4 * 32
"""Bytes of an addition on [4, 8] of 32-bit floats: two are read, one is written."""
BACKWARD = FORWARD + 32
"""The gradient of the bias is written too."""


@pytest.mark.parametrize("bandwidth", [1.0, 1 / 9, 1 / 20])
def test_a_reduction_runs_beside_backward(planned: Planner, bandwidth: float) -> None:
    graph = graph_of((Bias(), {"x": torch.zeros(8, 8)}))
    plan = planned(graph, by_hand(bandwidth), overlap=True, **DATA_PARALLEL)
    reduction = 32 / bandwidth
    bias = resharding_of(plan, "bias")
    assert (bias.time, bias.overlapped) == pytest.approx(
        (reduction, min(reduction, BACKWARD)), rel=NEARLY
    )
    assert plan.costs.overlapped == bias.overlapped
    apart = planned(graph, by_hand(bandwidth), **DATA_PARALLEL)
    assert apart.certificate.objective - plan.certificate.objective == pytest.approx(
        bias.overlapped
    )


@pytest.mark.parametrize("bandwidth", [1.0, 1 / 19, 1 / 50])
def test_a_gather_runs_beside_forward(planned: Planner, bandwidth: float) -> None:
    graph = graph_of((Bias(), {"x": torch.zeros(8, 8)}))
    plan = planned(graph, by_hand(bandwidth), overlap=True, **FULLY_SHARDED)
    moved = 16 / bandwidth  # half of it, forward as well as backward
    bias = resharding_of(plan, "bias")
    hidden = min(moved, FORWARD) + min(moved, BACKWARD)
    assert (bias.time, bias.overlapped) == pytest.approx((2 * moved, hidden), rel=NEARLY)


class Product(nn.Module):
    """Backward needs the weight, which may be gathered again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * self.weight).sum()


@pytest.mark.parametrize("bandwidth", [1.0, 1 / 12, 1 / 25, 1 / 50])
def test_gathering_again_shares_backward_with_the_reduction(
    planned: Planner, bandwidth: float
) -> None:
    pins = {
        "inputs": {"x": "S(0)"},
        "parameters": {"*": "S(0)"},
        "nodes": {"mul*": "S(0) R -> S(0)"},
    }
    graph = graph_of((Product(), {"x": torch.ones(8, 8, requires_grad=True)}))
    plan = planned(
        graph, by_hand(bandwidth), overlap=True, reshard_after_forward="always", pins=pins
    )
    moved = 16 / bandwidth
    weight = resharding_of(plan, "weight")
    (node,) = [n for n in plan.stages[0].nodes if n.name.startswith("mul")]
    hidden = min(moved, FORWARD) + min(2 * moved, node.time - FORWARD)
    assert weight.regather
    assert plan.costs.recompute == pytest.approx(moved, rel=NEARLY)
    assert weight.overlapped == pytest.approx(hidden, rel=NEARLY)
    assert plan.certificate.objective == pytest.approx(plan.costs.total)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "bert": bert, "llama": llama}
MESHES = {
    "slow links": slow_devices(latency=1e-4, dp=2, tp=2),
    "two nodes": slow_mase_mesh(),
    "one axis": make_mesh((4,)),
}
LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "inference": {"mode": "inference"},
    "megatron": {"algo": "megatron"},
}
COMPARED = [
    pytest.param(name, mesh, limits, marks=pytest.mark.long if (i + j + k) % 3 else ())
    for (i, name), (j, mesh), (k, limits) in product(*map(enumerate, (MODELS, MESHES, LIMITS)))
]
"""`make test` has each model with each mesh, each with each set of options, and so on."""


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mesh", "limits"), COMPARED)
def test_it_never_costs_more(planned: Planner, name: str, mesh: str, limits: str) -> None:
    graph, options = small_graph(MODELS[name]), {"relative_gap": 0, **LIMITS[limits]}
    apart = planned(graph, MESHES[mesh], overlap=False, **options)
    beside = planned(graph, MESHES[mesh], overlap=True, **options)
    assert apart.certificate.is_exact
    assert beside.certificate.is_exact
    assert beside.certificate.objective <= apart.certificate.objective * (1 + 1e-9)
    assert apart.costs.overlapped == 0
    assert beside.costs.overlapped <= beside.costs.communication


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": "always"}, {"activation_checkpointing": "always"}]
)
def test_compute_hides_once_and_only_weights(planned: Planner, options: dict[str, Any]) -> None:
    graph = small_graph(gpt2)
    plan = planned(graph, slow_devices(latency=1e-3, dp=2, tp=2), overlap=True, **options)
    (stage,) = plan.stages
    parameters = {p.name for p in stage.parameters}
    times = {node.name: node.time for node in stage.nodes}
    claimed = dict.fromkeys(times, 0.0)
    assert any(c.overlapped for c in stage.reshardings)
    for resharding in stage.reshardings:
        if resharding.overlapped:
            assert resharding.value in parameters
            assert resharding.consumer is not None
            claimed[resharding.consumer] += resharding.overlapped
    assert all(claimed[name] <= time for name, time in times.items())


@pytest.mark.parametrize(("topology", "overlaps"), [("h100-sxm", True), ("cpu-10gbe", False)])
def test_the_default_is_that_of_the_device(
    planned: Planner, topology: str, *, overlaps: bool
) -> None:
    graph, mesh = small_graph(gpt2), make_mesh((4,), topology=topology)
    default, stated = (planned(graph, mesh, overlap=o, algo="fsdp2") for o in (None, overlaps))
    assert default.costs == stated.costs
    assert (default.costs.overlapped > 0) == overlaps


def test_a_budget_is_met_for_less(planned: Planner) -> None:
    graph = graph_of(meta(mlp, 2048, 1024, 1024, 1024))
    free = planned(graph, (4,), overlap=False)
    whole = free.memory.parameters + free.memory.gradients + free.memory.optimizer
    budget = free.memory.peak - whole // 2
    apart, beside = (
        planned(graph, (4,), memory_budget=budget, overlap=o, relative_gap=0) for o in (False, True)
    )
    assert beside.memory.peak <= budget
    assert beside.certificate.objective < apart.certificate.objective
    assert beside.certificate.bound <= beside.certificate.objective
    assert beside.certificate.gap < 0.01


def formulations() -> Iterator[Formulation]:
    graph = graph_of(meta(lambda: (Bias(), {"x": torch.zeros(8, 8)})))
    for size, mode, mesh in product(
        (2, 4), ("training", "inference"), (by_hand(1 / 5), slow_devices(latency=1e-6, a=2))
    ):
        sized = Mesh((Axis("a", size),), mesh.topology)
        options = PlanOptions(mode=mode, overlap=True)
        yield Formulation.of(graph, sized, options)


@pytest.mark.parametrize("formulation", list(formulations()))
def test_the_plan_is_the_best_of_all(planned: Planner, formulation: Formulation) -> None:
    """Every choice is written down as a plan, whose reshardings say what is hidden."""
    totals = []
    for choice in product(*(range(len(v.strategies)) for v in formulation.variables)):
        price = formulation.problem.objective(choice)
        if np.isfinite(price):
            builder = StageBuilder(formulation, Decisions(np.array(choice)))
            totals.append(builder.costs(builder.stage()).total)
            assert totals[-1] == pytest.approx(price, rel=1e-9)
    mode = "training" if formulation.prices.training else "inference"
    plan = planned(formulation.graph, formulation.mesh, mode=mode, overlap=True, relative_gap=0)
    assert plan.certificate.objective == pytest.approx(min(totals), rel=1e-9)


def test_solved_blocks_are_not_mistaken_for_those_without() -> None:
    graph = graph_of(meta(llama, layers=4))
    mesh, block_cache = (
        slow_devices(latency=1e-4, dp=2, tp=2),
        NamespacedCache(SolverCache("sqlite://"), "blocks"),
    )
    make_plan(graph, mesh, PlanOptions(), block_cache=block_cache)
    first, second, fresh = (
        make_plan(graph, mesh, PlanOptions(overlap=True), block_cache=store)
        for store in (block_cache, block_cache, None)
    )
    assert first.stages == second.stages == fresh.stages
    assert any(block.num_solved for block in first.provenance.blocks)
    assert any(block.num_reused for block in second.provenance.blocks)
    assert not any(block.num_solved for block in second.provenance.blocks)


@pytest.fixture(scope="module")
def overlapped(planned: Planner) -> Plan:
    graph = graph_of((Bias(), {"x": torch.zeros(8, 8)}))
    return planned(graph, by_hand(1.0), overlap=True, **DATA_PARALLEL)


def hides_more(document: dict[str, Any], seconds: float) -> None:
    for resharding in document["stages"][0]["reshardings"]:
        if resharding["overlapped"]:
            resharding["overlapped"] += seconds


def flatters(document: dict[str, Any]) -> None:
    """Everything that adds up to the objective."""
    hides_more(document, 1.0)
    document["costs"]["overlapped"] += 1.0
    document["costs"]["total"] -= 1.0
    document["certificate"] = {"status": "feasible", "bound": None, "gap": None} | {
        "objective": document["costs"]["total"]
    }


@pytest.mark.parametrize(
    ("tamper", "finding"),
    [
        (lambda d: hides_more(d, 1.0), "with compute, not"),
        (lambda d: d["costs"].update(overlapped=0.0), "overlapped adds up to"),
        (flatters, "with compute, not"),
        (lambda d: d["options"]["runtime"].update(overlap=False), "overlaps 0.0 s with compute"),
    ],
)
def test_tampering_is_found_out(
    overlapped: Plan, tamper: Callable[[dict[str, Any]], None], finding: str
) -> None:
    document = json.loads(overlapped.to_json())
    tamper(document)
    findings = check_plan(Plan.from_json(json.dumps(document)))
    assert any(re.search(finding, f) for f in findings), findings


def test_plans_with_and_without_are_compared(planned: Planner, overlapped: Plan) -> None:
    graph = graph_of((Bias(), {"x": torch.zeros(8, 8)}))
    difference = compare_plans(planned(graph, by_hand(1.0), **DATA_PARALLEL), overlapped)
    figures = {figure.name: figure for figure in difference.costs}
    assert figures["overlapped"].difference == overlapped.costs.overlapped
    assert figures["total"].difference == pytest.approx(-overlapped.costs.overlapped)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(mlp, 64, 256, 512, 256))


@pytest.mark.parametrize("name", ["linear", "up.weight"])
def test_alternatives_are_priced_with_what_they_hide(
    planned: Planner, graph: Graph, name: str
) -> None:
    mesh = slow_devices(latency=1e-3, a=2, b=2)
    plan = planned(graph, mesh, overlap=True)
    explanation = explain(graph, plan, name)
    kind = "nodes" if name == "linear" else "parameters"
    for alternative in explanation.alternatives[::5]:
        pinned = planned(
            graph, mesh, overlap=True, relative_gap=0, pins={kind: {name: alternative.layouts}}
        )
        assert pinned.certificate.objective == pytest.approx(alternative.total, rel=1e-9)
        if alternative.override is not None:
            assert alternative.regret <= alternative.override + 1e-12
