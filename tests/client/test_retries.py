"""Retries of both clients when the connection or the service fails for a while."""

import asyncio
import inspect
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
from support.proxy import Cut, Drop, Passed, Proxy, Say, proxied
from support.services import free_port, serving

from autoshard.client import AsyncClient, Client, JobProgress, Retry
from autoshard.client.transport import retry_after
from autoshard.errors import RequestRejectedError, ServiceError, ServiceUnavailableError
from autoshard.plan import Plan
from autoshard.requests.results import rejected
from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve

QUICK = Retry(attempts=4, first=0.02, longest=1.5, outage=30.0)
BUSY = Say(429, {"Retry-After": "0"})


def blocking(url: str, method: str, *args: Any, **kwargs: Any) -> Any:
    with Client(url, retry=QUICK, cache=False) as client:
        return getattr(client, method)(*args, **kwargs)


def awaiting(url: str, method: str, *args: Any, **kwargs: Any) -> Any:
    async def call() -> Any:
        async with AsyncClient(url, retry=QUICK, cache=False) as client:
            return await getattr(client, method)(*args, **kwargs)

    return asyncio.run(call())


Call = Callable[..., Any]


@pytest.fixture(scope="module")
def text(graph: bytes) -> bytes:
    """The program alone, which is JSON that nothing has compressed."""
    with zipfile.ZipFile(io.BytesIO(graph)) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("model.json")))


@pytest.fixture(params=[blocking, awaiting], ids=["blocking", "awaiting"])
def call(request: pytest.FixtureRequest) -> Call:
    found: Call = request.param
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ThreadExecutor(solve), retry_after=1) as found:
        yield found


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with proxied(url) as made:
        yield made


def test_what_fails_on_the_way_is_sent_again(call: Call, proxy: Proxy, graph: bytes) -> None:
    proxy.faults.extend([Drop(), Say(500), Say(502), Drop(), Say(504), BUSY])

    def is_unlucky(_request: Passed) -> bool:
        # Three in a row may fail: every fourth comes through.
        return len(proxy.passed) % 4 != 0

    proxy.only = is_unlucky
    plan = call(proxy.url, "plan", graph, mesh=(2, 2))
    assert plan.found
    assert not proxy.faults


def test_a_request_that_is_repeated_is_the_same(call: Call, proxy: Proxy, graph: bytes) -> None:
    proxy.only = lambda request: request.path == "/v1/plans"
    proxy.faults.extend([Drop(), BUSY, Say(502)])
    call(proxy.url, "plan", graph, mesh=(2,) if call is blocking else (4,))
    orders = [r for r in proxy.passed if r.path == "/v1/plans"]
    assert len(orders) >= 4
    assert len({(r.body, r.headers["Idempotency-Key"]) for r in orders}) == 1


def test_an_answer_that_breaks_off_is_asked_for_again(
    call: Call, proxy: Proxy, graph: bytes
) -> None:
    plan = call(proxy.url, "plan", graph, mesh=(2, 2))
    proxy.faults.append(Cut())
    assert call(proxy.url, "get_plan", plan.id) == plan
    assert proxy.paths("GET").count(f"/v1/plans/{plan.id}") >= 2


def test_another_plan_than_the_one_asked_for_is_refused(
    call: Call, proxy: Proxy, graph: bytes
) -> None:
    plan = call(proxy.url, "plan", graph, mesh=(2, 2))
    proxy.faults.append(Say(200, {"Content-Type": "application/json"}, plan.to_json().encode()))
    with pytest.raises(ServiceError, match=f"the service sent {plan.id}"):
        call(proxy.url, "get_plan", "0" * 64)


def test_it_gives_up_in_the_end(call: Call, proxy: Proxy) -> None:
    proxy.faults.extend([Say(503)] * 9)
    with pytest.raises(ServiceUnavailableError, match="Service Unavailable"):
        call(proxy.url, "get_plan", "0" * 64)
    assert len(proxy.passed) == QUICK.attempts


def test_it_comes_back_when_it_is_told_to(call: Call, proxy: Proxy) -> None:
    proxy.faults.append(Say(429, {"Retry-After": "1"}))
    start = time.monotonic()
    with pytest.raises(RequestRejectedError, match="no plan"):
        call(proxy.url, "get_plan", "0" * 64)
    assert time.monotonic() - start >= 1.0
    proxy.faults.append(Say(503, {"Retry-After": "3600"}))
    with pytest.raises(ServiceUnavailableError) as caught:
        call(proxy.url, "get_plan", "0" * 64)
    assert caught.value.retry_after == 3600
    assert len(proxy.passed) == 3


