import json
import re
from importlib.metadata import version
from pathlib import Path

from support.command_line import autoshard
from support.models import meta, residuals

from autoshard.cli import ExitCode
from autoshard.graph import export_model
from autoshard.plan import Plan


def test_version() -> None:
    assert autoshard("--version").output.strip() == f"autoshard {version('autoshard')}"


def test_plan_show_and_check(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned = autoshard("plan", archive, "--mesh", "2,4", "--axes", "x,y", "-o", path)
    assert planned.exit_code == 0
    for word in ("525,312 parameters", "weights over y=4", "Certificate: Optimal among"):
        assert word in planned.stdout
    assert f"autoshard check {archive} {path}" in planned.stdout
    tables = autoshard("show", path, "--all").stdout
    for word in ("up.weight", "over x, y", "activations"):
        assert word in tables
    assert "predicted cost verified" in autoshard("check", archive, path).output
    confirmed = autoshard("check", archive, path, "--optimality")
    assert "ilp got the whole problem as one integer program" in confirmed.stdout
    assert "The certificate is confirmed." in confirmed.stdout
    document = json.loads(autoshard("check", archive, path, "--optimality", "--json").stdout)
    assert document["findings"] == []
    assert document["optimality"][0]["confirmed"] is True


def blocks_reused(*arguments: object) -> int:
    plan = Plan.from_json(autoshard("plan", *arguments, "--mesh", "2,2", "--json").stdout)
    return sum(block.num_reused for block in plan.provenance.blocks)


def test_blocks_are_reused_unless_that_is_not_wanted(tmp_path: Path) -> None:
    model, kwargs = meta(residuals)
    archive, folder = tmp_path / "residuals.pt2", tmp_path / "solved"
    archive.write_bytes(export_model(model, (), kwargs))
    assert blocks_reused(archive, "--no-cache", "--cache", folder) == 0
    assert not folder.exists()
    assert blocks_reused(archive, "--cache", folder) == 0
    assert blocks_reused(archive, "--cache", folder) > 0
    assert blocks_reused(archive, "--no-cache", "--cache", folder) == 0
    shown = [
        " ".join(autoshard("plan", archive, "--mesh", "2,2", *options).stdout.split())
        for options in (("--cache", folder), ("--no-cache",))
    ]
    assert ["had been solved for other plans." in text for text in shown] == [True, False]
    assert re.search(r"Reused: \d+ of \d+ tables \(\d+ %\) of the blocks", shown[0])


def test_json_is_the_plan(archive: Path) -> None:
    output = autoshard("plan", archive, "--mesh", "4", "--mode", "inference", "--json").stdout
    assert Plan.from_json(output).options.mode == "inference"


def test_a_budget_that_is_too_small_ends_with_a_status_of_its_own(archive: Path) -> None:
    result = autoshard("plan", archive, "--mesh", "2", "--memory-budget", "1MB")
    assert result.exit_code == ExitCode.NO_PLAN
    assert "the smallest feasible budget" in " ".join(result.output.split())


def test_coverage_shows_rules_and_with_a_plan_times(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    autoshard("plan", archive, "--mesh", "2", "-o", path)
    bare, timed = autoshard("coverage", archive), autoshard("coverage", archive, path)
    for result in (bare, timed):
        assert result.exit_code == 0
        assert "0 of 3 calls are replicated on every rank" in result.output
    assert "resharding" not in bare.output
    assert "0.00% of a step of" in " ".join(timed.output.split())
    coverage = json.loads(autoshard("coverage", archive, path, "--json").stdout)
    assert {use["operator"]: use["num_calls"] for use in coverage["operators"]} == {
        "aten.linear.default": 2,
        "aten.relu.default": 1,
    }


def test_check_finds_what_is_wrong(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    autoshard("plan", archive, "--mesh", "2", "-o", path)
    document = json.loads(path.read_text())
    document["costs"]["total"] *= 2
    path.write_text(json.dumps(document))
    result = autoshard("check", archive, path)
    assert result.exit_code == 1
    assert "total cost" in result.output


def test_check_finds_a_bound_that_is_wrong(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = "--mesh", "2", "--pin", "parameter:*=S(0)", "--solver", "ilp"
    autoshard("plan", archive, *arguments, "-o", path)
    document = json.loads(path.read_text())
    document["options"]["constraints"]["pins"] = {}
    path.write_text(json.dumps(document))
    assert autoshard("check", archive, path).exit_code == 0
    result = autoshard("check", archive, path, "--optimality")
    assert result.exit_code == 1
    assert "none takes less than" in result.output
    refused = autoshard("plan", archive, "--mesh", "2", "--solver", "nosuch")
    assert "finds no solver NOSUCH of integer programs" in refused.output


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = autoshard("plan", tmp_path / "nothing.pt2", "--mesh", "2")
    assert result.exit_code == 1
    assert "nothing.pt2" in result.output


def test_a_file_that_is_no_plan_is_named(archive: Path) -> None:
    result = autoshard("show", archive)
    assert result.exit_code == 1
    assert "mlp.pt2" in result.output
