"""Text of the summary and the tables of plans, at 80 and 120 columns and in a pipe.

`python -m pytest tests/cli/test_snapshots.py --update-snapshots` writes the expected files again.
"""

import csv
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.command_line import autoshard
from support.models import llama
from support.transformer_plans import planned

from autoshard.cli.rendering.render_plan import plan_report
from autoshard.cli.rendering.tables import print_report
from autoshard.plan import Plan
from autoshard.report.tables import Report

FOLDER = Path(__file__).parent / "snapshots"
COMMANDS = ["autoshard show plan.json --all", "autoshard launch --plan plan.json train.py"]
WIDTHS = {"80": 80, "120": 120, "pipe": None}


@pytest.fixture(scope="module")
def plan() -> Plan:
    """FSDP along one axis, tensor and sequence parallelism along the other, by pins."""
    return planned(llama, "2x2", "sequence")


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return path


def text_of(report: Report, width: int | None) -> str:
    """A report on a terminal of a width, without styles; or in a pipe."""
    stream = StringIO()
    is_terminal = width is not None
    console = Console(file=stream, width=width or 80, force_terminal=is_terminal, color_system=None)
    print_report(report, console)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def compare(name: str, text: str, *, update: bool) -> None:
    path = FOLDER / f"{name}.txt"
    if update:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("medium", WIDTHS)
def test_summary(plan: Plan, medium: str, *, update_snapshots: bool) -> None:
    text = plan.summary(width=WIDTHS[medium], commands=COMMANDS) + "\n"
    compare(f"summary_{medium}", text, update=update_snapshots)


@pytest.mark.parametrize("medium", WIDTHS)
def test_tables(plan: Plan, medium: str, *, update_snapshots: bool) -> None:
    text = text_of(plan_report(plan), WIDTHS[medium])
    compare(f"tables_{medium}", text, update=update_snapshots)


def test_short_notation_has_a_legend(plan: Plan, *, update_snapshots: bool) -> None:
    text = text_of(plan_report(plan, ("parameters",), notation="short"), None)
    compare("parameters_short", text, update=update_snapshots)


def test_names_are_found_in_a_pipe(file: Path) -> None:
    result = autoshard("show", file, "--parameters")
    lines = [line for line in result.output.splitlines() if "self_attn.q_proj.weight" in line]
    (line,) = lines
    assert line.startswith("model.layers.{0..1}.self_attn.q_proj.weight ")
    assert "Shard(0), Shard(1)" in line


def test_csv_and_json_have_raw_values(file: Path, plan: Plan) -> None:
    assert plan.memory is not None
    assert plan.costs is not None
    rows = list(
        csv.DictReader(StringIO(autoshard("show", file, "--memory", "--format", "csv").output))
    )
    assert {row["kind"]: row["size_bytes"] for row in rows}["peak"] == str(plan.memory.peak)
    document = json.loads(autoshard("show", file, "--costs", "--json").output)
    assert set(document) == {"costs"}
    assert document["costs"][-1]["cost"] == "total"
    assert document["costs"][-1]["time_seconds"] == plan.costs.total


def test_show_without_options_is_the_summary(file: Path, plan: Plan) -> None:
    output = autoshard("show", file).output
    assert output.startswith(plan.summary())
    assert f"autoshard show {file} --all" in output


def test_several_tables_of_csv_are_separated_by_empty_lines(file: Path) -> None:
    parts = autoshard("show", file, "--all", "--format", "csv").output.split("\n\n")
    assert [next(csv.reader(StringIO(part)))[0] for part in parts] == [
        "parameter",
        "collective",
        "cost",
        "kind",
    ]
