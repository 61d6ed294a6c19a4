"""Models of commands that are no graphs: a config of transformers, a function of a file."""

import json
import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest
import torch
from support.command_line import autoshard
from support.configs import write_config

from autoshard import plan_model, planner
from autoshard.errors import OptionError
from autoshard.graph import InputKind, is_graph_file, load_graph
from autoshard.plan import Plan
from autoshard.plan.predictions import step_time
from autoshard.planner.pipeline import pipeline_planner
from autoshard.report import answer_of
from autoshard.requests.kept_plans import OfflinePlans
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.model_files import export_named

MESH = ("--mesh", "2x2", "--no-comparisons", "--quiet")


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Write a config with other fields, and return its path."""

    def write(**fields: object) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        return write_config(folder, **fields)

    return write


def batch_of(archive: bytes) -> list[tuple[int, ...]]:
    """Shapes of what the caller passes."""
    graph = load_graph(archive)
    given = [one.name for one in graph.inputs if one.kind is InputKind.USER]
    return sorted(tuple(graph.values[name].shape) for name in given)


def test_a_config_is_planned_with_the_batch_that_is_asked_for(config: Any) -> None:
    path = config()
    batch = ("--batch-size", "16", "--seq-length", "32", "--no-cache")
    planned = autoshard("plan", path, *MESH, *batch)
    assert planned.exit_code == 0, planned.output
    assert "LlamaForCausalLM" in planned.output
    assert "bfloat16, batch 16 x 32 = 512 tokens a step, training\n" in planned.output
    folder = str(Path(path).parent)
    same = autoshard("plan", folder, *MESH, *batch)
    assert same.output == planned.output


def test_the_batch_of_a_config_has_as_many_tokens_as_it_can(config: Any) -> None:
    assert batch_of(export_named(config())) == [(8, 128), (8, 128)]
    shape = BatchShape(batch_size=3, seq_length=128)
    assert batch_of(export_named(config(), shape, mode="inference")) == [(3, 128)]
    longer = config(max_position_embeddings=8192)
    assert batch_of(export_named(longer, BatchShape(batch_size=2))) == [(2, 4096), (2, 4096)]


def test_weights_have_the_element_type_that_is_asked_for(config: Any) -> None:
    def types(**options: Any) -> set[str]:
        graph = load_graph(export_named(config(), BatchShape(seq_length=8), **options))
        return {str(graph.values[one.name].dtype) for one in graph.parameters}

    assert types() == {"bfloat16"}
    assert types(dtype="float32") == {"float32"}


def test_a_class_without_tokens_as_labels_gets_one_label_a_sequence(config: Any) -> None:
    path = config(architectures=["LlamaForSequenceClassification"], num_labels=3, pad_token_id=0)
    assert batch_of(export_named(path, BatchShape(batch_size=4, seq_length=16))) == [(4,), (4, 16)]


@pytest.mark.parametrize("architectures", [None, ["OtherNameForCausalLM"]])
def test_a_config_without_the_name_of_a_class_is_a_language_model(
    config: Any, architectures: Any
) -> None:
    graph = load_graph(export_named(config(architectures=architectures)))
    assert any(one.target == "lm_head.weight" for one in graph.inputs)


def test_the_mesh_is_that_of_the_fastest_plan_of_a_search(config: Any) -> None:
    batch = ("--batch-size", "16", "--seq-length", "32", "--no-cache")
    options = ("--devices", "4", *batch, "--format", "json")
    found = json.loads(autoshard("search", config(), *options).stdout)
    best = found["meshes"][0]["mesh"]
    planned = autoshard("plan", config(), "--gpus", "4", *batch, "--no-comparisons")
    assert planned.exit_code == 0, planned.output
    assert f"mesh {best}\n" in planned.stdout
    assert "Meshes, best first" in planned.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of --mesh and --gpus"),
        (("--mesh", "2", "--gpus", "2"), "give one of --mesh and --gpus"),
        (("--gpus", "2", "--axes", "dp"), "--axes is for a --mesh, not for --gpus"),
        (("--gpus", "2", "--intra-bandwidth", "5GB/s"), "--intra-bandwidth is for a --mesh"),
    ],
)
def test_a_mesh_or_a_number_of_devices_is_given(
    config: Any, options: tuple[str, ...], message: str
) -> None:
    planned = autoshard("plan", config(), *options)
    assert planned.exit_code == 1
    assert message in planned.output


FUNCTION = """
import torch
def make():
    return torch.nn.Linear(8, 8), torch.zeros(4, 8)
def named():
    return torch.nn.Linear(8, 8), {"input": torch.zeros(4, 8)}
def alone():
    return torch.nn.Linear(8, 8)
