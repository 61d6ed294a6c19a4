"""Models of commands that are no graphs: a config of transformers, a function of a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import autoshard
from support.configs import write_config

from autoshard.graph import InputKind, is_graph_file, load_graph
from autoshard.integrations.model_files import BatchShape, export_named
from autoshard.plan import Plan
from autoshard.requests.kept_plans import OfflinePlans

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
    planned = autoshard("plan", path, *MESH, "--batch-size", "16", "--seq-length", "32")
    assert planned.exit_code == 0, planned.output
    assert "LlamaForCausalLM" in planned.output
    assert "bfloat16, batch 16 x 32 tokens, training" in planned.output.replace("\n", " ")
    folder = str(Path(path).parent)
    same = autoshard("plan", folder, *MESH, "--batch-size", "16", "--seq-length", "32")
    assert same.output == planned.output


def test_the_batch_of_a_config_has_as_many_tokens_as_it_can(config: Any) -> None:
    assert batch_of(export_named(config())) == [(8, 128), (8, 128)]
    shape = BatchShape(batch_size=3, seq_length=128)
    assert batch_of(export_named(config(), shape, mode="inference")) == [(3, 128)]


def test_a_class_without_tokens_as_labels_gets_one_label_a_sequence(config: Any) -> None:
    path = config(architectures=["LlamaForSequenceClassification"], num_labels=3, pad_token_id=0)
    assert batch_of(export_named(path, BatchShape(batch_size=4, seq_length=16))) == [(4,), (4, 16)]


def test_a_config_without_the_name_of_a_class_is_a_language_model(config: Any) -> None:
    graph = load_graph(export_named(config(architectures=None)))
    assert any(one.target == "lm_head.weight" for one in graph.inputs)


def test_the_mesh_is_that_of_the_fastest_plan_of_a_search(config: Any) -> None:
    batch = ("--batch-size", "16", "--seq-length", "32", "--no-cache")
    options = ("--devices", "4", *batch, "--format", "json")
    found = json.loads(autoshard("search", config(), *options).stdout)
    best = found["meshes"][0]["mesh"]
    planned = autoshard("plan", config(), "--gpus", "4", *batch, "--no-comparisons")
    assert planned.exit_code == 0, planned.output
    assert f"mesh {best}," in planned.stdout
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
        ({"max_position_embeddings": 16}, "has 16 positions at most"),
        ({"num_attention_heads": "four"}, "no config of transformers"),
    ],
)
def test_a_config_that_cannot_be_used_is_an_error(
    config: Any, fields: dict[str, object], message: str
) -> None:
    planned = autoshard("plan", config(**fields), *MESH, "--seq-length", "32")
    assert planned.exit_code == 1
    assert message in " ".join(planned.output.split())


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
    assert "--batch-size and --seq-length are for a config.json" in planned.output


@pytest.mark.parametrize(
    ("source", "is_graph"),
    [
        *(("a.pt2", True), ("a.json", True), ("a.b", False), ("config.json", False)),
        *(("a/b", False), ("a.py:f", False), ("Qwen/Qwen3-0.6B", False)),
    ],
)
def test_models_are_told_from_graphs_by_their_names(source: str, is_graph: bool) -> None:
    assert is_graph_file(source) is is_graph
