"""Roles of axes, kinds of layers, and how each axis places their weights and activations."""

from collections import Counter
from functools import partial

import pytest
from support.meshes import slow_devices
from support.models import Planner, bert, gpt2, llama, meta, mlp, resnet, small_graph, t5
from support.recomputation import checkpointing
from support.transformer_plans import GPT2_LAYERS, planned

from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan
from autoshard.pricing import AxisRole, find_roles
from autoshard.pricing.module_kinds import ModuleKind, module_kinds, parameter_kinds
from autoshard.report.layer_table import layer_rows, layout_name
from autoshard.report.plain_words import runs_again, step_sentences


def layers(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """Placements of weights and activations along each axis, by kind of layer."""
    return {
        name: list(zip(row.weights, row.activations, strict=True))
        for row in layer_rows(find_roles(plan))
        for name in row.layers
    }


def named(plan: Plan) -> str:
    return layout_name(find_roles(plan))


def modules(graph: Graph, kind: ModuleKind) -> set[str]:
    """The last component of the modules of the nodes of a kind."""
    kinds = module_kinds(graph)
    return {node.module.rpartition(".")[2] for node in graph.nodes if kinds.get(node.name) is kind}


def test_layers_of_transformers_are_recognised_without_their_names() -> None:
    graph = small_graph(llama)
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "self_attn"}
    assert modules(graph, ModuleKind.ATTENTION) == projections
    assert modules(graph, ModuleKind.MLP) == {"gate_proj", "up_proj", "down_proj"}
    assert modules(graph, ModuleKind.OUTPUT) == {"lm_head"}
    assert modules(graph, ModuleKind.EMBEDDING) == {"embed_tokens"}
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert modules(graph, ModuleKind.NORM) == norms
    assert modules(graph, ModuleKind.LINEAR) == set()


def test_cross_attention_is_attention() -> None:
    graph = small_graph(t5)
    assert modules(graph, ModuleKind.ATTENTION) >= {"q", "k", "v", "o"}
    assert modules(graph, ModuleKind.MLP) == {"wi", "wo"}


def test_convolutions_are_neither_attention_nor_mlp() -> None:
    found = Counter(module_kinds(small_graph(resnet)).values())
    assert set(found) == {ModuleKind.CONVOLUTION, ModuleKind.NORM, ModuleKind.OUTPUT}


def test_every_parameter_belongs_to_a_layer() -> None:
    graph = small_graph(gpt2)
    kinds = parameter_kinds(graph, module_kinds(graph))
    found = {i.target: kinds[i.name] for i in graph.parameters}
    assert found["transformer.h.0.attn.c_attn.bias"] is ModuleKind.ATTENTION
    assert found["transformer.h.1.mlp.c_proj.weight"] is ModuleKind.MLP
    assert found["transformer.ln_f.bias"] is ModuleKind.NORM
    # The table of the embedding is also the weight of the output layer.
    assert "lm_head.weight" in next(
        (*i.aliases, i.target) for i in graph.parameters if kinds[i.name] is ModuleKind.OUTPUT
    )


def test_megatron_is_tensor_parallel_along_its_axis() -> None:
    plan = planned(llama, "2x2", "megatron")
    dp, tp = find_roles(plan).axes
    assert dp.work == {AxisRole.BATCH: 1.0}
    assert tp.work == {AxisRole.FEATURES: 1.0}
    assert (dp.remark, tp.remark) == ("", "")
    assert named(plan) == "DP 2 x TP 2"
    whole, found = ("Replicate", "Shard(batch)"), layers(plan)
    assert {along_dp for along_dp, _ in found.values()} == {whole}
    assert found["norms"][1] == ("Replicate", "Replicate")
    assert found["output layer"][1] == ("Shard(0)", "Shard(features)")
    assert found["embedding"][1] == ("Shard(0)", "Partial")
    # Weights by columns, then by rows, whose products are partial sums.
    weights, activations = found["MLP"][1]
    assert weights.startswith("Shard(0) 67 %, Shard(1) 33 %")
    assert activations.startswith("Shard(features) ")
    assert ", Partial " in activations


