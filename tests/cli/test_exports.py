from pathlib import Path

import dill
import pytest
from support.command_line import autoshard
from support.models import gpt2, meta
from torch.distributed.tensor import Replicate, Shard

from autoshard.exports import EXPORT_TARGETS, export_plan
from autoshard.graph import export_model
from autoshard.plan import Plan


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # So large an embedding that its gradient shares no collective.
    model, kwargs = meta(gpt2, vocabulary=1 << 16)
    path = tmp_path_factory.mktemp("exports") / "gpt2.pt2"
    path.write_bytes(export_model(model, (), kwargs))
    return path


@pytest.fixture(scope="module")
def plan(archive: Path) -> Path:
    path = archive.with_name("plan.json")
    options = ["--mesh", "2,2", "--axes", "dp,tp", "--algo", "megatron", "--no-cache"]
    assert autoshard("plan", archive, *options, "-o", path).exit_code == 0
    return path


@pytest.mark.parametrize("target", EXPORT_TARGETS)
def test_an_export_is_printed_or_written(plan: Path, tmp_path: Path, target: str) -> None:
    expected = export_plan(Plan.from_json(plan.read_text()), target, min_expressed=0)
    assert autoshard("export", plan, "--to", target, "--min-expressed", "0").output == expected
    path = tmp_path / "exported"
    assert not autoshard("export", plan, "--to", target, "--min-expressed", "0", "-o", path).output
    assert path.read_text() == expected


def test_an_unknown_target_is_named(plan: Path) -> None:
    result = autoshard("export", plan, "--to", "abacus")
    assert result.exit_code == 1
    assert "unknown export target 'abacus'" in result.output


def test_an_export_that_expresses_little_fails(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "exported"
    result = autoshard("export", plan, "--to", "fsdp2", "-o", path)
    assert result.exit_code == 1
    assert "that is less than 50 %" in result.output
    assert "--exportable-to fsdp2" in " ".join(result.output.split())
    assert "set --min-expressed 0" in " ".join(result.output.split())
    assert not path.exists()


def test_a_solution_of_mase_becomes_options_of_a_plan(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "ilp_solution.pkl"
    placed = {"args": {}, "results": {"data_out_0": (Replicate(), Shard(1))}}
    path.write_bytes(dill.dumps({"transformer_h_0_mlp_c_fc_weight": placed}))
    refused = autoshard("mase", "pins", path, archive, "--mesh", "2,2")
    assert refused.exit_code == 1
    assert "--trust-pickle" in refused.output
    pins = autoshard("mase", "pins", path, archive, "--mesh", "2,2", "--trust-pickle").output
    assert pins.splitlines() == [
        f"--pin=parameter:transformer.h.{layer}.mlp.c_fc.weight=I,S(1)" for layer in (0, 1)
    ]
    made = autoshard("plan", archive, "--mesh", "2,2", "--no-cache", "--json", *pins.splitlines())
    layouts = {p.target: p.layout for p in Plan.from_json(made.stdout).stages[0].parameters}
    assert layouts["transformer.h.1.mlp.c_fc.weight"] == "I,S(1)"


def test_a_plan_becomes_a_solution_of_mase(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "ilp_solution.pkl"
    assert autoshard("mase", "write", plan, path).exit_code == 0
    with path.open("rb") as file:
        solution = dill.load(file)  # noqa: S301  written above
    assert solution["input_ids"]["results"]["data_out_0"] == (Shard(0), Replicate())
