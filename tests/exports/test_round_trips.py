"""Plan, export, read back: the same layouts, step time, memory and collectives."""

import pytest
from support.models import Case, gpt2, graph_of, llama, meta

from autoshard.errors import PlanError
from autoshard.exports import export_plan
from autoshard.planner import make_plan
from autoshard.requests.export_results import export_result
from benchmarks.round_trips import TARGETS, round_trip, slow_mesh

MODELS = {"llama": llama, "gpt2": gpt2}


def small(name: str) -> Case:
    return meta(MODELS[name], batch=8)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.matrix)])
def test_what_is_exported_whole_comes_back_as_it_was(model: str, target: str) -> None:
    found = round_trip(graph_of(small(model)), target)
    assert (found.share, found.collectives, found.same) == (1.0, 1.0, True), found.reason


def test_an_export_says_what_its_result_costs_and_keeps() -> None:
    """torchtitan always gathers embeddings and shards every parameter; this plan does not."""
    graph = graph_of(small("llama"))
    plan = make_plan(graph, slow_mesh("dp=2,tp=2"), algo="megatron", distributed_optimizer=True)
    result = export_result(plan, "torchtitan")
    assert result.costs.total != plan.costs.total
    text = export_plan(plan, "torchtitan", min_expressed=0, result=result)
    first = " ".join(text.split("\n#\n")[0].replace("\n# ", " ").split())
    assert first.startswith("# Expresses ")
    assert "As the framework runs it: " in first
    assert ", the plan " in first
    assert "100 % of collectives the same" not in first
    assert "% of collectives the same" in first


def test_a_framework_that_would_refuse_the_settings_is_said_to() -> None:
    plan = make_plan(graph_of(small("llama")), slow_mesh("dp=2,tp=2"), algo="megatron")
    with pytest.raises(PlanError, match="torchtitan does not combine DDP with TP"):
        export_result(plan, "torchtitan")
