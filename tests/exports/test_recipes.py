"""Recipes of other frameworks: read, refused with reasons, priced, and changed in one setting."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from support.models import graph_of, meta
from support.public_recipes import RIGHT, WRONG, PublicRecipe

from autoshard.errors import OptionError
from autoshard.exports import (
    ProgramFacts,
    Recipe,
    layout_of,
    program_batch,
    program_facts,
    read_recipe,
    recipe_problems,
)
from autoshard.graph import Graph
from autoshard.mesh import Axis, Mesh, make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.requests.recipe_changes import change_sentence, recipe_changes


@cache
def model(
    *, batch: int = 8, layers: int = 4, kv_heads: int = 4, experts: int = 0, length: int = 64
) -> Graph:
    """A tiny Llama or Mixtral with 8 heads of queries."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "vocab_size": 256,
        "max_position_embeddings": length,
    }

    def build() -> object:
        ids = torch.zeros(batch, length, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        if experts:
            config = transformers.MixtralConfig(num_local_experts=experts, **sizes)
            return transformers.MixtralForCausalLM(config), inputs
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), inputs

    return graph_of(meta(build))


def read(recipe: PublicRecipe, folder: Path) -> Recipe:
    path = folder / recipe.name
    path.write_text(recipe.text)
    return read_recipe(f"{path}:{recipe.function}" if recipe.function else str(path))


def facts(**sizes: int) -> ProgramFacts:
    known = {"batch": 8, "sequence": 64, "layers": 4, "heads": 8, "kv_heads": 4, "experts": None}
    given: dict[str, int | None] = {**known, **sizes, "parameters": 1000, "stored_bytes": 4000}
    return ProgramFacts(**given)


@pytest.mark.parametrize("recipe", RIGHT, ids=lambda recipe: recipe.source)
def test_public_recipes_are_read_and_can_run(recipe: PublicRecipe, tmp_path: Path) -> None:
    found, known = read(recipe, tmp_path), facts(**recipe.model)
    layout = layout_of(found, recipe.ranks, known)
    assert dict(layout.axes) == recipe.axes
    assert not recipe_problems(found, recipe.ranks, make_mesh((recipe.ranks,)).topology, known)
    assert program_batch(found, recipe.ranks) in (None, recipe.model["batch"])
    unread = [name for name in found.unread if name != recipe.named]
    assert not unread
    assert (f"{recipe.named}: it is not modelled" in layout.chosen) == bool(recipe.named)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[] if number % 7 == 2 else pytest.mark.matrix, id=recipe.source)
        for number, recipe in enumerate(RIGHT)
        if recipe.model.get("layers", 4) == 4  # hundreds of layers take longer to export
    ],
)
def test_public_recipes_are_priced_and_compared(recipe: PublicRecipe, tmp_path: Path) -> None:
    graph, devices = model(**recipe.model), make_mesh((recipe.ranks,))
    found = read(recipe, tmp_path)
    assert not recipe_problems(found, recipe.ranks, devices.topology, program_facts(graph))
    layout = layout_of(found, recipe.ranks, program_facts(graph))
    mesh = Mesh(tuple(Axis(name, size) for name, size in layout.axes), devices.topology)
    plan = make_plan(graph, mesh, layout.options)
    assert plan.found, plan.reason
    sequences = recipe.model["batch"] * plan.options.training.micro_batches
    assert sequences == (found.global_batch or sequences)
    best = make_plan(graph, mesh, PlanOptions(micro_batches=plan.options.training.micro_batches))
    assert plan.pipeline is not None or best.costs.total <= plan.costs.total * 1.001


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0])
def test_published_recipes_that_cannot_run_are_refused_with_the_reason(
    case: tuple[str, str, str, int, dict[str, int], str], tmp_path: Path
) -> None:
    source, name, text, ranks, sizes, reason = case
    found = read(PublicRecipe(source, name, text, ranks, {}), tmp_path)
    topology = make_mesh((ranks,), topology="h100-sxm").topology
    problems = recipe_problems(found, ranks, topology, facts(**sizes))
    assert any(reason in problem for problem in problems), problems