def test_what_the_service_itself_refuses_is_not_sent_again(call: Call, proxy: Proxy) -> None:
    ours = b'{"type": "https://x#solver-crashed", "title": "The solver died", "status": 500}'
    proxy.faults.append(Say(500, {"Content-Type": "application/problem+json"}, ours))
    with pytest.raises(RequestRejectedError, match="The solver died"):
        call(proxy.url, "get_plan", "0" * 64)
    assert len(proxy.passed) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7.0), ("soon", None), ("", None), ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0)],
)
def test_retry_after_may_be_seconds_or_a_date(text: str, expected: float | None) -> None:
    assert retry_after(httpx2.Response(503, headers={"Retry-After": text})) == expected


def test_retry_after_as_a_date_ahead() -> None:
    ahead = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    found = retry_after(httpx2.Response(503, headers={"Retry-After": ahead}))
    assert found is not None
    assert 25 < found <= 30


def test_a_graph_is_sent_once_and_small(call: Call, proxy: Proxy, text: bytes) -> None:
    # Its own bytes, so that neither the other client nor another test has sent them.
    own = text.replace(b"up.weight", b"ab.weight" if call is blocking else b"cd.weight")
    for mesh in ((2,), (4,)):
        assert call(proxy.url, "plan", own, mesh=mesh).found
    sent = [request for request in proxy.passed if request.method == "PUT"]
    assert [request.headers["Content-Encoding"] for request in sent] == ["zstd"]
    assert len(sent[0].body) < len(own) / 4
    assert all(len(r.body) < len(own) / 4 for r in proxy.passed)


def test_a_service_that_takes_no_zstd_gets_plain_bytes(
    call: Call, proxy: Proxy, text: bytes
) -> None:
    own = text.replace(b"up.weight", b"ef.weight" if call is blocking else b"gh.weight")
    proxy.only = lambda request: request.method == "PUT"
    proxy.faults.append(Say(415))
    assert call(proxy.url, "plan", own, mesh=(2,)).found
    sent = [request for request in proxy.passed if request.method == "PUT"]
    assert [request.headers.get("Content-Encoding") for request in sent] == ["zstd", None]


@pytest.fixture
def stepping() -> Iterator[tuple[str, Event]]:
    """A service whose solver reports three steps, waits for an event, and then solves."""
    go = Event()

    def steps(work: Any, on_progress: Any, cancel: Any) -> Any:
        for number in (1, 2, 3):
            on_progress({"phase": f"step {number}", "incumbent": 4.0, "bound": 1.0, "gap": 0.75})
            # Progress is written down from time to time only.
            go.wait(0.6)
        go.wait()
        return solve(work, on_progress, cancel)

    with serving(ThreadExecutor(steps)) as found:
        yield found, go
        go.set()


@pytest.mark.thorough
def test_a_stream_of_events_goes_on_where_it_broke_off(
    call: Call, stepping: tuple[str, Event], graph: bytes
) -> None:
    url, go = stepping
    seen: list[JobProgress] = []

    def hear(progress: JobProgress) -> None:
        seen.append(progress)
        if progress.phase == "step 3":
            go.set()

    with proxied(url) as proxy:
        proxy.only = lambda request: request.path.endswith("/events")
        proxy.faults.extend([Cut(), Cut(), Say(502)])
        assert call(proxy.url, "plan", graph, mesh=(2,), on_progress=hear).found
        streams = [r for r in proxy.passed if r.path.endswith("/events")]
    resumed = [int(stream.headers.get("Last-Event-ID", 0)) for stream in streams]
    assert resumed == sorted(resumed)
    assert resumed[-1] > 0
    steps = [progress.phase for progress in seen if progress.phase.startswith("step")]
    assert steps == ["step 1", "step 2", "step 3"]
    assert {progress.gap for progress in seen if progress.phase == "step 2"} == {0.75}
    assert all(progress.elapsed >= 0 for progress in seen)


def test_without_streams_it_asks_from_time_to_time(
    call: Call, stepping: tuple[str, Event], graph: bytes
) -> None:
    url, go = stepping
    seen: list[str] = []

    def hear(progress: JobProgress) -> None:
        seen.append(progress.phase)
        go.set()

    with proxied(url) as proxy:
        proxy.only = lambda request: request.path.endswith("/events")
        proxy.faults.extend([Say(404)] * 9)
        assert call(proxy.url, "plan", graph, mesh=(4,), on_progress=hear).found
    assert seen[-1] != "queued"
    assert len(proxy.faults) == 8


