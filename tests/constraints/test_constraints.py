"""Pins, forbidden collectives, the batch axis: plans satisfy them, and the checker verifies it."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from support.models import (
    Case,
    Mlp,
    Planner,
    bert,
    gpt2,
    graph_of,
    llama,
    meta,
    mlp,
    small_graph,
)
from torch import nn

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.constraints import DimOrigins, LayoutPattern
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph, Origin
from autoshard.layouts import Layout
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Pins, Plan, PlanOptions
from autoshard.plan.options.restrictions import restrictions
from autoshard.planner import make_plan

LLAMA = partial(llama, layers=1)
SLOW_2X2 = slow_devices(a=2, b=2)


def inputs(plan: Plan) -> dict[str, str]:
    return {i.target: i.layout for i in plan.stages[0].inputs}


def node(plan: Plan, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    (found,) = [n for n in plan.stages[0].nodes if n.name == name]
    return found.inputs, found.outputs


def kinds(plan: Plan, axis: str | None = None) -> set[str]:
    return {c.kind for c in plan.collectives if axis in (None, c.axis)}


def test_pins_hold(planned: Planner) -> None:
    pins = Pins(
        parameters={"*.c_fc.weight": "*,S(0)", "transformer.wte.weight": "S(0),S(1)"},
        inputs={"input_ids": "R,S(1)"},
        outputs={"1": "S(1),*"},
        nodes={"layer_norm": "S(0),R"},
    )
    graph = small_graph(gpt2)
    plan = planned(graph, SLOW_2X2, pins=pins)
    lies = inputs(plan)
    for name, layout in lies.items():
        if name.endswith("c_fc.weight"):
            assert layout.endswith(",S(0)")
    # The embedding is tied to the head, so it goes by either name.
    assert lies["lm_head.weight"] == "S(0),S(1)"
    assert lies["input_ids"] == "R,S(1)"
    assert plan.stages[0].outputs[1].layout.startswith("S(1),")
    assert node(plan, "layer_norm")[1] == ("S(0),R",)
    free = planned(graph, SLOW_2X2)
    assert plan.certificate.status is SolveStatus.OPTIMAL
    assert plan.certificate.objective > free.certificate.objective


def test_a_module_pin_holds_for_what_leaves_the_module(planned: Planner) -> None:
    graph = small_graph(gpt2)
    plan = planned(graph, SLOW_2X2, pins=Pins(nodes={"transformer.h.*.mlp": "S(0),S(2)"}))
    leaving = [
        n.name
        for i, n in enumerate(graph.nodes)
        if ".mlp" in n.module and any(".mlp" not in graph.nodes[u].module for u in users(graph, i))
    ]
    assert len(leaving) == 2
    for name in leaving:
        assert node(plan, name)[1] == ("S(0),S(2)",)


def users(graph: Graph, i: int) -> list[int]:
    return [user for value in graph.nodes[i].outputs for user, _ in graph.consumers[value]]


def test_a_node_pin_may_give_inputs_too(planned: Planner) -> None:
    pins = Pins(nodes={"linear": "* S(1),* * -> P,*"})
    taken, made = node(planned(small_graph(mlp), SLOW_2X2, pins=pins), "linear")
    assert taken[1].startswith("S(1),")
    assert made[0].startswith("P,")


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_words_of_dtensor_mean_the_same(planned: Planner, mode: str) -> None:
    words = {"up.weight": "Shard(dim=0),Replicate()", "down.weight": "Replicate(),Shard(1)"}
    types = {"up.weight": "S(0),R", "down.weight": "I,S(1)"}
    plans = [
        planned(small_graph(mlp), SLOW_2X2, mode=mode, pins=Pins(parameters=pins))
        for pins in (words, types)
    ]
    whole = "I" if mode == "training" else "R"
    assert inputs(plans[0])["up.weight"] == f"S(0),{whole}"
    assert plans[0].stages == plans[1].stages


def test_a_pin_says_how_axes_nest() -> None:
    axes = NontrivialAxes.of(SLOW_2X2)
    inward = LayoutPattern.parse("S(0),S(0);1>0", axes, exact=True)
    assert inward.matches(Layout.parse("S(0),S(0);1>0"))
    assert not inward.matches(Layout.parse("S(0),S(0)"))
    assert LayoutPattern.parse("S(0),*", axes, exact=True).matches(Layout.parse("S(0),S(0);1>0"))


def matching(text: str, *layouts: str) -> list[bool]:
    pattern = LayoutPattern.parse(text, NontrivialAxes.of(SLOW_2X2), exact=True)
    return [pattern.matches(Layout.parse(layout)) for layout in layouts]


def test_a_pin_may_leave_the_dim_or_the_nesting_open() -> None:
    nested = "S(0),S(0)", "S(0),S(0);1>0"
    assert matching("S(0),S(0)", *nested) == [True, False]
    assert matching("S(0),Shard(0);*", *nested, "S(0),S(1)") == [True, True, False]
    assert (
        matching("S(*),Shard(*)", *nested, "S(0),S(1)", "S(0),R", "R,R") == [True] * 3 + [False] * 2
    )
    assert matching("S(*),I", "S(1),I", "S(0)/1+1,I", "S(1),R", "P,I") == [True, True, False, False]


def test_words_of_dtensor_give_nesting_and_sections() -> None:
    nested = "_StridedShard(0, split_factor=2),Shard(0)"
    assert matching(nested, "S(0),S(0);1>0", "S(0),S(0)") == [True, False]
    sections = "Replicate(),_StridedShard(dim=0, sf=3)"
    assert matching(sections, "I,S(0)/1+1+1", "R,S(0)/1+1+1", "I,S(0)") == [True, True, False]


def num_ranks(plan: Plan, name: str) -> int:
    """Number of ranks over which an input is sharded."""
    (placed,) = [i for i in plan.stages[0].inputs if i.target == name]
    return prod(a // b for a, b in zip(placed.shape, placed.local_shape, strict=True))


def test_parameters_may_be_pinned_to_be_sharded_anyhow(planned: Planner) -> None:
    graph = graph_of(meta(mlp, 64, 512, 512, 6))
    free = planned(graph, SLOW_2X2, pins=Pins(parameters={"*": "I,I"}))
    assert num_ranks(free, "up.weight") == 1
    anyhow = {"*": "Shard(*),Shard(*)"}
    plan = planned(graph, SLOW_2X2, pins=Pins(parameters=anyhow))
    for name in ("up.weight", "up.bias", "down.weight"):
        assert num_ranks(plan, name) == 4
    # Six features divide over one axis only.
    assert num_ranks(plan, "down.bias") == 2
    dims = [
        planned(graph, SLOW_2X2, pins=Pins(parameters={**anyhow, "up.weight": layout}))
        for layout in ("S(0),S(0)", "S(0),S(1)", "S(1),S(0)", "S(1),S(1)", "S(0),S(0);1>0")
    ]
    objective = plan.certificate.objective
    assert all(objective <= other.certificate.objective * (1 + 1e-9) for other in dims)


def test_a_pin_introduces_interleaved_sections(planned: Planner) -> None:
    graph = graph_of(meta(mlp, 64, 512, 512, 512))
    pins = Pins(parameters={"up.weight": "*,S(0)/1+1+2+4", "down.weight": "*,S(1)/1+1+2+4"})
    with pytest.raises(OptionError, match="pin the operators that read the tensor"):
        planned(graph, SLOW_2X2, pins=pins)
    equal = {"up.weight": "*,S(0)/1+1", "down.weight": "*,_StridedShard(1, split_factor=2)"}
    plan = planned(graph, SLOW_2X2, pins=Pins(parameters=equal))
    assert inputs(plan)["up.weight"].endswith(",S(0)/1+1")
    assert inputs(plan)["down.weight"].endswith(",S(1)/1+1")
    # What the first product makes has the sections of its weight, and the second sums over them.
    assert node(plan, "linear")[1][0].endswith(",S(1)/1+1")
    assert node(plan, "linear_1")[0][0].endswith(",S(1)/1+1")
    # Operators may have sections of several sizes.
    unequal = planned(graph, SLOW_2X2, pins=Pins(nodes={"linear": "*,S(1)/1+1+2+4"}))
    assert node(unequal, "linear")[1][0].endswith(",S(1)/1+1+2+4")


def test_each_operator_is_sharded_over_the_named_axes(planned: Planner) -> None:
    graph = graph_of(meta(mlp, 6, 512, 512, 512))
    mesh = make_mesh((2, 2))

    def idle(plan: Plan, axis: int) -> set[str]:
        return {
            n.name
            for n in plan.stages[0].nodes
            if not any(Layout.parse(x).types[axis].is_shard for x in (*n.inputs, *n.outputs))
        }

    assert idle(planned(graph, mesh, skip_fully_replicated=True), 0) | idle(
        planned(graph, mesh, skip_fully_replicated=True), 1
    )
    second = planned(graph, mesh, skip_fully_replicated=["axis1"])
    assert not idle(second, 1)
    both = planned(graph, mesh, skip_fully_replicated=["axis0", "axis1"])
    assert not idle(both, 0) | idle(both, 1)
    assert second.certificate.objective <= both.certificate.objective


def test_axes_that_an_operator_cannot_fill_together_share_it(planned: Planner) -> None:
    # Four points in all: one of the two axes has no work left, and the larger one is preferred.
    graph = graph_of(meta(elementwise, 4))
    both = ["axis0", "axis1"]
    plan = planned(graph, make_mesh((2, 4)), mode="inference", skip_fully_replicated=both)
    for placed in plan.stages[0].nodes:
        assert [t.is_shard for t in Layout.parse(placed.outputs[0]).types] == [False, True]


def test_a_pin_on_an_axis_of_one_rank_says_nothing(planned: Planner) -> None:
    graph = small_graph(mlp)
    mesh = slow_devices(a=1, b=4)
    pinned = planned(graph, mesh, pins=Pins(parameters={"*.weight": "S(1),*"}))
    assert pinned.stages == planned(graph, mesh).stages


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"])
def test_a_forbidden_collective_does_not_run(planned: Planner, kind: str) -> None:
    graph = graph_of(meta(mlp, 64, 512, 512, 512))
    mesh = slow_devices(a=2, b=2)
    assert kind not in kinds(planned(graph, mesh, forbid=[{"kind": kind}]))
    only = planned(graph, mesh, forbid=[{"kind": kind, "axis": "b"}])
    assert kind not in kinds(only, "b")


def moved(plan: Plan, kind: str) -> set[str]:
    """The values that a collective of this kind reshards, forward or backward."""
    (stage,) = plan.stages
    return {
        resharding.value
        for resharding in stage.reshardings
        if any(kind in (step.forward, step.backward) for step in resharding.steps)
    }


def test_a_collective_may_be_forbidden_of_parameters_or_of_activations(planned: Planner) -> None:
    # Each parameter is stored sharded; with a small batch, activations would rather be gathered.
    graph = graph_of(meta(mlp, 8, 512, 512, 512))
    mesh = slow_devices(a=2, b=2)
    pins = Pins(parameters={"*.weight": "S(0),S(0)"})
    weights = {i.name for i in graph.parameters}
    free = planned(graph, mesh, pins=pins)
    assert moved(free, "all_gather") - weights
    zero = planned(graph, mesh, pins=pins, forbid=[{"kind": "all_gather", "of": "activations"}])
    assert moved(zero, "all_gather")
    assert moved(zero, "all_gather") <= weights
    kept = planned(graph, mesh, pins=pins, forbid=[{"kind": "all_gather", "of": "parameters"}])
    assert moved(kept, "all_gather").isdisjoint(weights)
    mixed = [{"kind": "all_gather", "of": "activations", "axis": "b"}]
    on_one = planned(graph, mesh, pins=pins, forbid=mixed)
    assert "all_gather" in kinds(on_one, "b")
    assert free.certificate.objective <= on_one.certificate.objective
    assert on_one.certificate.objective <= zero.certificate.objective


def test_forbidding_what_a_plan_runs_makes_it_dearer(planned: Planner) -> None:
    graph = small_graph(gpt2)
    free = planned(graph, SLOW_2X2)
    for kind in kinds(free) - {"all_reduce"}:
        plan = planned(graph, SLOW_2X2, forbid=[{"kind": kind}])
        assert plan.certificate.bound > free.certificate.objective


@pytest.mark.parametrize("build", [mlp, gpt2, bert, LLAMA])
def test_the_batch_is_cut_on_its_axis_and_on_no_other(
    planned: Planner, build: Callable[[], Any]
) -> None:
    graph = small_graph(build)
    origins = DimOrigins(graph)
    plan = planned(graph, SLOW_2X2, batch_axis="b")
    for placed in plan.stages[0].inputs:
        if placed.kind == "user":
            first, second = Layout.parse(placed.layout).types
            assert (str(first) != "S(0)", str(second)) == (True, "S(0)")
    for call, placed in zip(graph.nodes, plan.stages[0].nodes, strict=True):
        types = [Layout.parse(text).types for text in (*placed.inputs, *placed.outputs)]
        for tensor, dim in origins.of_call(call, Origin.BATCH):
            assert str(types[tensor][0]) != f"S({dim})"


def test_a_batch_axis_of_one_rank_leaves_the_batch_whole(planned: Planner) -> None:
    case = graph_of(meta(mlp, 65536, 512, 512, 512))
    free = planned(case, (1, 4))
    assert node(free, "linear")[1][0].endswith("S(0)")
    pinned = planned(case, (1, 4), batch_axis="axis0")
    for name in ("linear", "relu", "linear_1"):
        assert not node(pinned, name)[1][0].endswith("S(0)")
    assert any("S(" in inputs(pinned)[name] for name in ("up.weight", "down.weight"))


def test_the_batch_is_followed_through_views() -> None:
    graph = small_graph(gpt2)
    origins = DimOrigins(graph)
    (addmm, *_) = [n for n in graph.nodes if n.operator == "aten.addmm.default"]
    attention = next(n for n in graph.nodes if "attention" in n.operator)
    assert origins.batch_size == 4
    # [b*s, h] x [h, n]: the outer factor of dim 0 is the batch.
    assert origins.of_call(addmm, Origin.BATCH) == {(1, 0), (3, 0)}
    assert (0, 0) in origins.of_call(attention, Origin.BATCH)
    assert (0, 1) in origins.of_call(attention, Origin.MODEL)
    assert (0, 2) in origins.of_call(attention, Origin.INPUT)


def test_small_parameters_stay_whole(planned: Planner) -> None:
    graph = small_graph(gpt2)
    pins = Pins(parameters={"*": "S(*),S(*)"})
    every = inputs(planned(graph, SLOW_2X2, pins=pins))
    sizes = {p.target: graph.values[p.name].numel for p in graph.parameters}
    assert all("S" in every[name] for name in sizes)
    limit = sizes["transformer.wpe.weight"]
    large = Pins(parameters={name: "S(*),*" for name, size in sizes.items() if size >= limit})
    plan = planned(graph, SLOW_2X2, pins=large, unsharded_below=limit)
    found = inputs(plan)
    assert {name for name in sizes if "S" not in found[name]} == {
        name for name, size in sizes.items() if size < limit
    }
    assert f"unsharded_below {limit}" in restrictions(plan.options)
    conflict = make_plan(graph, SLOW_2X2, PlanOptions(pins=pins, unsharded_below=limit))
    assert f"unsharded_below {limit}" in str(conflict.reason)


def test_no_heavy_operator_does_all_work_everywhere(planned: Planner) -> None:
    graph = small_graph(LLAMA)
    mesh = make_mesh((2, 2))
    free = planned(graph, mesh)
    plan = planned(graph, mesh, skip_fully_replicated=True)

    def whole(plan: Plan) -> set[str]:
        return {
            n.name
            for call, n in zip(graph.nodes, plan.stages[0].nodes, strict=True)
            if call.operator in {"aten.linear.default", "aten.scaled_dot_product_attention.default"}
            and "S(" not in "".join((*n.inputs, *n.outputs))
        }

    # On fast devices a model this small is not worth cutting.
    assert whole(free)
    assert not whole(plan)


class OddMlp(Mlp):
    """An MLP with a bias that few ranks can share."""

    def __init__(self) -> None:
        super().__init__(8, 8, 8)
        self.odd = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(super().forward(x))


def odd_mlp() -> Case:
    return OddMlp(), {"x": torch.randn(6, 8)}


def elementwise(size: int) -> Case:
    return nn.ReLU(), {"input": torch.randn(size)}


NO_NAME = "no such name"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "parameter": ({"pins": {"parameters": {"nothing.*": "R,R"}}}, NO_NAME),
    "input": ({"pins": {"inputs": {"up.weight": "R,R"}}}, NO_NAME),
    "output": ({"pins": {"outputs": {"7": "R,R"}}}, NO_NAME),
    "node": ({"pins": {"nodes": {"conv*": "R,R"}}}, NO_NAME),
    "too few parts": ({"pins": {"inputs": {"x": "R"}}}, "has 1 parts"),
    "no type": ({"pins": {"inputs": {"x": "R,Q"}}}, "'Q'"),
    "no nesting": ({"pins": {"inputs": {"x": "S(0),R;1>0"}}}, "non-ascending order"),
    "no dim": ({"pins": {"parameters": {"up.bias": "S(1),R"}}}, "no dim 1"),
    "no divisor": ({"pins": {"inputs": {"x": "S(0),S(0)"}}}, "does not divide into 4"),
    "no dims": (
        {"pins": {"outputs": {"0": "S(*),S(*)"}, "inputs": {"x": "S(*),S(1);1>0"}}},
        "order",
    ),
    "too few elements": ({"pins": {"parameters": {"odd.bias": "S(*),S(*)"}}}, "at most 2 of the 4"),
    "sections": (
        {"pins": {"parameters": {"up.bias": "I,S(0)/1+1+1"}}},
        "of the sections 1\\+1\\+1",
    ),
    "axis to share": ({"skip_fully_replicated": ["pp"]}, "'pp'"),
    "partial at rest": ({"pins": {"parameters": {"up.weight": "P,R"}}}, "has no such strategy"),
    "no rule": ({"pins": {"nodes": {"relu": "P,R"}}}, "has no such strategy"),
    "too few layouts": ({"pins": {"nodes": {"linear": "R,R -> R,R"}}}, "gives 1 inputs"),
    "forbidden axis": ({"forbid": [{"kind": "all_gather", "axis": "pp"}]}, "'pp'"),
    "batch axis": ({"batch_axis": "pp"}, "'pp'"),
    "batch size": ({"batch_axis": "a"}, "does not divide the batch of 6"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_named(name: str) -> None:
    options, complaint = BAD[name]
    mesh = slow_devices(a=4, b=2) if name == "batch size" else SLOW_2X2
    graph = graph_of(meta(odd_mlp))
    with pytest.raises(OptionError, match=complaint):
        make_plan(graph, mesh, PlanOptions(**options))


def test_statistics_that_a_batch_norm_updates_stay_whole(planned: Planner) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    inputs, pins = {"input": torch.randn(8, 16)}, Pins(buffers={"1.running_*": "S(0),R"})
    with pytest.raises(OptionError, match=r"pin of buffer '1\.running_\*'.*a batch norm updates"):
        make_plan(graph_of((model, inputs)), SLOW_2X2, PlanOptions(pins=pins))
    planned(graph_of((model, inputs)), (2, 2), pins=Pins(buffers={"*": "S(*),S(*)"}))
    planned(graph_of((model.eval(), inputs)), (2, 2), pins=pins)


DISOBEYED: dict[str, tuple[dict[str, Any], str]] = {
    "parameter": ({"pins": {"parameters": {"up.weight": "S(0),S(1)"}}}, "pin of parameter"),
    "input": ({"pins": {"inputs": {"x": "S(0),S(1)"}}}, "pin of input"),
    "output": ({"pins": {"outputs": {"0": "S(0),S(1)"}}}, "pin of output"),
    "node": ({"pins": {"nodes": {"linear": "S(0),S(1)"}}}, "pin of node"),
    "collective": ({"forbid": [{"kind": "all_reduce"}]}, "against the forbidden all_reduce"),
    "collective of activations": (
        {"forbid": [{"kind": "all_reduce", "of": "activations"}]},
        "against the forbidden all_reduce:activations",
    ),
    "batch": ({"batch_axis": "axis0"}, "does not obey the batch_axis"),
    "pattern": ({"algo": "megatron"}, "does not obey the algo"),
    "any dim": ({"pins": {"parameters": {"*": "*,S(*)"}}}, "to '*,S(*)'"),
    "small parameters": ({"unsharded_below": 1 << 30}, "does not obey the unsharded_below"),
    "shared work": ({"skip_fully_replicated": ["axis1"]}, "skip_fully_replicated 'axis1'"),
}


@pytest.mark.parametrize("name", DISOBEYED)
def test_the_checker_sees_who_does_not_obey(name: str, planned: Planner) -> None:
    options, finding = DISOBEYED[name]
    # Two-way tensor parallelism over the outer axis; the inner one is idle.
    pins = Pins(parameters={"*": "*,I"}, inputs={"*": "R,R"}, nodes={"*": "*,Replicate()"})
    plan = planned(graph_of(meta(mlp, 2, 2048, 8192, 2048)), (2, 2), pins=pins)
    assert kinds(plan) == {"all_reduce"}
    claimed = plan.model_copy(update={"options": PlanOptions(**options)})
    assert any(finding in f for f in check_plan(claimed)), check_plan(claimed)


def test_the_checker_sees_idle_work(planned: Planner) -> None:
    mesh: Mesh = make_mesh((2, 2))
    plan = planned(small_graph(LLAMA), mesh)
    claimed = plan.model_copy(update={"options": PlanOptions(skip_fully_replicated=True)})
    assert any("skip_fully_replicated" in f for f in check_plan(claimed))
