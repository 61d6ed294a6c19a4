from pathlib import Path

import dill
import pytest
from support.command_line import autoshard
from support.models import gpt2, meta
from torch.distributed.tensor import Replicate, Shard

from autoshard.exports import EXPORT_TARGETS, export_plan
from autoshard.graph import export_model
from autoshard.plan import Plan
from autoshard.plan.predictions import three_digits


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
    command = ("export", plan, "--to", target, "--min-expressed", "0", "--no-price")
    assert autoshard(*command).output == expected
    path = tmp_path / "exported"
    assert not autoshard(*command, "-o", path).output
    assert path.read_text() == expected


def test_an_export_has_a_price_or_says_why_not(plan: Path) -> None:
    made = Plan.from_json(plan.read_text())
    priced = autoshard("export", plan, "--to", "megatron")
    assert priced.exit_code == 0, priced.output
    words = " ".join(priced.stdout.replace("\n# ", " ").split())
    assert f"the plan {three_digits(made.costs.total)}; a peak" in words
    assert "100 % of collectives the same." in words
    refused = autoshard("export", plan, "--to", "torchtitan", "--min-expressed", "0")
    assert refused.exit_code == 0, refused.output
    assert refused.stdout == export_plan(made, "torchtitan", min_expressed=0)
    assert "torchtitan does not combine DDP with TP" in refused.stderr


def test_a_recipe_is_read_compared_and_improved(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\ntensor_parallel_degree = 2\n[float8]\nenable = true\n")
    command = ("plan", archive, "--mesh", "4", "--no-cache", "--time-limit", "30")
    done = autoshard(*command, "--layout-from", path)
    assert done.exit_code == 0, done.output
    assert "mesh dp_shard=2 x tp=2" in done.stdout
    assert "float8.enable: it is not modelled" in done.stderr
    assert "that were planned" in done.stderr
    path.write_text("[parallelism]\ntensor_parallel_degree = 8\n")
    wrong = autoshard(*command, "--layout-from", path)
    assert wrong.exit_code == 1
    assert "TP 8 = 8 ranks do not divide 4 devices; TP 8 does not divide 4 heads" in " ".join(
        wrong.stderr.split()
    )


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
