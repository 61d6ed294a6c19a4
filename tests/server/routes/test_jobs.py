"""Jobs over HTTP: progress, results, errors, cancelling."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import text

from autoshard.plan import Plan
from autoshard_server import ProcessExecutor, ThreadExecutor
from autoshard_server.problems import TYPE_PREFIX
from autoshard_server.solvers.messages import Progressed, Solved, SolverInput
from autoshard_server.solvers.solving import solve

PROGRAMS = Path(__file__).parents[1] / "programs"


def process_of(solver: Any) -> int:
    pid: int = solver._process.pid
    return pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def await_gone(pid: int) -> bool:
    for _ in range(6000):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_job_is_accepted_and_ends_with_its_plan(start_service: Any, graph: bytes) -> None:
    service = start_service(executor=ProcessExecutor())
    response = service.post(graph)
    assert response.status_code == 202
    assert response.headers["Retry-After"] == "1"
    assert response.headers["Autoshard-Cache"] == "miss"
    accepted = response.json()
    assert response.headers["Location"] == f"/v1/jobs/{accepted['id']}"
    assert accepted["state"] in {"queued", "running"}
    assert not accepted["done"]
    job = service.await_job(accepted["id"])
    assert job["state"] == "succeeded"
    assert "error" not in job
    plan = Plan.model_validate(job["result"])
    assert plan.id == job["plan_id"]
    assert service.http.get(f"/v1/plans/{plan.id}").json() == job["result"]


def test_progress_is_shown_and_cancel_kills_the_process(
    start_service: Any, graph: bytes, program: Any, recording: Any
) -> None:
    executor = recording(program("hang"))
    service = start_service(executor=executor)
    job_id = service.post(graph).json()["id"]
    job = service.await_job(job_id, lambda job: job["metadata"]["phase"] == "branching")
    assert job["state"] == "running"
    assert job["metadata"]["incumbent"] == 2.0
    assert job["metadata"]["bound"] == 1.0
    assert job["metadata"]["gap"] == 0.5
    pid = process_of(executor.solvers[0])
    assert is_alive(pid)
    cancelled = service.http.post(f"/v1/jobs/{job_id}:cancel").json()
    assert cancelled["state"] == "cancelled"
    assert cancelled["done"]
    assert cancelled["error"]["type"] == TYPE_PREFIX + "cancelled"
    assert "result" not in cancelled
    assert await_gone(pid)
    again = service.http.post(f"/v1/jobs/{job_id}:cancel")
    assert again.status_code == 200
    assert again.json()["state"] == "cancelled"


def test_a_caller_that_waits_is_told_of_a_cancel(
    start_service: Any, graph: bytes, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start_service(executor=program("hang"))
    inside = service.app.state.service
    wait, waits = inside.wait, Event()

    def wait_and_tell(*given: Any) -> Any:
        waits.set()
        return wait(*given)

    monkeypatch.setattr(inside, "wait", wait_and_tell)
    job_id = service.post(graph).json()["id"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.post, graph, wait=60)
        assert waits.wait(300)
        service.http.post(f"/v1/jobs/{job_id}:cancel")
        response = waiting.result()
    assert response.status_code == 409
    assert response.json()["type"] == TYPE_PREFIX + "cancelled"


def test_waiting_ends_after_the_time_that_was_asked_for(
    start_service: Any, graph: bytes, program: Any
) -> None:
    service = start_service(executor=program("hang"), max_wait=0.1)
    response = service.post(graph, wait=50)
    assert response.status_code == 202
    assert response.headers["Preference-Applied"] == "wait=0.1"


def test_a_cancelled_plan_can_be_asked_for_again(
    start_service: Any, graph: bytes, program: Any
) -> None:
    service = start_service(executor=program("hang"))
    first = service.post(graph).json()["id"]
    service.http.post(f"/v1/jobs/{first}:cancel")
    second = service.post(graph).json()
    assert second["id"] != first
    assert second["state"] in {"queued", "running"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "expected"),
    [("crash", ("solver-crashed", "SIGKILL")), ("garbage", ("internal", "solver output"))],
)
def test_a_process_that_breaks_fails_its_job_and_nothing_else(
    start_service: Any, graph: bytes, program: Any, name: str, expected: tuple[str, str]
) -> None:
    slug, word = expected
    service = start_service(executor=program(name))
    job_id = service.post(graph).json()["id"]
    job = service.await_job(job_id)
    assert job["state"] == "failed"
    assert job["error"]["type"] == TYPE_PREFIX + slug
    assert word in job["error"]["detail"]
    assert service.is_up()
    again = service.post(graph, wait=60)
    assert again.status_code == 500
    assert again.json()["type"] == TYPE_PREFIX + slug


def test_a_solver_that_cannot_start_fails_the_job(start_service: Any, graph: bytes) -> None:
    service = start_service(executor=ProcessExecutor([sys.executable, "-c", "import nowhere"]))
    job = service.await_job(service.post(graph).json()["id"])
    assert job["error"]["type"] == TYPE_PREFIX + "solver-crashed"
    assert "exit status 1" in job["error"]["detail"]


def test_a_process_that_died_while_it_waited_is_replaced(graph: bytes) -> None:
    solver: Any = ProcessExecutor([sys.executable, str(PROGRAMS / "hang.py")]).prepare()
    solver._process.kill()
    solver._process.wait()
    solver.start(SolverInput("{}", graph))
    assert isinstance(solver.receive(60), Progressed)
    solver.stop()


def test_a_job_that_takes_too_long_is_stopped(
    start_service: Any, graph: bytes, program: Any, recording: Any
) -> None:
    executor = recording(program("hang"))
    service = start_service(executor=executor, max_job_seconds=0.3)
    job = service.await_job(service.post(graph).json()["id"])
    assert job["error"]["type"] == TYPE_PREFIX + "deadline"
    assert await_gone(process_of(executor.solvers[0]))


def test_a_process_deaf_to_sigterm_is_killed(
    start_service: Any, graph: bytes, program: Any, recording: Any
) -> None:
    executor = recording(program("stubborn"))
    service = start_service(executor=executor)
    job_id = service.post(graph).json()["id"]
    service.await_job(job_id, lambda job: job["metadata"]["phase"] == "deaf")
    service.http.post(f"/v1/jobs/{job_id}:cancel")
    assert await_gone(process_of(executor.solvers[0]))


def test_a_full_queue_asks_to_come_back(start_service: Any, make_graph: Any) -> None:
    service = start_service(num_workers=0, max_queued_jobs=2)
    assert service.post(make_graph(64)).status_code == 202
    assert service.post(make_graph(32)).status_code == 202
    refused = service.post(make_graph(16))
    assert refused.status_code == 429
    assert refused.json()["type"] == TYPE_PREFIX + "too-many-jobs"
    assert refused.json()["limit_name"] == "AUTOSHARD_MAX_QUEUED_JOBS"
    assert int(refused.headers["Retry-After"]) > 0
    assert service.post(make_graph(64)).status_code == 202


def test_a_result_is_stored_once_and_goes_with_the_cache(start_service: Any, graph: bytes) -> None:
    service = start_service(executor=ThreadExecutor(solve))
    plan = service.post(graph, wait=60)
    (job,) = service.http.get("/v1/jobs").json()["jobs"]
    inside = service.app.state.service
    assert inside.jobs.result(job["id"]) is None
    assert inside.jobs.usage("default", None).nbytes == 0
    assert service.job(job["id"])["result"] == plan.json()
    assert service.http.delete(f"/v1/plans/{plan.json()['id']}").status_code == 204
    gone = service.http.get(f"/v1/jobs/{job['id']}")
    assert gone.status_code == 404
    assert "repeat the request" in gone.json()["detail"]


def test_a_caller_sees_its_quotas(start_service: Any, make_graph: Any) -> None:
    service = start_service(num_workers=0, max_caller_jobs=2, auth="required")
    key = service.app.state.service.stores.api_keys.create("me", ["plan"])
    service.http.headers["Authorization"] = f"Bearer {key[1]}"
    first = service.post(make_graph(64))
    assert first.headers["RateLimit-Policy"].startswith(
        '"jobs";q=2;qu="concurrent-requests", "job-bytes";q=1073741824;qu="content-bytes"'
    )
    assert first.headers["RateLimit"].startswith('"jobs";r=1, "job-bytes";r=10737')
    assert service.post(make_graph(32)).headers["RateLimit"].startswith('"jobs";r=0')
    refused = service.post(make_graph(16))
    assert refused.status_code == 429
    assert refused.headers["RateLimit"].startswith('"jobs";r=0')
    assert int(refused.headers["Retry-After"]) > 0


def test_a_caller_has_so_many_streams_open_at_once(start_service: Any, graph: bytes) -> None:
    service = start_service(num_workers=0, max_caller_streams=2)
    path = f"/v1/jobs/{service.post(graph).json()['id']}/events"
    with service.http.stream("GET", path) as first:
        # Without a reference to it, the iterator would close its stream.
        lines = first.iter_lines()
        assert next(lines)
        with service.http.stream("GET", path) as second:
            others = second.iter_lines()
            assert next(others)
            refused = service.http.get(path, timeout=60)
            assert refused.status_code == 429
            assert refused.json()["type"] == TYPE_PREFIX + "too-many-streams"
            assert refused.json()["limit_name"] == "AUTOSHARD_MAX_CALLER_STREAMS"
            assert int(refused.headers["Retry-After"]) > 0
    quota = service.app.state.service.streams
    for _ in range(6000):
        if not quota._open:
            break
        time.sleep(0.05)
    with service.http.stream("GET", path) as again:
        assert again.status_code == 200


def test_a_solver_exception_is_a_job_error_without_its_inside(
    start_service: Any, graph: bytes
) -> None:
    def fail(*_args: object) -> Any:
        raise RuntimeError("secret inside")

    service = start_service(executor=ThreadExecutor(fail))
    job = service.await_job(service.post(graph).json()["id"])
    assert job["error"]["type"] == TYPE_PREFIX + "internal"
    assert "secret" not in str(job)


def test_a_job_that_was_running_at_shutdown_is_run_by_the_next_service(
    start_service: Any, graph: bytes, program: Any, tmp_path: Any
) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    stopped = start_service(executor=program("hang"), store_url=url)
    job_id = stopped.post(graph).json()["id"]
    stopped.await_job(job_id, lambda job: job["state"] == "running")
    stopped.app.state.service.close()
    next_one = start_service(executor=ProcessExecutor(), store_url=url)
    assert next_one.await_job(job_id)["state"] == "succeeded"


def test_a_service_that_shuts_down_is_not_ready(start_service: Any) -> None:
    service = start_service(num_workers=0)
    service.app.state.service.drain()
    response = service.http.get("/readyz")
    assert response.status_code == 503
    assert response.json()["type"] == TYPE_PREFIX + "unavailable"
    assert service.http.get("/livez").status_code == 200


def test_a_service_stays_ready_on_a_database_that_a_newer_release_has_migrated(
    start_service: Any, graph: bytes
) -> None:
    service = start_service()
    engine = service.app.state.service.stores.engine
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert service.is_up()
    assert service.post(graph, wait=60).status_code == 200
    with engine.begin() as connection:
        connection.execute(text("UPDATE compatibility SET min_compatible = '9999'"))
    response = service.http.get("/readyz")
    assert (response.status_code, response.json()["type"]) == (503, TYPE_PREFIX + "unavailable")


def test_what_an_unfinished_job_made_is_not_taken_for_what_a_later_one_did(
    start_service: Any, graph: bytes
) -> None:
    made: list[Solved] = []

    def out_of_time(work: SolverInput, *more: Any, **options: Any) -> Solved:
        solved = solve(work, *more, **options)
        is_first = not made
        made.append(Solved(solved.document + b" " * is_first, cacheable=not is_first))
        return made[-1]

    service = start_service(executor=ThreadExecutor(out_of_time))
    first = {"Idempotency-Key": "first", "Prefer": "wait=60"}
    answer = service.post(graph, headers=first)
    assert answer.content == made[0].document
    assert "ETag" not in answer.headers
    later = service.post(graph, wait=60)
    assert later.content == made[1].document
    assert later.headers["ETag"]
    again = service.post(graph, headers=first)
    assert again.content == made[0].document
    assert not {"etag", "content-location"} & set(again.headers)
