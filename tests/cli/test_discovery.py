"""Operators without a rule, from the command line."""

import json
from pathlib import Path

import torch
from support import custom_operators
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.graph import export_model


@torch.library.custom_op("shardtest::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"{x.dim()} dims are not what I want")


refuses.register_fake(torch.empty_like)


class Failing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return refuses(x)


def test_the_command_line_imports_and_discovers(tmp_path: Path) -> None:
    archive, plan = tmp_path / "mixer.pt2", tmp_path / "plan.json"
    model, kwargs = custom_operators.mixer(batch=64, sequence=256, features=256)
    archive.write_bytes(export_model(model, (), kwargs))
    ask = ["plan", str(archive), "--mesh", "4", "--no-cache", "-o", str(plan)]
    runner = CliRunner()
    done = runner.invoke(app, [*ask, "--import", "support.custom_operators"])
    assert done.exit_code == 0, done.output
    assert json.loads(plan.read_text())["stages"][0]["program"]["rules"]
    checked = runner.invoke(app, ["check", str(archive), str(plan)])
    assert checked.exit_code == 0, checked.output
    assert runner.invoke(app, [*ask, "--no-discover"]).exit_code == 0
    assert "rules" not in json.loads(plan.read_text())["stages"][0]["program"]
    refused = runner.invoke(app, [*ask, "--import", "there.is.none"])
    assert refused.exit_code == 1
    assert "--import 'there.is.none'" in refused.output


def test_coverage_names_rules_that_were_found(tmp_path: Path) -> None:
    archive, folder = tmp_path / "mixer.pt2", tmp_path / "kept"
    model, kwargs = custom_operators.mixer()
    archive.write_bytes(export_model(model, (), kwargs))

    def uses(*more: str) -> dict[str, tuple[bool, bool]]:
        ask = ["coverage", str(archive), "--import", "support.custom_operators", "--json", *more]
        done = CliRunner().invoke(app, ask)
        assert done.exit_code == 0, done.output
        operators = json.loads(done.stdout)["operators"]
        return {use["operator"]: (use["has_rule"], use["found_rule"]) for use in operators}

    found = uses("--cache", str(folder))
    assert found["shardtest.gate.default"] == (False, True)
    assert found["aten.linear.default"] == (True, False)
    assert uses("--no-cache", "--no-discover")["shardtest.gate.default"] == (False, False)
    table = CliRunner().invoke(app, ["coverage", str(archive), "--no-cache"])
    assert "found" in table.output


def test_coverage_reports_what_cannot_be_tried(tmp_path: Path) -> None:
    archive = tmp_path / "refuses.pt2"
    archive.write_bytes(export_model(Failing(), (torch.zeros(8, 16),)))
    done = CliRunner().invoke(app, ["coverage", str(archive), "--no-cache"])
    assert "shardtest.refuses.default is replicated" in " ".join(done.stderr.split())
