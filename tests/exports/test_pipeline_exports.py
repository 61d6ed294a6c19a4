"""Exports of plans of several stages; `test_exports` has those to Megatron-LM."""

import tomllib

import pytest
from support.models import Planner, graph_of, llama, meta

from autoshard.errors import PlanError
from autoshard.exports import EXPORT_TARGETS, export_plan
from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Checkpoint, Plan


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(llama, layers=5))


@pytest.fixture(scope="module")
def interleaved(planned: Planner, graph: Graph) -> Plan:
    """Stages of 1, 2, 1 and 1 layers on two pipeline ranks, tensor-parallel over two devices."""
    mesh = make_mesh((4, 2), axes=("dp", "tp"))
    return planned(
        graph,
        mesh,
        balance=(1, 2, 1, 1),
        stages_per_rank=2,
        schedule="Interleaved1F1B",
        micro_batches=4,
        algo="megatron",
    )


@pytest.mark.thorough
def test_torchtitan_gets_the_modules_of_stages(interleaved: Plan) -> None:
    text = export_plan(interleaved, "torchtitan", min_expressed=0)
    found = tomllib.loads(text)["parallelism"]
    assert found["pipeline_parallel_degree"] == 2
    assert found["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert found["tensor_parallel_degree"] == 2
    assert found["data_parallel_replicate_degree"] * found["data_parallel_shard_degree"] == 2
    assert found["pipeline_parallel_microbatch_size"] == 2
    modules = found["module_fqns_per_model_part"]
    assert modules[1] == ["model.layers.1", "model.layers.2"]
    assert {"model.embed_tokens", "model.layers.0"} <= set(modules[0])
    assert {"model.layers.4", "model.norm", "lm_head"} <= set(modules[3])


@pytest.mark.thorough
def test_torchtitan_is_told_of_recomputation_in_any_stage(interleaved: Plan) -> None:
    stages = list(interleaved.stages)
    first, last = stages[2].nodes[0].name, stages[2].nodes[-1].name
    checkpoint = Checkpoint(first=first, last=last)
    stages[2] = stages[2].model_copy(update={"checkpoints": (checkpoint,)})
    plan = interleaved.model_copy(update={"stages": tuple(stages)})
    for changed, mode in ((plan, "full"), (interleaved, "none")):
        settings = tomllib.loads(export_plan(changed, "torchtitan", min_expressed=0))
        assert settings["activation_checkpoint"]["mode"] == mode


@pytest.mark.parametrize("target", sorted(set(EXPORT_TARGETS) - {"megatron", "torchtitan"}))
def test_other_exports_say_which_have_stages(interleaved: Plan, target: str) -> None:
    with pytest.raises(PlanError, match=r"4 pipeline stages, .* only .*: megatron, torchtitan"):
        export_plan(interleaved, target, min_expressed=0)


def test_a_cut_inside_a_layer_is_refused(planned: Planner, graph: Graph) -> None:
    options = {"stages": 2, "cuts": ("before:model.layers.2.mlp",), "micro_batches": 4}
    plan = planned(graph, (2,), schedule="1F1B", **options)
    with pytest.raises(PlanError, match=r"part of a layer, model\.layers\.2.*balance"):
        export_plan(plan, "torchtitan", min_expressed=0)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_different_sub_meshes_are_refused(planned: Planner, graph: Graph, target: str) -> None:
    options = {"stages": 3, "sub_meshes": "any", "micro_batches": 4, "schedule": "1F1B"}
    plan = planned(graph, (4,), **options)
    with pytest.raises(PlanError, match='sub_meshes="equal"'):
        export_plan(plan, target, min_expressed=0)
