"""The service as a separate process, ended by a signal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.services import free_port

from autoshard.client import Client
from autoshard.plan import Plan
from autoshard_server import Settings
from autoshard_server.store.database import Stores


@pytest.mark.thorough
def test_it_serves_logs_json_and_ends_in_peace(tmp_path: Path, graph: bytes) -> None:
    store = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    command = [sys.executable, "-m", "autoshard_server", "--port", "0", "--store-url", store]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603  ours
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if json.loads(line)["event"] == "serving":
                break
        url = json.loads(lines[-1]).get("url", "")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url), lines
        rebound = httpx2.get(f"{url}/v1/jobs", headers={"Host": "rebound.example"})
        assert rebound.status_code == 403
        with Client(url) as client:
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
        httpx2.get(f"{url}/livez")


@pytest.mark.thorough
def test_a_worker_shows_whether_it_can_work(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    stores = Stores(Settings(store_url=store))
    port = free_port()
    command = [sys.executable, "-m", "autoshard.cli", "worker", "--store", store, "--workers", "1"]
    shown = ["--port", str(port)]

    def until(status: int, *, kill: bool = False) -> None:
        for _ in range(6000):
            if kill:
                for solver in psutil.Process(process.pid).children():
                    with suppress(psutil.NoSuchProcess):
                        solver.kill()
            with suppress(httpx2.TransportError):
                if http.get("/livez").status_code == status:
                    return
            time.sleep(0.05)
        raise AssertionError(f"/livez did not become {status}")

    def do_job() -> None:
        # Of a kind that nobody knows: the solver itself says so.
        job = stores.jobs.submit("a", '{"kind": "dream"}', b"", max_queued=9, kind="dream")
        for _ in range(6000):
            found = stores.jobs.get(job.id)
            if found is not None and found.state.done:
                return
            time.sleep(0.05)
        raise AssertionError("the job was not done")

    with (
        subprocess.Popen([*command, *shown], stderr=subprocess.PIPE, text=True) as process,  # noqa: S603  ours
        httpx2.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        try:
            until(200)
            do_job()
            assert job_count(http) == 1
            until(503, kill=True)
            assert "autoshard_worker_alive 0.0" in http.get("/metrics").text
            taken = subprocess.run([*command, *shown], capture_output=True, text=True, check=False)  # noqa: S603  ours
            assert (taken.returncode, f"127.0.0.1:{port}" in taken.stderr) == (3, True)
        finally:  # else leaving the context would wait for it
            process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        events = [json.loads(line)["event"] for line in process.stderr if line.startswith("{")]
    assert process.returncode == 0
    told = [event for event in events if event.startswith("worker_")]
    assert told == [
        "worker_started",
        "worker_serving",
        "worker_unfit",
        "worker_draining",
        "worker_ended",
    ]
    stores.close()


@pytest.mark.thorough
def test_processes_that_count_together_show_each_figure_once(tmp_path: Path) -> None:
    code = (
        "from autoshard_server import Settings, ThreadExecutor\n"
        "from autoshard_server.service import Service\n"
        "from autoshard_server.routes.health import service_metrics\n"
        "from autoshard_server.telemetry import job_seconds\n"
        "job_seconds.labels('plan', 'succeeded').observe(1)\n"
        "service = Service(Settings(store_url='sqlite://', num_workers=0), ThreadExecutor(None))\n"
        "service_metrics(service)\n"
        "print(service_metrics(service).decode())\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for number in (1, 2):
        ended = subprocess.run(  # noqa: S603  ours
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        families = {f.name: f for f in text_string_to_metric_families(ended.stdout)}
        names = re.findall("^# TYPE ([^ ]+)", ended.stdout, re.MULTILINE)
        assert len(names) == len(set(names)) >= 6
        assert "pid=" not in ended.stdout
        counts = families["autoshard_job_duration_seconds"].samples
        assert {s.value for s in counts if s.name.endswith("_count")} == {number}


def job_count(http: httpx2.Client) -> float:
    counted = r'^autoshard_job_duration_seconds_count\{kind="other",outcome="failed"\} (.*)$'
    found = re.search(counted, http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--log-level", "loud"], "loud"),
        (["--port", "0", "--store-url", "sqlite:////proc/nowhere/s.sqlite3"], "/proc/nowhere"),
        (["--port", "0", "--store-url", "postgresql://me:secret@127.0.0.1:9/x"], "startup_failed"),
    ],
)
def test_what_cannot_work_ends_with_a_message(flags: list[str], word: str) -> None:
    command = [sys.executable, "-m", "autoshard_server", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  ours
    assert ended.returncode != 0
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "secret" not in ended.stderr
