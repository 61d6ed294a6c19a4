"""Progress on stderr, and Ctrl-C: once for the best plan so far, twice for the end."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from support.command_line import autoshard
from support.models import llama, meta

from autoshard.base.outcome import SolveStatus
from autoshard.checker import check_plan
from autoshard.cli import ExitCode, progress
from autoshard.client import Client, JobProgress
from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan
from autoshard.requests.this_process import ThisProcess


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose plans on three and four axes take several seconds."""
    model, kwargs = meta(llama, layers=4, batch=8, sequence=64)
    path = tmp_path_factory.mktemp("slow") / "llama.pt2"
    path.write_bytes(export_model(model, (), kwargs))
    return path


@contextmanager
def command(*arguments: object) -> Iterator["subprocess.Popen[str]"]:
    line = [sys.executable, "-m", "autoshard.cli", *map(str, arguments)]
    with subprocess.Popen(  # noqa: S603  our own program
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: "subprocess.Popen[str]", pattern: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(pattern, line):
            return
    pytest.fail(f"the command ended without {pattern!r}")


@pytest.mark.thorough
def test_ctrl_c_ends_a_search_with_the_meshes_that_are_planned(graph: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    options = ("--devices", 16, "--max-axes", 4, "--workers", 1, "--no-cache", "-o", best)
    with command("search", graph, *options) as process:
        wait_for(process, r"planned [1-4] of")
        process.send_signal(signal.SIGINT)
        shown, notes = process.communicate()
    assert process.returncode == ExitCode.STOPPED, notes
    assert "stopping: " in notes
    assert "stopped by Ctrl-C: this is the best plan so far" in notes
    assert "Traceback" not in notes
    assert "best first" in shown
    assert not check_plan(Plan.from_json(best.read_bytes()), load_graph(graph))


def test_a_second_ctrl_c_ends_the_command_at_once(graph: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    options = ("--mesh", "2,2,2,2", "--no-cache", "-o", best)
    with command("plan", graph, *options) as process:
        wait_for(process, "planning, ")
        process.send_signal(signal.SIGINT)
        wait_for(process, "stopping: ")
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate()
    # The first one may have ended the solver before the second one came.
    assert process.returncode in {ExitCode.INTERRUPTED, ExitCode.NO_PLAN}, notes
    assert "Traceback" not in notes
    assert not best.exists()


def test_a_stopped_plan_is_the_best_so_far_and_says_so(graph: Path) -> None:
    reports: list[JobProgress] = []

    class BestIsKnown:
        def is_set(self) -> bool:
            return any(report.gap is not None for report in reports)

    with Client.local(cache=False) as client:
        result = client.request_plan(
            graph, mesh=(2, 2, 2), on_progress=reports.append, stop=BestIsKnown()
        )
        assert result.plan is not None
        certificate = result.plan.certificate
        if certificate.status is not SolveStatus.OPTIMAL:
            assert certificate.status is SolveStatus.CANCELLED
            assert certificate.gap is not None
            assert certificate.gap > result.plan.options.solver.relative_gap
        assert not check_plan(result.plan, load_graph(graph))


def test_lines_of_progress_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress, "errors", Console(file=screen, width=200))
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.01)
    job = JobProgress(phase="branching", incumbent=0.02, bound=0.019, gap=0.05, elapsed=1.0)
    with progress.followed(quiet=True) as run:
        run.report(job)
    assert not screen.getvalue()
    with progress.followed(quiet=False) as run:
        run.report(job)
        while "branching" not in screen.getvalue():
            time.sleep(0.01)
    line = "planning, 0 s: branching, best 20.000 ms, bound 19.000 ms, gap 5.00%"
    assert line in screen.getvalue()


def test_the_handler_of_ctrl_c_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with progress.followed(quiet=True) as run:
        os.kill(os.getpid(), signal.SIGINT)
        assert run.stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_elsewhere_ends_the_command_without_a_traceback(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThisProcess, "coverage", interrupt)
    result = autoshard("coverage", graph)
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.output == "interrupted\n"
