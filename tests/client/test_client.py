"""The client with a real service, and with services that send invalid responses."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.services import Mlp, serving

from autoshard.client import Client, JobProgress, Retry
from autoshard.errors import (
    ArchiveError,
    GraphError,
    OptionError,
    RequestRejectedError,
    ServiceError,
    ServiceUnavailableError,
)
from autoshard.mesh import make_mesh
from autoshard.plan import PlanOptions
from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(ThreadExecutor(solve)) as url, Client(url) as made:
        yield made


@pytest.fixture
def slow_client() -> Iterator[Client]:
    """Of a service that reports progress, and solves only when it is cancelled."""

    def never(_work: Any, on_progress: Any, cancel: Any) -> Any:
        on_progress({"phase": "branching", "incumbent": 2.0, "bound": None, "gap": None})
        cancel.wait()
        raise AssertionError("cancelled")

    with serving(ThreadExecutor(never)) as url, Client(url) as made:
        yield made


def test_a_module_is_exported_and_planned(client: Client) -> None:
    plan = client.plan(Mlp(), (torch.zeros(8, 16),), mesh=(2, 2))
    assert plan.found
    assert {p.target for p in plan.stages[0].parameters} == {
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    }
    assert client.get_plan(plan.id) == plan


def test_keyword_arguments_reach_the_module(client: Client) -> None:
    inputs = (torch.zeros(8, 16),)
    plain = client.plan(Mlp(), inputs, mesh=(2,))
    scaled = client.plan(Mlp(), inputs, {"scale": 2.0}, mesh=(2,))
    assert plain.graph.digest != scaled.graph.digest


def test_bytes_and_paths_are_sent_as_they_are(client: Client, graph: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mlp.pt2"
    path.write_bytes(graph)
    first = client.request_plan(graph, mesh=(4,))
    for source in (path, str(path), graph):
        again = client.request_plan(source, mesh=(4,))
        assert again.cached
        assert again.plan == first.plan


def test_a_mesh_can_be_given_in_three_ways(client: Client, graph: bytes) -> None:
    ways = (
        (2, 4),
        {"shape": [2, 4], "topology": "h100-sxm"},
        make_mesh((2, 4), topology="h100-sxm"),
    )
    assumed, *named = (client.plan(graph, mesh=mesh) for mesh in ways)
    assert named[0].id == named[1].id
    # The plan of a mesh without a topology says that one was assumed.
    assert assumed.id != named[0].id
    assert (assumed.mesh, assumed.stages) == (named[0].mesh, named[0].stages)


def test_a_mesh_of_ones_own_keeps_its_figures(client: Client, graph: bytes) -> None:
    mesh = make_mesh((2, 2), axes=("x", "y"), intra_bandwidth=3e11, inter_bandwidth=1e10)
    plan = client.plan(graph, mesh=mesh)
    assert plan.mesh == mesh


def test_options_are_sent_and_can_be_replaced(client: Client, graph: bytes) -> None:
    options = PlanOptions(seed=3)
    plan = client.plan(graph, mesh=(2,), options=options, mode="inference")
    assert plan.options == PlanOptions(seed=3, mode="inference")


def test_no_plan_is_an_outcome(client: Client, graph: bytes) -> None:
    plan = client.plan(graph, mesh=(2,), memory_budget=10)
    assert not plan.found
    assert plan.certificate.status == "infeasible"
    assert plan.reason


def test_progress_is_reported_until_the_plan_is_there(client: Client, graph: bytes) -> None:
    seen: list[JobProgress] = []
    result = client.request_plan(graph, mesh=(8,), on_progress=seen.append)
    assert result.plan is not None
    assert result.job_id is not None
    assert seen
    assert all(progress.elapsed >= 0 for progress in seen)


def test_a_caller_need_not_wait(client: Client, graph: bytes) -> None:
    result = client.request_plan(graph, mesh=(16,), wait=False)
    assert result.plan is None
    assert result.job_id is not None
    plan = client.wait_for_job(result.job_id)
    assert plan.found
    status = client.get_job(result.job_id)
    assert status.done
    assert status.state == "succeeded"
    assert status.get_plan() == plan
    assert status.caller is None
    times = (status.created_at, status.started_at, status.finished_at)
    assert None not in times
    assert sorted(times) == list(times)


def test_a_cancelled_job_says_so_to_who_waits(slow_client: Client, graph: bytes) -> None:
    job_id = slow_client.request_plan(graph, mesh=(2,), wait=False).job_id
    assert job_id is not None
    with pytest.raises(ServiceError, match="wait until it is done"):
        slow_client.get_job(job_id).get_plan()

    def cancel(progress: JobProgress) -> None:
        if progress.phase == "branching":
            assert progress.incumbent == 2.0
            assert progress.bound is None
            assert slow_client.cancel(job_id).state == "cancelled"

    with pytest.raises(RequestRejectedError, match="cancelled") as caught:
        slow_client.wait_for_job(job_id, on_progress=cancel)
    assert caught.value.status == 409


def test_a_refusal_carries_the_problem(client: Client, graph: bytes) -> None:
    with pytest.raises(RequestRejectedError, match="abacus") as caught:
        client.plan(graph, mesh={"shape": [2], "topology": "abacus"})
    assert caught.value.status == 422
    assert caught.value.problem["type"].endswith("#mesh")
    with pytest.raises(RequestRejectedError, match="not valid") as caught:
        client.plan(graph, mesh={"shape": [2], "axes": 5})
    assert caught.value.problem["errors"][0]["pointer"] == "/mesh/axes"


def test_a_failure_of_the_job_carries_the_problem(client: Client, graph: bytes) -> None:
    with pytest.raises(RequestRejectedError, match="nowhere") as caught:
        client.plan(graph, mesh=(2,), options=PlanOptions(batch_axis="nowhere"))
    assert caught.value.status == 422


def test_what_does_not_exist(client: Client) -> None:
    with pytest.raises(RequestRejectedError, match="no plan") as caught:
        client.get_plan("0" * 64)
    assert caught.value.status == 404
    with pytest.raises(RequestRejectedError, match="no job"):
        client.get_job("0" * 32)


def test_what_is_wrong_here_is_said_here(client: Client, graph: bytes, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"there is no file .*missing\.pt2"):
        client.plan(tmp_path / "missing.pt2", mesh=(2,))
    with pytest.raises(OptionError, match="memory_budget"):
        client.plan(graph, mesh=(2,), memory_budget=-1)
    with pytest.raises(GraphError, match="Mlp"):
        client.plan(Mlp(), (torch.zeros(8, 3),), mesh=(2,))


def test_health_gives_the_versions(client: Client) -> None:
    assert "autoshard" in client.health()


def test_nobody_there() -> None:
    with (
        Client("http://127.0.0.1:9", timeout=5) as nobody,
        pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:9"),
    ):
        nobody.health()


IMPATIENT = Retry(attempts=1, first=0.01)

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def scripted() -> Iterator[Callable[[list[Answer]], Client]]:
    """A client of a server that gives one prepared answer after the other."""
    with ExitStack() as stack:

        def make(answers: list[Answer]) -> Client:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    # A service without streams of events.
                    is_stream = self.path.endswith("/events")
                    status, headers, body = (404, {}, b"") if is_stream else answers.pop(0)
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_args: object) -> None:
                    pass

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            thread = Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return stack.enter_context(
                Client(f"http://127.0.0.1:{server.server_port}", retry=IMPATIENT)
            )

        yield make


def job(state: str, **more: Any) -> bytes:
    metadata = {"phase": state, "elapsed": 0.0}
    done = state not in {"queued", "running"}
    document = {"id": "j", "plan_id": "p", "state": state, "done": done, "metadata": metadata}
    return json.dumps(document | more).encode()


FAILED = {"title": "It failed", "status": 500, "detail": "for a reason"}
NOW = {"Retry-After": "0"}


def test_a_busy_service_asks_to_come_back(
    scripted: Callable[[list[Answer]], Client],
) -> None:
    problem = json.dumps({"title": "busy", "detail": "the queue is full"}).encode()
    client = scripted([(429, {}, problem), (503, {}, b"<html>proxy</html>")])
    with pytest.raises(ServiceUnavailableError, match="the queue is full"):
        client.get_plan("p")
    with pytest.raises(ServiceUnavailableError, match="Service Unavailable"):
        client.get_plan("p")


def test_an_answer_that_is_no_problem_document_is_still_an_error(
    scripted: Callable[[list[Answer]], Client],
) -> None:
    client = scripted([(418, {}, b"teapot"), (404, {}, b"[1]")])
    with pytest.raises(RequestRejectedError, match="Teapot") as caught:
        client.get_plan("p")
    assert caught.value.status == 418
    with pytest.raises(RequestRejectedError, match="Not Found"):
        client.get_plan("p")


def test_polling_outlives_a_short_outage(scripted: Callable[[list[Answer]], Client]) -> None:
    client = scripted(
        [(200, NOW, job("running")), (503, {}, b""), (200, NOW, job("failed", error=FAILED))]
    )
    with pytest.raises(RequestRejectedError, match="for a reason"):
        client.wait_for_job("j")


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"text"', b"null", b"no json"])
def test_an_answer_that_is_no_job_is_an_error(
    scripted: Callable[[list[Answer]], Client], body: bytes
) -> None:
    with pytest.raises(ServiceError):
        scripted([(200, {}, body)]).get_job("j")


def test_importing_the_client_does_not_import_torch() -> None:
    code = "import sys, autoshard.client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own code
