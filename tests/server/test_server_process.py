"""The service as it is started for real: a process of its own, ended by a signal."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from autoshard.client import Client
from autoshard.plan import Plan


def test_it_serves_logs_json_and_ends_in_peace(tmp_path: Path, graph: bytes) -> None:
    store = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    command = [sys.executable, "-m", "autoshard_server", "--port", "0", "--store-url", store]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603  ours
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "Uvicorn running on" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:\d+", lines[-1])
        assert found, lines
        with Client(found[0]) as client:
            first = client.request_plan(graph, mesh=(2,))
            second = client.request_plan(graph, mesh=(2,))
        process.send_signal(signal.SIGTERM)
        lines += process.stderr.readlines()
    assert process.returncode == -signal.SIGTERM
    assert (first.cached, second.cached) == (False, True)
    assert isinstance(first.plan, Plan)
    assert first.plan == second.plan
    logged = [json.loads(line) for line in lines]
    requests = [entry for entry in logged if entry["event"] == "request"]
    assert len({entry["request_id"] for entry in requests}) == len(requests) > 0
    finished = [entry for entry in logged if entry["event"] == "job_finished"]
    assert [entry["plan_id"] for entry in finished] == [first.plan.id]
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{found[0]}/livez")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--log-level", "loud"], "loud"),
        (["--port", "0", "--store-url", "sqlite:////proc/nowhere/s.sqlite3"], "/proc/nowhere"),
    ],
)
def test_what_cannot_work_ends_with_a_message(flags: list[str], word: str) -> None:
    command = [sys.executable, "-m", "autoshard_server", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  ours
    assert ended.returncode != 0
    assert word in ended.stderr