"""


@pytest.mark.parametrize("name", ["make", "named"])
def test_the_model_of_a_function_is_planned(name: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FUNCTION)
    planned = autoshard("plan", f"{file}:{name}", *MESH, "--mode", "inference")
    assert planned.exit_code == 0, planned.output
    assert "Linear" in planned.output


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing.json", "there is no file nothing.json"),
        ("nothing/config.json", "there is no file nothing/config.json"),
        ("nothing.py:make", "there is no file nothing.py"),
        ("train.py:other", "train.py has no function 'other'"),
        ("train.py:alone", "train.py:alone does not return (module, batch)"),
        ("nobody/model", "nobody/model is no config of transformers"),
    ],
)
def test_what_is_no_model_is_named(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("train.py").write_text(FUNCTION)
    planned = autoshard("plan", source, *MESH)
    assert planned.exit_code == 1
    assert message in " ".join(planned.output.split())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, "no config of"),
        ({"architectures": ["Trainer"]}, "transformers has no model 'Trainer'"),
        ({"architectures": ["NobodyForTokenClassification"]}, "transformers has no model 'Nobody"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is no model of the type 'llama'"),
        ({"architectures": ["ViTModel"], "model_type": "vit"}, "only models of text get a batch"),
        ({"num_attention_heads": "four"}, "no config of transformers"),
    ],
)
def test_a_config_that_cannot_be_used_is_an_error(
    config: Any, fields: dict[str, object], message: str
) -> None:
    planned = autoshard("plan", config(**fields), *MESH, "--seq-length", "32")
    assert planned.exit_code == 1
    assert message in " ".join(planned.output.split())


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 16},
        {"max_position_embeddings": None, "text_config": {"max_position_embeddings": 16}},
        {"max_position_embeddings": None, "n_embd": 64, "n_positions": 16},
    ],
)
def test_a_sequence_that_is_too_long_is_named_before_torch_is_imported(
    config: Any, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "autoshard.requests.model_files", None)
    planned = autoshard("plan", config(**fields), *MESH, "--seq-length", "32")
    assert planned.exit_code == 1
    assert "has 16 positions at most" in " ".join(planned.output.split())


def test_the_first_digits_of_an_id_stand_for_a_plan_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(FUNCTION)
    options = ("--mode", "inference", "--no-comparisons", "--quiet", "--json", "--mesh")
    plans = [
        Plan.from_json(autoshard("plan", f"{file}:make", *options, size).stdout) for size in "24"
    ]
    for plan in plans:
        digits, whole = plan.id[:12], autoshard("show", plan.id).output
        assert autoshard("show", digits).output == whole.replace(plan.id, digits)
    unknown = "0" * 12
    assert f"no plan {unknown}... is kept" in autoshard("show", unknown).output
    kept = OfflinePlans(tmp_path / "kept")
    assert sorted(kept.ids("")) == sorted(plan.id for plan in plans)
    monkeypatch.setattr(
        "autoshard.requests.this_process.ThisProcess.plan_ids", lambda *_: ["a", "b"]
    )
    assert "2 plans begin with" in autoshard("show", unknown).output
    asked = autoshard("show", unknown, "--server", "http://127.0.0.1:1")
    assert "a service needs all 64 digits" in asked.output


def test_a_graph_has_the_batch_that_it_was_exported_with(tmp_path: Path) -> None:
    planned = autoshard("plan", str(tmp_path / "model.pt2"), *MESH, "--batch-size", "4")
    assert planned.exit_code == 1
    assert "--batch-size, --seq-length and --dtype are for a config.json" in planned.output


@pytest.mark.parametrize(
    ("source", "is_graph"),
    [
        *(("a.pt2", True), ("a.json", True), ("a.b", False), ("config.json", False)),
        *(("a/b", False), ("a.py:f", False), ("Qwen/Qwen3-0.6B", False)),
    ],
)
def test_models_are_told_from_graphs_by_their_names(source: str, is_graph: bool) -> None:
    assert is_graph_file(source) is is_graph


def test_the_commands_that_are_named_next_make_the_simplest_layout(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 2 does not divide over 4 ranks, so a layout of Megatron-LM is the simplest."""
    monkeypatch.chdir(tmp_path)
    batch = ("--global-batch", "2", "--seq-length", "32", "--no-cache", "--quiet")
    links = (
        "--intra-bandwidth",
        "450GB/s",
        "--inter-bandwidth",
        "50GB/s",
        "--forbid",
        "halo_exchange",
    )
    planned = autoshard("plan", config(), "--mesh", "2x2", *batch, *links, "--within", "10")
    assert planned.exit_code == 0, planned.output
    assert "Verdict: DP 2 x TP 2 (tensor-parallel layers, " in planned.stdout
    listed = planned.stdout.partition("Next:\n")[2].splitlines()
    (_, *plan), (_, *export), *_ = (split(command) for command in listed)
    assert plan[plan.index("--global-batch") + 1] == "2"
    again = autoshard(*plan, "--no-comparisons")
    assert again.exit_code == 0, again.output
    made = Plan.load("megatron.json")
    assert made.costs is not None
    assert f"  {step_time(made.costs.total, made.performance)}  " in planned.stdout
    assert "tensor-model-parallel-size" in autoshard(*export).stdout.replace("_", "-")


