"""Solves on a real Ray cluster on this machine, which is started once for all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.worker_threads import RunningWorkers, await_end, is_running, running_workers

from autoshard_server.problems import TYPE_PREFIX
from autoshard_server.solvers.messages import Died, SolverInput
from autoshard_server.store.jobs import JobState

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'autoshard[ray]'")

pytestmark = [
    pytest.mark.ray,
    # Ray's own: it opens pipes and files that it leaves to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SCRIPTED = [sys.executable, str(Path(__file__).parents[1] / "programs" / "scripted.py")]


@pytest.fixture(scope="module")
def here() -> Iterator[RunningWorkers]:
    from autoshard_server.solvers.ray_executor import RayExecutor  # noqa: PLC0415  where Ray is installed

    before = signal.getsignal(signal.SIGTERM)
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    executor = RayExecutor(max_bytes=150 << 20, command=SCRIPTED, **options)
    assert signal.getsignal(signal.SIGTERM) is before
    with running_workers(executor, num_workers=2) as made:
        yield made
    ray.shutdown()


def actor_pids() -> set[int]:
    """Processes of our actors."""
    found = psutil.process_iter(["cmdline"])
    return {p.pid for p in found if (p.info["cmdline"] or [""])[0].startswith("ray::SolverActor")}


def solvers_of(actor: int) -> list[int]:
    return [child.pid for child in psutil.Process(actor).children()]


@pytest.mark.thorough
def test_a_solve_on_ray_reports_and_answers(here: RunningWorkers) -> None:
    job = here.await_job(here.submit("a", reports=3, seconds=0.5, answer='"done"'))
    assert job.state is JobState.SUCCEEDED
    assert job.progress == {"phase": "2"}
    assert here.result(job.id) == b'"done"'


@pytest.mark.thorough
def test_a_solve_on_ray_over_its_memory_limit_fails_alone(here: RunningWorkers) -> None:
    hungry = here.submit("b", fill=4000)
    modest = here.submit("c", answer='"fine"')
    failed = here.await_job(hungry)
    assert failed.error is not None
    assert failed.error["type"] == TYPE_PREFIX + "out-of-memory"
    assert here.await_job(modest).state is JobState.SUCCEEDED


@pytest.mark.thorough
def test_workers_without_a_job_keep_no_processors_of_the_cluster(here: RunningWorkers) -> None:
    # There are two workers, and the cluster has one processor.
    for _ in range(2):
        jobs = [here.submit(f"f{number}", answer='"done"') for number in range(2)]
        assert {here.await_job(job).state for job in jobs} == {JobState.SUCCEEDED}


@pytest.mark.thorough
def test_cancel_on_ray_frees_the_processor(here: RunningWorkers) -> None:
    job_id = here.submit("d", spin=True)
    child = here.await_job(job_id, lambda job: "child" in job.progress).progress["child"]
    parent = psutil.Process(child).ppid()
    here.stores.jobs.cancel(job_id)
    await_end(parent, child)


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_a_solver_that_cannot_be_given_its_work_is_lost(tmp_path: Path) -> None:
    from autoshard_server.solvers.ray_executor import RayExecutor  # noqa: PLC0415  where Ray is installed

    # No process can be started on the cluster, neither by the first actor nor by the second.
    solver = RayExecutor(command=[str(tmp_path / "missing")], cpus=0).prepare()
    assert solver.is_alive()
    solver.start(SolverInput("{}", b""))
    messages = iter(lambda: solver.receive(0.2), ())
    found = next(message for message in messages if message is not None)
    assert isinstance(found, Died)
    assert found.problem["type"] == TYPE_PREFIX + "solver-crashed"
    assert "lost" in found.problem["detail"]
    solver.stop()


@pytest.mark.thorough
def test_a_ray_worker_that_is_killed_has_its_job_tried_again(here: RunningWorkers) -> None:
    job_id = here.submit("e", reports=1, seconds=2, answer='"in the end"')
    here.await_job(job_id, lambda job: bool(job.progress))
    (actor,) = (pid for pid in actor_pids() if solvers_of(pid))
    (solver,) = solvers_of(actor)
    os.kill(actor, signal.SIGKILL)
    job = here.await_job(job_id)
    assert (job.state, job.attempts) == (JobState.SUCCEEDED, 2)
    assert here.result(job_id) == b'"in the end"'
    assert not is_running(solver)