def test_norms_between_tensor_parallel_layers_are_sequence_parallel() -> None:
    plan = planned(llama, "2x2", "sequence")
    assert named(plan) == "FSDP 2 x TP 2"
    assert layers(plan)["norms"] == [
        ("Shard(0) gathered", "Shard(batch)"),
        ("Shard(0) gathered", "Shard(sequence)"),
    ]


def test_one_kind_of_parallelism_over_all_axes_is_one_clause(planned: Planner) -> None:
    plan = planned(meta(mlp, 4096, 256, 256, 256), slow_devices(a=2, b=2), batch_axis="a")
    by_rows = {"inputs": {"x": "S(0),S(0)"}, "parameters": {"*": "S(0),S(0)"}}
    fully = planned(
        meta(mlp, 4096, 256, 256, 256), slow_devices(a=2, b=2, latency=1e-3), pins=by_rows
    )
    assert named(fully) == "FSDP 2 x FSDP 2"
    (row,) = layer_rows(find_roles(fully))
    assert row.weights == ("Shard(0) gathered", "Shard(0) gathered")
    assert row.activations == ("Shard(batch)", "Shard(batch)")
    assert find_roles(plan).axes[0].main_role is AxisRole.BATCH


def test_a_name_that_contradicts_the_role_gets_a_remark(planned: Planner) -> None:
    plan = planned(meta(mlp, 4096, 256, 256, 256), slow_devices(tp=4, latency=1e-3))
    (use,) = find_roles(plan).axes
    assert use.main_role is AxisRole.BATCH
    assert use.remark == (
        "axis tp shards the batch in 100 % of flops, although its name suggests tensor parallelism"
    )


def test_axes_that_shard_nothing_are_named_as_such(planned: Planner) -> None:
    plan = planned(meta(mlp, 1, 8, 8, 8), make_mesh((4,), axes=("x",)))
    (use,) = find_roles(plan).axes
    assert (use.work, use.remark) == ({AxisRole.IDLE: 1.0}, "")
    assert named(plan) == "replicated 4"
    (row,) = layer_rows(find_roles(plan))
    assert (row.weights, row.activations) == (("Replicate",), ("Replicate",))


def test_checkpointed_blocks_are_counted() -> None:
    plan = checkpointing(planned(gpt2, "2x2", "megatron"), GPT2_LAYERS[0])
    again = runs_again(plan)
    assert (again.recomputed, again.blocks) == (1, 2)
    assert step_sentences(plan, again)[0] == (
        "Activation checkpointing on 1 of 2 blocks to fit the memory."
    )


@pytest.mark.matrix
@pytest.mark.parametrize("build", [gpt2, bert, t5, resnet])
def test_shares_of_roles_add_up(build: partial[object]) -> None:
    for use in find_roles(planned(build, "2x2", "free")).axes:
        assert sum(use.work.values()) == pytest.approx(1)
        assert sum(use.stored.values()) == pytest.approx(1)


def test_stages_of_a_pipeline_know_the_batch_of_what_they_receive(planned: Planner) -> None:
    mesh = slow_devices(pp=2, dp=2, latency=1e-3)
    plan = planned(small_graph(llama), mesh, stages=2, micro_batches=2, batch_axis="dp")
    pp, dp = find_roles(plan).axes
    assert (pp.stages, pp.main_role, pp.remark) == (2, None, "")
    assert dp.work == {AxisRole.BATCH: 1.0}
    assert named(plan) == "PP 2 x FSDP 2"
    assert step_sentences(plan, runs_again(plan))[0].startswith("Pipeline of 2 stages, schedule ")


def test_a_tied_weight_is_gathered_for_one_layer_and_used_in_shards_by_another(
    planned: Planner,
) -> None:
    """GPT-2's output layer shards the batch along an axis along which its embedding is looked up
    in shards of features, as both have one table."""
    nodes = {"linear": "S(0)", "embedding": "S(2)"}
    pins = {"parameters": {"*wte.weight": "S(1)"}, "nodes": nodes}
    plan = planned(small_graph(gpt2), slow_devices(dp=2, latency=1e-3), pins=pins)
    assert layers(plan)["output layer"] == [("Shard(1) gathered", "Shard(batch)")]
    assert layers(plan)["embedding"] == [("Shard(1)", "Shard(features)")]