def test_one_call_plans_what_the_command_plans(config: Any, tmp_path: Path) -> None:
    path, file = config(), tmp_path / "plan.json"
    batch = ("--batch-size", "8", "--seq-length", "32", "--no-cache", "--quiet")
    autoshard("plan", path, "--gpus", "2", *batch, "-o", str(file))
    planned = plan_model(path, gpus=2, batch_size=8, seq_length=32, server=False, cache=False)
    same = Plan.load(file)
    assert planned.id == same.id
    assert answer_of(planned) == answer_of(same)
    assert len(planned.baselines) == 5


def test_a_batch_is_that_of_a_step_in_all_its_micro_batches(config: Any) -> None:
    batch = ("--global-batch", "8", "--seq-length", "32", "--no-comparisons", "--no-cache")
    planned = autoshard("plan", config(), "--mesh", "2", *batch, "--micro-batches", "4")
    assert planned.exit_code == 0, planned.output
    assert "batch 8 x 32 = 256 tokens a step in 4 micro-batches" in planned.stdout
    assert "among the plans of one stage and 4 micro-batches" in planned.stdout
    uneven = autoshard("plan", config(), "--mesh", "2", *batch, "--micro-batches", "3")
    assert uneven.exit_code == 1
    assert "which does not divide the batch of a step, 8 samples" in uneven.output


SHORT = ("--global-batch", "64", "--seq-length", "128", "--memory-budget", "8MB", "--no-cache")
"""A batch whose activations do not fit the memory at once, with room for a few samples."""


def test_the_number_of_micro_batches_is_chosen(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plan of the chosen mesh is that of the search, whose processes have planned it.
    monkeypatch.setattr(planner, "make_plan", None)
    file = tmp_path / "plan.json"
    planned = autoshard("plan", config(), "--gpus", "2", *SHORT, "-o", str(file))
    assert planned.exit_code == 0, planned.output
    made = Plan.load(file)
    number = made.options.training.micro_batches
    assert number > 1
    assert f"micro-batches: {number} of a step" in planned.stderr
    assert f"64 x 128 = 8,192 tokens a step in {number} micro-batches" in planned.stdout
    assert len(made.baselines) == 5
    simplest = planned.stdout.partition("Next:")[2]
    assert "--algo" not in simplest or f"--micro-batches {number}" in simplest


def test_a_number_of_micro_batches_that_is_given_is_kept(config: Any) -> None:
    given = ("--micro-batches", "1", "--no-comparisons", "--quiet", "--format", "json")
    planned = autoshard("plan", config(), "--gpus", "2", *SHORT[:4], "--no-cache", *given)
    assert planned.exit_code == 0, planned.output
    assert Plan.from_json(planned.stdout).options.training.micro_batches == 1


def test_one_call_plans_archives_and_modules(config: Any, tmp_path: Path) -> None:
    archive = tmp_path / "model.pt2"
    archive.write_bytes(export_named(config(), BatchShape(batch_size=4, seq_length=32)))
    options: dict[str, Any] = {"server": False, "cache": False, "comparisons": False}
    planned = plan_model(archive, mesh="dp=2", **options)
    assert planned.mesh.axis_sizes == (2,)
    assert planned.baselines == ()
    module = torch.nn.Linear(4, 4, device="meta")
    batch = torch.empty(8, 4, device="meta")
    assert plan_model(module, (batch,), mesh=2, mode="inference", **options).found
    with pytest.raises(OptionError, match="has the batch that it was exported with"):
        plan_model(archive, mesh=2, batch_size=8, **options)
    for given in ({}, {"gpus": 2, "mesh": 2}):
        with pytest.raises(OptionError, match="give one of gpus and mesh"):
            plan_model(archive, **given, **options)


def test_one_stage_is_planned_where_a_pipeline_has_no_plan(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages get no time, so that the chosen pipeline, of wide layers on nodes of two, ends."""
    made = pipeline_planner.make_plan

    def late(graph: Any, mesh: Any, options: Any, **given: Any) -> Plan:
        seconds = 1e-6 if options.pipeline.stages == "auto" else options.solver.time_limit
        return made(graph, mesh, options.with_values(time_limit=seconds), **given)

    monkeypatch.setattr(planner, "make_plan", late)
    sizes = {"hidden_size": 8192, "intermediate_size": 16_384, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 512}
    devices = ("--gpus", "8", "--topology", "h100-sxm", "--gpus-per-node", "2", "--no-comparisons")
    batch = ("--global-batch", "32", "--seq-length", "512", "--no-cache")
    planned = autoshard("plan", config(**sizes, **heads), *devices, *batch)
    assert planned.exit_code == 0, planned.output
    assert "pipeline: pp=" in planned.stderr
    assert "no plan in the time limit; one stage is planned" in planned.stderr
    assert "among the plans of one stage" in planned.stdout
