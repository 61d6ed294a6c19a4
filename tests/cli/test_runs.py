"""Commands that run plans, as far as they need no ranks."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import autoshard
from support.pipeline_plans import equal_stages_plan

from autoshard.measure import calibration
from autoshard.mesh import get_topology, topology_from_json, topology_to_json
from autoshard.plan import Plan
from autoshard.plan.document import StageTimes
from autoshard.schedules.schedule import Schedule


def test_simulate_shows_a_step_and_writes_its_trace(archive: Path, tmp_path: Path) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    autoshard("plan", archive, "--mesh", "2,4", "--axes", "x,y", "--no-cache", "-o", plan)
    result = autoshard("simulate", plan, "-o", trace)
    assert result.exit_code == 0, result.output
    total = Plan.from_json(plan.read_bytes()).costs
    assert total is not None
    for text in (f"takes {total.total * 1e3:.3f} ms", "axis x", "linear.default", "Memory peaks"):
        assert text in result.output
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_shows_the_schedule_of_a_pipeline(archive: Path, tmp_path: Path) -> None:
    plan, made = tmp_path / "plan.json", tmp_path / "pipeline.json"
    trace, picture = tmp_path / "trace.json", tmp_path / "schedule.svg"
    autoshard("plan", archive, "--mesh", "2", "--no-cache", "-o", plan)
    times = StageTimes(forward=1e-3, backward_input=1e-3, backward_weight=1e-3, end=1e-3)
    pipeline = equal_stages_plan(
        Plan.from_json(plan.read_bytes()), Schedule("1F1B", 2, 1, 4), times
    )
    made.write_text(pipeline.to_json())
    result = autoshard("simulate", made, "-o", trace, "--svg", picture)
    assert result.exit_code == 0, result.output
    for text in ("takes 16.000 ms", "Schedule 1F1B, 4 micro-batches", "idle for 18.8%"):
        assert text in result.output
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_text().startswith("<svg")
    result = autoshard("simulate", plan, "--svg", picture)
    assert result.exit_code == 1
    assert "this is one stage" in result.output


def test_simulate_shows_the_operators_of_a_stage(archive: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    options = ("--stages", "2", "--micro-batches", "2", "--no-cache", "-o", plan)
    assert autoshard("plan", archive, "--mesh", "2", *options).exit_code == 0
    pipeline = Plan.from_json(plan.read_bytes()).pipeline
    assert pipeline is not None
    for number, summary in enumerate(pipeline.stages):
        result = autoshard("simulate", plan, "--stage", number)
        assert result.exit_code == 0, result.output
        assert f"takes {summary.costs.total * 1e3:.3f} ms" in result.output
        assert "linear.default" in result.output
    result = autoshard("simulate", plan, "--stage", 2)
    assert result.exit_code == 1
    assert "no pipeline stage 2" in result.output


def test_simulate_names_a_file_without_a_plan(archive: Path) -> None:
    result = autoshard("simulate", archive)
    assert result.exit_code == 1
    assert "mlp.pt2" in result.output


def test_a_topology_in_a_file_is_planned_on(archive: Path, tmp_path: Path) -> None:
    path, plan = tmp_path / "mine.json", tmp_path / "plan.json"
    path.write_text(topology_to_json(get_topology("a100-sxm-80gb")).replace("a100", "mine"))
    options = ("--topology", path, "--no-cache", "-o", plan)
    assert autoshard("plan", archive, "--mesh", "2", *options).exit_code == 0
    assert Plan.from_json(plan.read_bytes()).mesh.topology.name == "mine-sxm-80gb"
    assert autoshard("search", archive, "--devices", "2", *options).exit_code == 0
    path.write_text("{}")
    result = autoshard("plan", archive, "--mesh", "2", *options)
    assert result.exit_code == 1
    assert "mine.json: topology.name" in result.output


def test_calibrate_says_how_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = autoshard("calibrate", "-o", tmp_path / "topology.json")
    assert result.exit_code == 1
    assert "--nproc" in result.output


def test_calibrate_measures_one_device_on_known_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    few = replace(calibration.QUICK, elements=(1 << 14,), num_runs=3, num_repeats=1, seconds=0.0)
    monkeypatch.setattr(calibration, "QUICK", few)
    path = tmp_path / "topology.json"
    result = autoshard("calibrate", "--quick", "--links", "h100-sxm", "-o", path)
    assert result.exit_code == 0, result.output
    found, known = topology_from_json(path.read_bytes()), get_topology("h100-sxm")
    assert found.name == "calibrated"
    assert found.levels == known.levels
    assert found.device.operators
    assert not found.source.startswith(known.source)
    assert "matrix products (" in result.output
    assert list(tmp_path.iterdir()) == [path]
    result = autoshard("calibrate", "-o", path)
    assert result.exit_code == 1
    assert "--links" in result.output


@pytest.mark.parametrize("command", ["profile", "simulate"])
def test_without_a_plan_nothing_runs(command: str, archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    autoshard("plan", archive, "--mesh", "2", "--memory-budget", "1MB", "--no-cache", "-o", path)
    result = autoshard(command, path)
    assert result.exit_code == 1
    assert "no plan to" in result.output
