"""Workers without a service: limits, cancelling, and an unavailable database."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from sqlalchemy import create_engine, text
from support.services import listening
from support.worker_threads import await_end, is_running, running_workers

from autoshard_server import ProcessExecutor, Settings
from autoshard_server.app import create_worker_app
from autoshard_server.problems import TYPE_PREFIX
from autoshard_server.solvers.executor import Solver
from autoshard_server.solvers.workers import MAX_LOST, SolverHealth
from autoshard_server.store.database import Stores
from autoshard_server.store.jobs import EventKind, JobState

SCRIPTED = [sys.executable, str(Path(__file__).parents[1] / "programs" / "scripted.py")]


def test_a_solve_over_its_memory_limit_fails_alone() -> None:
    with running_workers(ProcessExecutor(SCRIPTED, max_bytes=150 << 20)) as here:
        modest = here.submit("modest", seconds=1, answer="{}")
        hungry = here.submit("hungry", fill=4000)
        failed = here.await_job(hungry)
        assert failed.state is JobState.FAILED
        assert failed.error is not None
        assert failed.error["type"] == TYPE_PREFIX + "out-of-memory"
        assert "150 MiB" in failed.error["detail"]
        assert failed.error["limit_name"] == "AUTOSHARD_MAX_JOB_BYTES"
        assert failed.attempts == 1
        needed = int(failed.error["detail"].split("needed ")[1].split(" ")[0].replace(",", ""))
        assert 150 <= needed < 1000
        assert here.await_job(modest).state is JobState.SUCCEEDED
        assert here.starts(modest) == 1


def test_cancel_frees_the_processor_within_a_second() -> None:
    with running_workers(ProcessExecutor(SCRIPTED)) as here:
        job_id = here.submit("busy", spin=True)
        job = here.await_job(job_id, lambda job: "child" in job.progress)
        child = job.progress["child"]
        parent = psutil.Process(child).ppid()
        assert is_running(parent)
        here.stores.jobs.cancel(job_id)
        await_end(parent, child)
        assert here.job(job_id).state is JobState.CANCELLED


@pytest.mark.thorough
def test_a_database_that_goes_away_loses_no_work(postgres: Any) -> None:
    url = postgres.create_database()
    with running_workers(ProcessExecutor(SCRIPTED), store_url=url, num_workers=1) as here:
        job_id = here.submit("p", seconds=1, answer='"solved once"')
        here.await_job(job_id, lambda job: job.state is JobState.RUNNING)
        postgres.stop()
        # Longer than the solve: it ends while nobody can be told.
        time.sleep(2)
        postgres.start()
        done = here.await_job(job_id)
        assert done.state is JobState.SUCCEEDED
        assert here.result(job_id) == b'"solved once"'
        assert here.starts(job_id) == 1
        assert here.workers.alive
        # And the next one is found without anybody's help.
        assert here.await_job(here.submit("q", answer="1")).state is JobState.SUCCEEDED


@pytest.mark.thorough
def test_a_project_gets_a_worker_while_500_jobs_of_another_wait() -> None:
    lanes = {"num_quick_workers": 1, "num_reserve_workers": 1}
    with running_workers(ProcessExecutor(SCRIPTED), **lanes) as here:
        large = [
            here.submit(f"large {i}", kind="plan", project="a", seconds=3600, answer="1")
            for i in range(500)
        ]
        here.await_job(large[1], lambda job: job.state is JobState.RUNNING)
        small = here.submit("small", kind="plan", project="b", answer="1")
        assert here.await_job(small).state is JobState.SUCCEEDED
        # Questions of the busy project do not wait for its solves, and those of others neither.
        questions = [here.submit(f"size {p}", project=p, answer="1") for p in ("a", "b")]
        assert [here.await_job(q).state for q in questions] == [JobState.SUCCEEDED] * 2
        states = [here.job(job_id).state for job_id in large]
        assert states == [JobState.RUNNING] * 2 + [JobState.QUEUED] * 498


def test_what_somebody_else_has_made_meanwhile_is_not_made_again() -> None:
    with running_workers(ProcessExecutor(SCRIPTED)) as here:
        here.stores.cache.put("validations", "known", b'"made before"')
        job = here.await_job(here.submit("known", answer='"made again"'))
        assert here.result(job.id) == b'"made before"'


def test_a_cache_that_cannot_be_read_costs_a_job_nothing(postgres: Any) -> None:
    url = postgres.create_database()
    impatient = f"{url}&options=-c%20lock_timeout%3D200"
    other = create_engine(url)
    with running_workers(ProcessExecutor(SCRIPTED), store_url=impatient, num_workers=1) as here:
        with other.begin() as connection:
            connection.execute(text("LOCK TABLE cache_entries IN ACCESS EXCLUSIVE MODE"))
            job_id = here.submit("p", reports=1, seconds=1, answer='"made"')
            here.await_job(job_id, lambda job: bool(job.progress))
        assert here.await_job(job_id).state is JobState.SUCCEEDED
        assert here.starts(job_id) == 1
    other.dispose()


def test_reports_in_quick_succession_are_few_events() -> None:
    with running_workers(ProcessExecutor(SCRIPTED)) as here:
        job_id = here.submit("p", reports=100, answer="1")
        here.await_job(job_id)
        told = [e for e in here.stores.jobs.events(job_id) if e.kind is EventKind.PROGRESS]
        assert 1 <= len(told) <= 20


def test_solvers_lost_in_a_row_say_that_a_worker_is_unfit() -> None:
    now = 0.0
    health = SolverHealth(lambda: now)
    pauses = []
    for _ in range(MAX_LOST - 1):
        health.lost()
        pauses.append(health.delay)
        assert health.is_good
    health.ready()
    for _ in range(9):
        health.lost()
        pauses.append(health.delay)
    assert not health.is_good
    assert pauses == [0, 1, 0, 1, 2, 4, 8, 16, 30, 30, 30]
    health.prepared()
    now = 9.0
    health.waited()
    assert not health.is_good
    now = 10.0
    health.waited()
    assert health.is_good


@pytest.mark.thorough
def test_a_worker_without_solvers_is_not_alive_until_it_has_some() -> None:
    @dataclass
    class Broken:
        """Starts nothing at first, then programs that end at once, and then what works."""

        commands: list[list[str] | None]

        def prepare(self) -> Solver:
            command = self.commands.pop(0) if self.commands else SCRIPTED
            if command is None:
                raise OSError("no more processes")
            return ProcessExecutor(command).prepare()

    ends = [sys.executable, "-S", "-c", "pass"]
    with running_workers(Broken([None, ends, ends]), num_workers=1) as here:
        assert here.workers.alive
        here.await_unhealthy()
        assert here.workers.are_running
        job = here.submit("p", answer="1")
        assert here.await_job(job).state is JobState.SUCCEEDED
        assert here.workers.alive


def test_a_worker_shows_figures_to_who_has_a_key(tmp_path: Path) -> None:
    settings = Settings(store_url=f"sqlite:///{tmp_path / 's.sqlite3'}", auth="required")
    with running_workers(ProcessExecutor(SCRIPTED), store_url=settings.store_url) as here:
        _, token = here.stores.api_keys.create("prometheus", ["metrics"])
        app = create_worker_app(here.workers, here.stores, settings)
        with listening(app) as url, httpx2.Client(base_url=url) as http:
            assert http.get("/livez").json() == {"status": "ok"}
            assert http.get("/metrics").status_code == 401
            bearer = {"Authorization": f"Bearer {token}"}
            assert "autoshard_worker_alive 1.0" in http.get("/metrics", headers=bearer).text
            assert http.get("/v1/jobs", headers=bearer).json()["type"].endswith("#not-found")


def test_a_worker_that_stops_gives_its_job_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    with running_workers(ProcessExecutor(SCRIPTED), store_url=url) as here:
        job_id = here.submit("p", seconds=3600, answer="1")
        here.await_job(job_id, lambda job: job.state is JobState.RUNNING)
    stores = Stores(Settings(store_url=url))
    job = stores.jobs.get(job_id)
    assert job is not None
    assert (job.state, job.attempts) == (JobState.QUEUED, 0)
    stores.close()


def test_who_drains_claims_no_more_and_has_one_grace_period(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    with running_workers(ProcessExecutor(SCRIPTED), store_url=url, shutdown_grace=2) as here:
        jobs = [here.submit(name, seconds=3600, answer="1") for name in ("one", "other")]
        for job in jobs:
            here.await_job(job, lambda job: job.state is JobState.RUNNING)
        here.workers.drain()
        late = here.submit("late", answer="1")
        # The grace period began with draining, and ends before anybody asks to stop.
        for job in jobs:
            here.await_job(job, lambda job: job.state is JobState.QUEUED)
        here.workers.stop()
        assert {here.job(job).state for job in (*jobs, late)} == {JobState.QUEUED}
        assert [here.starts(job) for job in (*jobs, late)] == [1, 1, 0]


@pytest.mark.thorough
def test_a_solver_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "from autoshard_server import ProcessExecutor\n"
        "solver = ProcessExecutor().prepare()\n"
        f"open({str(pid_file)!r}, 'w').write(str(solver._process.pid))\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)  # noqa: S603  ours
    solver = int(pid_file.read_text())
    await_end(solver)
