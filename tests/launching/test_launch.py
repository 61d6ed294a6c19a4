"""Launching the ranks of a plan, through the command line and from Python."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import launched_program
from support.meshes import slow_devices
from support.models import graph_of, meta, mlp, residuals
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.errors import LaunchError, PlanError
from autoshard.graph import graph_from_json
from autoshard.launching.functions import failures_recorded, first_failure
from autoshard.lowering.buckets import buckets_of
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.requests.kept_plans import OfflinePlans

PROGRAM = Path(launched_program.__file__)
TIMEOUT = 300


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two buckets, of which one gathers: the gradients of one are reduced beside the other's."""
    pins = {
        "inputs": {"x": "S(0)"},
        "parameters": {"up.*": "S(0)", "down.*": "I"},
        "nodes": {"*": "S(0)"},
    }
    options = PlanOptions(optimizer="sgd", pins=pins)
    made = make_plan(graph_of(meta(mlp)), slow_devices(rows=2), options)
    stage = made.stages[0]
    assert len(buckets_of(stage, graph_from_json(stage.program))) == 2
    return made


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "plan.json"
    path.write_text(plan.to_json())
    return path


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_function_runs_on_every_rank(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = autoshard.launch(launched_program.train, plan, (0.1,))
    assert [rank for rank, *_ in results] == [0, 1]
    for _, names, loss, gradient in results:
        assert names == ("rows",)
        assert loss == pytest.approx(0.0, abs=1e-6)
        assert gradient == pytest.approx(0.0, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_failing_rank_ends_the_job_and_shows_its_traceback_once(
    plan: Plan, tmp_path: Path
) -> None:
    # The plan's service is down; it was asked for the plan before, on this machine.
    OfflinePlans(tmp_path).keep(plan)
    down = {"AUTOSHARD_SERVER": "http://127.0.0.1:9", "AUTOSHARD_CACHE": str(tmp_path)}
    folders = os.pathsep.join(str(PROGRAM.parents[up]) for up in (1, 2))
    command = [sys.executable, "-m", "autoshard.cli", "launch", "--plan", plan.id, "--timing"]
    done = subprocess.run(  # noqa: S603  our own program
        [*command, "--monitor-interval=0.1", PROGRAM, "fail"],
        env={**os.environ, **down, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "that is kept on this machine" in done.stderr
    assert "error: rank 1 failed:" in done.stderr
    failures = re.findall(r"ValueError: a list\[int\] went wrong with \d+ under way", done.stderr)
    assert len(failures) == 1
    assert "with 0 under way" not in failures[0]
    assert done.stderr.count("Traceback (most recent call last)") == 1
    # The traceback begins with the user's program.
    assert "runpy" not in done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("autoshard: step")]
    assert len(steps) == launched_program.STEPS
    assert all("predicted" in line for line in steps)
    assert "is done" not in done.stdout


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    "axes", [pytest.param({"a": 4}, id="4", marks=pytest.mark.long), {"a": 2, "b": 2}]
)
def test_torchrun_trains_and_a_killed_rank_ends_the_others(
    axes: dict[str, int], tmp_path: Path
) -> None:
    pins = {"parameters": {"up.weight": ",".join(["S(0)"] * len(axes))}}
    plan = make_plan(graph_of(meta(mlp)), slow_devices(**axes), PlanOptions(pins=pins))
    check_killed(plan, "kill", tmp_path)


@pytest.mark.long
@pytest.mark.ranks
def test_a_killed_rank_ends_the_other_pipeline_stages(tmp_path: Path) -> None:
    options = PlanOptions(stages=4, schedule="1F1B", micro_batches=4)
    plan = make_plan(graph_of(meta(residuals)), slow_devices(pp=4), options)
    assert len(plan.stages) == 4
    check_killed(plan, "kill a stage", tmp_path)


def check_killed(plan: Plan, argument: str, folder: Path) -> None:
    """The last rank is killed after a step, and the others end by themselves."""
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    folders = os.pathsep.join(str(PROGRAM.parents[up]) for up in (1, 2))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    done = subprocess.run(  # noqa: S603  our own program
        [*command, "--monitor-interval=0.1", PROGRAM, argument],
        env={
            **os.environ,
            "AUTOSHARD_PLAN": str(path),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": folders,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    for rank in range(4):
        assert f"rank {rank} has trained" in done.stdout
    for rank in range(3):
        assert f"rank {rank} ends: " in done.stdout
    assert "is done" not in done.stdout
    assert "SIGKILL" in done.stderr or "-9" in done.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--nproc", "3"], "for 2 devices (rows=2), but 3 processes"),
        (["--nnodes", "2", "--nproc-per-node", "2"], "but 4 processes"),
        (["--nnodes", "3"], "do not divide evenly over 3 nodes"),
        (["--nnodes", "1:2"], "fixed number"),
        (["--no-python"], "a Python program"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(
    path: Path, options: list[str], complaint: str
) -> None:
    result = CliRunner().invoke(app, ["launch", "--plan", str(path), *options, str(PROGRAM)])
    assert result.exit_code == 1
    assert complaint in " ".join(result.output.split())


def test_a_file_that_is_no_plan_is_named() -> None:
    result = CliRunner().invoke(app, ["launch", "--plan", str(PROGRAM), str(PROGRAM)])
    assert result.exit_code == 1
    assert PROGRAM.name in result.output


def test_outside_of_a_launch_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSHARD_PLAN", raising=False)
    with pytest.raises(PlanError, match="autoshard launch --plan"):
        autoshard.get_context()


def test_without_a_plan_nothing_is_launched(plan: Plan) -> None:
    nothing = plan.model_copy(update={"stages": (), "reason": "out of luck"})
    with pytest.raises(PlanError, match="no plan to launch: out of luck"):
        autoshard.launch(launched_program.train, nothing)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which rank 3 has failed before rank 0."""
    for rank in (3, 0):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit), failures_recorded(tmp_path):
            raise ZeroDivisionError(f"on rank {rank}")
    return tmp_path


def failed(**exitcodes: int) -> ChildFailedError:
    failures = {
        int(rank.removeprefix("rank")): ProcessFailure(0, 1, code, "no file")
        for rank, code in exitcodes.items()
    }
    return ChildFailedError("program", failures)


def test_the_first_failure_is_shown(notes: Path) -> None:
    error = first_failure(notes, failed(rank0=1, rank3=1))
    assert error.rank == 3
    assert "on rank 3" in str(error)


def test_a_rank_that_was_killed_is_the_cause(notes: Path) -> None:
    error = first_failure(notes, failed(rank0=1, rank2=-signal.SIGKILL, rank3=-signal.SIGTERM))
    assert error.rank == 2
    assert "SIGKILL" in str(error)


def test_a_status_without_a_traceback_is_named(tmp_path: Path) -> None:
    error = first_failure(tmp_path, failed(rank1=4))
    assert isinstance(error, LaunchError)
    assert str(error) == "rank 1 ended with status 4"