MEGATRON = "--tensor-model-parallel-size"
PROBLEMS = (
    (f"{MEGATRON} 3", 8, {}, "PP 1 x CP 1 x TP 3 = 3 ranks do not divide 8 devices"),
    (f"{MEGATRON} 16", 16, {}, "TP 16 does not divide 8 heads of attention"),
    (f"{MEGATRON} 6", 6, {"heads": 12}, "neither of TP 6 and 4 heads of keys divides the other"),
    (
        "--expert-model-parallel-size 8 --pipeline-model-parallel-size 4",
        *(48, {"experts": 8}),
        "PP 4 x max(TP x CP = 1, EP x ETP = 8 x 1 = 8) ranks do not divide 48 devices",
    ),
    ("--expert-model-parallel-size 4", 8, {}, "EP 4, but the model has no experts"),
    ("--expert-model-parallel-size 4", 8, {"experts": 6}, "EP 4 does not divide 6 experts"),
    (
        "--micro-batch-size 3 --global-batch-size 64",
        *(8, {}),
        "a batch of 64 sequences does not divide into micro-batches of 3 on 8 data-parallel ranks",
    ),
    (
        "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2",
        *(3, {}),
        "4 layers do not divide into 6 pipeline stages",
    ),
    (
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--micro-batch-size 1 --global-batch-size 3"
        ),
        *(2, {}),
        "3 micro-batches of a step do not divide into rounds of 2",
    ),
    ("--context-parallel-size 4", 4, {"sequence": 100}, "100 tokens do not divide into 2 x CP 4"),
    ("hsdp shard=3", 8, {}, "groups of 3 do not divide 8 data-parallel ranks"),
    ("ddp", 16, {}, "the batch of 8 does not divide over 16 data-parallel ranks"),
    (
        "ddp",
        8,
        {"parameters": 16_000_000_000, "stored_bytes": 32_000_000_000},
        (
            "each device stores at least 128 GB of its 80 GB before any activation: "
            "parameters 32 GB, gradients 32 GB, the optimizer's state 64 GB"
        ),
    ),
)


@pytest.mark.parametrize(("text", "ranks", "sizes", "reason"), PROBLEMS)
def test_what_cannot_run_is_found_by_arithmetic(
    text: str, ranks: int, sizes: dict[str, int], reason: str
) -> None:
    known = {**vars(facts()), **sizes}
    topology = make_mesh((ranks,), topology="h100-sxm").topology
    problems = recipe_problems(read_recipe(text), ranks, topology, ProgramFacts(**known))
    assert any(reason in problem for problem in problems), problems


def test_facts_of_a_program() -> None:
    found = program_facts(model(kv_heads=2))
    assert (found.batch, found.sequence, found.layers) == (8, 64, 4)
    assert (found.heads, found.kv_heads, found.experts) == (8, 2, None)
    assert program_facts(model(experts=4, layers=2)).experts == 4


def test_a_batch_is_that_of_the_recipe() -> None:
    text = "--micro-batch-size 1 --global-batch-size 64"
    recipe = read_recipe(text)
    assert program_batch(recipe, 8) == 8
    assert layout_of(recipe, 8, facts()).options.training.micro_batches == 8
    with pytest.raises(OptionError, match=r"program of 8 sequences .* 8 times a step.* of 64"):
        layout_of(recipe, 8, facts(batch=64))


def test_virtual_stages_are_those_of_the_program() -> None:
    text = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    with pytest.raises(OptionError, match="needs --num-layers, or the program"):
        layout_of(read_recipe(text), 2)
    found = layout_of(read_recipe(text), 2, facts()).options.pipeline
    assert (found.stages, found.stages_per_rank, found.balance) == (4, 2, (1, 1, 1, 1))
    assert layout_of(read_recipe("megatron pp=2"), 2, facts()).options.pipeline.balance == (2, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", "a = ", "x.toml: "),
        ("x.json", "[1]", "has no settings"),
        ("x.json", '{"a": {"b": 1}}', "is no recipe that is known: torchtitan's TOML"),
        ("x.yaml", "a: [", "x.yaml: "),
        ("x.toml", "[parallelism]\ntensor_parallel_degree = 0", "tensor_parallel_degree is 0"),
        ("x.json", '{"zero_optimization": {"stage": 4}}', "stage is 4, not 0, 1, 2 or 3"),
        ("x.py", "def f(): pass", "no function 'g'; it has f"),
    ],
)
def test_files_that_are_no_recipe_are_errors(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        read_recipe(f"{path}:g" if name.endswith(".py") else str(path))


def test_the_change_that_helps_most_is_priced() -> None:
    graph, devices = model(batch=8), make_mesh((8,))
    recipe = read_recipe("megatron tp=4")
    layout = layout_of(recipe, 8, program_facts(graph))
    mesh = Mesh(tuple(Axis(name, size) for name, size in layout.axes), devices.topology)
    plan = make_plan(graph, mesh, layout.options)
    changes = recipe_changes(recipe, graph, devices, PlanOptions(), 60)
    texts = {change.text for change in changes}
    assert {"TP 2 instead of 4", "TP 1 instead of 4", "with sequence parallelism"} <= texts
    assert not any("EP" in text for text in texts)  # there are no experts
    times = [change.plan.costs.total for change in changes]
    assert times == sorted(times)
    said = change_sentence(plan, changes)
    assert f"{changes[0].text}: {1e3 * times[0]:,.4g} ms instead of" in said