@pytest.mark.thorough
def test_streams_that_fail_are_no_outage(stepping: tuple[str, Event], graph: bytes) -> None:
    url, go = stepping
    seen: list[str] = []

    def listen(progress: JobProgress) -> None:
        seen.append(progress.phase)
        if progress.phase == "step 3":
            go.set()

    impatient = Retry(first=0.02, longest=0.1, outage=0.5)
    with proxied(url) as proxy, Client(proxy.url, retry=impatient, cache=False) as client:
        proxy.only = lambda request: request.path.endswith("/events")
        proxy.faults.extend([Say(502), Drop()] * 50)
        assert client.plan(graph, mesh=(2, 2), on_progress=listen).found
        # After three broken streams, the job is polled, once a second.
        assert len([path for path in proxy.paths("GET") if path.endswith("/events")]) == 3
    assert "step 3" in seen


class Server:
    """The service in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._store = f"sqlite:///{folder / 'store.sqlite3'}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, workers: int) -> None:
        command = [sys.executable, "-m", "autoshard_server", "--port", str(self.port)]
        self._process = subprocess.Popen(  # noqa: S603  our own program
            [*command, "--store-url", self._store, "--log-level", "error"],
            env={**os.environ, "AUTOSHARD_NUM_WORKERS": str(workers)},
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.mark.thorough
def test_it_waits_through_a_restart_of_the_service(tmp_path: Path, graph: bytes) -> None:
    server = Server(tmp_path)
    server.start(workers=0)
    plans: dict[str, Plan] = {}
    queued = Event()

    def wait(call: Call) -> None:
        progress = lambda _: queued.set()  # noqa: E731
        plans[call.__name__] = call(server.url, "plan", graph, mesh=(2, 2), on_progress=progress)

    try:
        with Client(server.url, retry=Retry(first=0.1, outage=300)) as client:
            client_is_there(client)
        threads = [Thread(target=wait, args=(kind,)) for kind in (blocking, awaiting)]
        for thread in threads:
            thread.start()
        assert queued.wait(300)
        server.kill()
        time.sleep(0.5)
        server.start(workers=1)
        for thread in threads:
            thread.join(300)
    finally:
        server.kill()
    assert plans["blocking"].found
    assert plans["blocking"] == plans["awaiting"]


def client_is_there(client: Client) -> None:
    for _ in range(3000):
        try:
            client.health()
        except ServiceUnavailableError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the service did not start")


def test_a_job_that_was_lost_is_asked_for_again(
    call: Call, stepping: tuple[str, Event], graph: bytes
) -> None:
    url, go = stepping
    with proxied(url) as proxy:
        # A service that forgets its jobs, as one does that keeps them in memory and restarts.
        proxy.only = lambda request: request.path.startswith("/v1/jobs/")
        gone = Say(404, {}, b'{"type": "https://x#not-found", "title": "Not found"}')
        proxy.faults.extend([gone, gone])
        go.set()
        assert call(proxy.url, "plan", graph, mesh=(8,), on_progress=lambda _: None).found
        orders = [r for r in proxy.passed if (r.method, r.path) == ("POST", "/v1/plans")]
    assert len({r.headers["Idempotency-Key"] for r in orders}) >= 1


def methods(kind: type) -> dict[str, Any]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: member for name, member in found if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    ours, theirs = methods(Client), methods(AsyncClient)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        assert inspect.signature(method) == inspect.signature(theirs[name]), name
        assert method.__doc__ == theirs[name].__doc__
        assert inspect.iscoroutinefunction(theirs[name]), name
        assert not inspect.iscoroutinefunction(method)
    assert inspect.signature(Client.plan).return_annotation is Plan


def test_a_deprecated_route_is_logged_once(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    headers = {
        "Deprecation": "@1767225600",
        "Sunset": "Thu, 31 Dec 2026 00:00:00 GMT",
        "Link": '<https://example.org/v2>; rel="deprecation"',
    }
    answer = Say(200, headers, b'{"topologies": [], "stored": []}')
    proxy.faults.extend([answer, answer])
    with Client(proxy.url, retry=QUICK, cache=False) as client:
        client.list_topologies()
        client.list_topologies()
    (message,) = [r.getMessage() for r in caplog.records if "deprecated" in r.getMessage()]
    assert "GET /v1/topologies" in message
    assert "after Thu, 31 Dec 2026 00:00:00 GMT" in message
    assert "https://example.org/v2" in message


def test_an_error_of_the_service_names_the_request_for_its_operator() -> None:
    problem = {"title": "Internal error", "detail": "see the log", "request_id": "abc"}
    assert str(rejected({**problem, "status": 500})).endswith("see the log (request abc)")
    assert str(rejected({**problem, "status": 422})).endswith("see the log")
