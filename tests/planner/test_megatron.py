"""The fixed pattern of Megatron-LM, which is never better than the optimum."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import Planner, bert, gpt2, llama, meta, mlp, small_graph

from autoshard.base.outcome import SolveStatus
from autoshard.plan import Plan

LLAMA = partial(llama, layers=1)


def parameters(plan: Plan) -> dict[str, str]:
    return {p.target: p.layout for p in plan.stages[0].parameters}


def test_linears_go_by_columns_then_rows(planned: Planner) -> None:
    plan = planned(meta(mlp, 64, 512, 2048, 512), (2, 4), algo="megatron")
    assert parameters(plan) == {
        "up.weight": "I,S(0)",
        "up.bias": "I,S(0)",
        "down.weight": "I,S(1)",
        "down.bias": "I,I",
    }
    assert plan.stages[0].inputs[-1].layout == "S(0),R"
    assert {(c.kind, c.axis) for c in plan.collectives} == {
        ("all_reduce", "axis0"),
        ("all_reduce", "axis1"),
    }


def test_attention_goes_by_heads_and_embeddings_by_vocabulary(planned: Planner) -> None:
    plan = planned(small_graph(LLAMA), slow_devices(dp=2, tp=2), algo="megatron")
    lies = parameters(plan)
    by_columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    by_rows = ("o_proj", "down_proj")
    for name, layout in lies.items():
        module = name.split(".")[-2]
        if "norm" in module:
            assert layout == "I,I"
        elif module in by_columns:
            assert layout == "I,S(0)"
        elif module in by_rows:
            assert layout == "I,S(1)"
        else:
            assert module == "embed_tokens"
            assert layout in {"I,S(0)", "I,I"}
    attention = [n for n in plan.stages[0].nodes if "attention" in n.name]
    assert {n.outputs for n in attention} == {("S(0),S(1)",)}
    assert all(text.startswith("I,") for text in lies.values())
    assert not {c.kind for c in plan.collectives} & {"reduce_scatter", "all_to_all"}


def collectives(plan: Plan) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for collective in plan.collectives:
        counts[collective.kind, collective.direction] += collective.count
    return counts


def test_a_fused_projection_goes_by_heads_without_traffic(planned: Planner) -> None:
    mesh = slow_devices(1e-3, dp=1, tp=4)
    fewer, more = (
        planned(small_graph(partial(gpt2, layers=n)), mesh, algo="megatron") for n in (2, 3)
    )
    per_layer = collectives(more)
    per_layer.subtract(collectives(fewer))
    assert {kind: n for kind, n in per_layer.items() if n} == {
        ("all_reduce", "forward"): 2,
        ("all_reduce", "backward"): 2,
    }
    (stage,) = more.stages
    assert parameters(more)["transformer.h.0.attn.c_attn.weight"] == "I,S(1)/1+1+1"
    (split, *_) = (n for n in stage.nodes if n.name == "split")
    assert split.outputs == ("I,S(2)",) * 3
    (made,) = (v for v in stage.program["nodes"] if v["name"] == "split")
    assert not any(c.consumer == "split" or c.value in made["outputs"] for c in stage.reshardings)


def test_the_batch_may_have_an_axis_of_choice(planned: Planner) -> None:
    plan = planned(small_graph(LLAMA), slow_devices(a=2, b=2), algo="megatron", batch_axis="b")
    (ids, *_) = [i for i in plan.stages[0].inputs if i.kind == "user"]
    assert ids.layout == "R,S(0)"
    assert parameters(plan)["model.layers.0.mlp.up_proj.weight"] == "S(0),I"


def test_one_axis_that_is_the_batch_axis_is_data_parallelism(planned: Planner) -> None:
    plan = planned(small_graph(gpt2), slow_devices(a=4), algo="megatron", batch_axis="a")
    assert set(parameters(plan).values()) == {"I"}


def test_axes_that_do_not_divide_the_batch_stay_idle(planned: Planner) -> None:
    plan = planned(small_graph(mlp), slow_devices(a=3, b=4, c=2), algo="megatron")
    assert plan.stages[0].inputs[-1].layout == "R,S(0),R"


@pytest.mark.matrix
@pytest.mark.parametrize("build", [mlp, gpt2, bert, LLAMA])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_pattern_never_beats_the_optimum(
    planned: Planner, build: Callable[[], Any], mode: str
) -> None:
    graph, mesh = small_graph(build), slow_devices(dp=2, tp=2)
    best = planned(graph, mesh, mode=mode)
    pattern = planned(graph, mesh, mode=mode, algo="megatron")
    assert pattern.certificate.status is SolveStatus.OPTIMAL
    assert pattern.certificate.objective >= best.certificate.bound
    # It is a serious baseline: within twice of the optimum, not a straw man.
    assert pattern.certificate.objective <= 2 * best.certificate.objective
