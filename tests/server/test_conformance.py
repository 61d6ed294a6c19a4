"""Conformance of the API to its specification, and of a client generated from it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conformance import conform

ROOT = Path(__file__).parents[2]


def test_every_answer_conforms() -> None:
    found = conform(2, phases="examples,fuzzing")
    assert found.status == 0, found.text
    assert found.num_cases >= 40
    selected, total = found.num_operations.split("/")
    assert selected == total


def test_a_generated_client_works(
    service: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Path(sys.executable).parent
    command = [str(programs / "openapi-python-client"), "generate"]
    given = ["--path", str(ROOT / "openapi" / "openapi.json"), "--output-path", "made"]
    ended = subprocess.run(  # noqa: S603  ours
        [*command, *given, "--meta", "none"],
        cwd=tmp_path,
        # It has ruff put right what it writes, and looks for it there.
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    monkeypatch.syspath_prepend(tmp_path)
    answered = service.post(make_graph(80), wait=60)
    with importlib.import_module("made").Client(base_url=service.url) as client:
        look_around(client, answered.json())


def look_around(client: Any, answered: dict[str, Any]) -> None:
    """Ask a service about the plan that it made last."""

    def call(room: str, name: str, *arguments: Any, **options: Any) -> Any:
        module = importlib.import_module(f"made.api.{room}.{name}")
        return module.sync(*arguments, client=client, **options)

    plan = call("plans", "get_plan", answered["id"])
    assert plan.to_dict()["certificate"] == answered["certificate"]
    listed = call("plans", "list_plans", page_size=1)
    assert listed.plans[0].id == plan.id
    (job,) = call("jobs", "list_jobs", page_size=1).jobs
    assert call("jobs", "get_job", job.id).result.to_dict()["id"] == plan.id
    problem = call("plans", "get_plan", "0" * 64)
    assert (problem.status, problem.title) == (404, "Not found")
