"""Limits that keep one caller from stopping the service for others, each attacked here."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zipfile import ZipFile

import httpx2
import pytest
import zstandard
from sqlalchemy import Engine, text
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard_server import Settings
from autoshard_server.problems import ServerError
from autoshard_server.solvers.parse_queue import ParseQueue
from autoshard_server.store.database import Stores, check_writable
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import JobState
from autoshard_server.store.retention_clock import RetentionClock
from autoshard_solver_cache import StoreUnavailableError
from benchmarks.faults.harness import Service

MESH = {"shape": [2]}


def settings(**given: Any) -> Settings:
    return Settings(store_url="sqlite://", **given)


def test_projects_take_turns_at_parsers() -> None:
    """One project fills the queue; another's graph is next, and starts beside those that run."""

    async def order() -> list[str]:
        queue, started, release = ParseQueue(settings(num_parsers=2)), [], asyncio.Event()

        async def read(project: str) -> None:
            async with queue.turn(project, 1):
                started.append(project)
                await release.wait()

        crowd = [asyncio.create_task(read("crowd")) for _ in range(16)]
        await asyncio.sleep(0)
        other = asyncio.create_task(read("other"))
        third = asyncio.create_task(read("third"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert started == ["crowd", "crowd", "other"]
        release.set()
        await asyncio.gather(*crowd, other, third)
        return started

    started = asyncio.run(order())
    assert started.index("third") <= 4
    assert len(started) == 18


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_project_parses": 3}, "AUTOSHARD_MAX_PROJECT_PARSES"),
        ({"max_project_parse_bytes": 30}, "AUTOSHARD_MAX_PROJECT_PARSE_BYTES"),
        ({"max_parses": 1, "num_parsers": 2}, "AUTOSHARD_MAX_PARSES"),
    ],
)
def test_a_queue_of_graphs_has_an_end(limits: dict[str, int], name: str) -> None:
    async def fill() -> ServerError:
        queue = ParseQueue(settings(**limits))
        forever = asyncio.Event()

        async def read() -> None:
            async with queue.turn("crowd", 10):
                await forever.wait()

        waiting = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ServerError) as caught:
            await read()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # What was cancelled counts no more.
        async with queue.turn("crowd", 10):
            return caught.value

    error = asyncio.run(fill())
    assert error.extensions["limit_name"] == name
    assert error.kind.status == 429


def test_a_graph_of_which_nobody_waits_is_read_no_further(
    start_service: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers that hang up free the parser for the next one at once."""
    begun, ended = threading.Event(), threading.Event()

    def run(_self: object, _task: str, _request: object, _payload: bytes, stop: Any) -> bytes:
        begun.set()
        assert stop.wait(60)
        ended.set()
        raise AssertionError("nobody reads this")

    service = start_service()
    monkeypatch.setattr("autoshard_server.solvers.parsers.Parsers.run", run)
    graph = make_graph(48)
    digest = hashlib.sha256(graph).hexdigest()
    with pytest.raises(httpx2.ReadTimeout):
        service.http.put(f"/v1/graphs/{digest}", content=graph, timeout=0.5)
    assert begun.is_set()
    assert ended.wait(10)


def test_waiting_requests_are_limited(start_service: Any, make_graph: Any, program: Any) -> None:
    service = start_service(executor=program("hang"), max_caller_waits=1)
    graph = make_graph(40)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(service.post, graph, {"mesh": MESH}, wait=10) for _ in range(2)]
        refused, waited = sorted((one.result() for one in asked), key=lambda r: -r.status_code)
    assert (refused.status_code, waited.status_code) == (429, 202)
    assert refused.json()["limit_name"] == "AUTOSHARD_MAX_CALLER_WAITS"
    assert refused.headers["Retry-After"]
    # Without waiting it is answered.
    assert service.post(graph, {"mesh": MESH}).status_code == 202
    metrics = service.http.get("/metrics").text
    assert (
        'autoshard_limits_reached_total{limit="AUTOSHARD_MAX_CALLER_WAITS",of="caller"}' in metrics
    )


@pytest.mark.parametrize(
    "empty",
    [zstandard.ZstdCompressor().compress(b""), b"\x1f\x8b\x08" + bytes(7) + b"\x03" + bytes(9)],
    ids=["zstd", "gzip"],
)
def test_empty_streams_are_work_too(service: Any, empty: bytes) -> None:
    coding = "zstd" if empty.startswith(b"\x28\xb5") else "gzip"
    response = service.http.post(
        "/v1/plans",
        content=empty * 10_000,
        headers={"Content-Encoding": coding, "Content-Type": "application/json"},
    )
    assert response.status_code == 415
    assert "more than 256 compressed streams" in response.json()["detail"]


def test_what_is_cancelled_is_stored_no_longer(engine: Engine) -> None:
    """The request counts while the job is unfinished, and is deleted with the graph."""
    jobs = JobStore(engine, lease=30, max_attempts=2)
    request = '{"pins": "' + "x" * 10_000 + '"}'
    job = jobs.submit("p" * 64, request, b"graph", max_queued=9)
    assert jobs.usage("default", None).nbytes > 10_000
    with pytest.raises(ServerError, match="max_caller_job_bytes".upper()):
        jobs.submit("q" * 64, request, b"graph", max_queued=9, max_bytes=15_000)
    assert jobs.cancel(job.id)
    assert jobs.usage("default", None).nbytes == 0
    with engine.begin() as connection:
        rows = connection.execute(text("SELECT sum(length(request)) FROM jobs"))
        assert rows.scalar_one() < 100


def test_records_of_a_day_are_limited(engine: Engine) -> None:
    jobs = JobStore(engine, lease=30, max_attempts=2)
    for number in range(3):
        job = jobs.submit(str(number) * 64, "{}", b"", max_queued=9, max_records=3)
        assert jobs.cancel(job.id)
    with pytest.raises(ServerError, match="AUTOSHARD_MAX_PROJECT_RECORDS"):
        jobs.submit("9" * 64, "{}", b"", max_queued=9, max_records=3)
    other = jobs.submit("9" * 64, "{}", b"", max_queued=9, max_records=3, project="other")
    assert other.state is JobState.QUEUED


def test_nothing_expires_while_the_clock_is_wrong(engine: Engine) -> None:
    now, steady = [1e9], [0.0]
    clock = RetentionClock(engine, 3600, now=lambda: now[0], steady=lambda: steady[0])
    if engine.dialect.name == "postgresql":
        assert "off the database's" in (clock.fault() or "")
        now[0] = time.time()
        clock = RetentionClock(engine, 3600, now=lambda: now[0], steady=lambda: steady[0])
    assert clock.fault() is None
    now[0] += 100 * 24 * 3600
    assert "has jumped by +8,640,000 s" in (clock.fault() or "")
    steady[0] += 100 * 24 * 3600  # the time has really passed
    fault = clock.fault()
    assert fault is None if engine.dialect.name == "sqlite" else "database's" in (fault or "")


def test_a_replica_is_not_ready_and_is_no_error_of_ours(engine: Engine) -> None:
    check_writable(engine)
    if engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no replicas")
    with engine.begin() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
    engine.dispose()
    with pytest.raises(StoreUnavailableError, match="read-only"):
        check_writable(engine)


def test_a_misspelled_parameter_is_refused(service: Any) -> None:
    response = service.http.get("/v1/plans", params={"page_sise": 2})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/query/page_sise"
    assert "page_size" in response.json()["detail"]


def test_head_is_get_without_a_body(service: Any) -> None:
    for path in ("/v1/plans", "/version", "/openapi.json"):
        found = service.http.head(path)
        assert (found.status_code, found.content) == (200, b""), path


def test_half_a_character_is_no_text(service: Any, make_graph: Any) -> None:
    with ZipFile(BytesIO(make_graph(64))) as archive:
        name = next(n for n in archive.namelist() if n.endswith("models/model.json"))
        model = archive.read(name).replace(b'"up.weight"', b'"up\\ud800.weight"')
    response = service.http.put(f"/v1/graphs/{hashlib.sha256(model).hexdigest()}", content=model)
    assert response.status_code == 422
    assert "surrogate" in response.json()["detail"]


def test_readiness_falls_before_connections_are_refused(tmp_path: Any) -> None:
    """After SIGTERM a load balancer sees 503, and what it still sends is served."""
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    with (
        Service(url, num_workers=0, shutdown_delay=3) as process,
        httpx2.Client(base_url=process.address, timeout=30) as http,
    ):
        assert http.get("/readyz").status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while http.get("/readyz").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert http.get("/readyz").status_code == 503
        with httpx2.Client(base_url=process.address) as new:
            assert new.get("/v1/plans").status_code == 200


def test_a_proxy_that_is_not_trusted_is_named_in_the_log(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    with Service(url, num_workers=0, forwarded_allow_ips="10.0.0.1") as process:
        with httpx2.Client(base_url=process.address) as http:
            for _ in range(2):
                http.get("/version", headers={"X-Forwarded-For": "203.0.113.9"})
        (line,) = process.events("forwarded_headers_ignored")
        assert line["setting"] == "AUTOSHARD_FORWARDED_ALLOW_IPS"


def test_problems_have_their_page_under_the_path_of_the_proxy(start_service: Any) -> None:
    service = start_service(root_path="/plan")
    for path in ("/v1/plans/x", "/plan/v1/plans/x"):
        kind = service.http.get(path).json()["type"]
        assert kind == "/plan/problems#request"
    assert service.http.get(kind.partition("#")[0]).status_code == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str, str]]:
    """A service in a process that requires keys: its port, a key to plan, and one to read."""
    url = f"sqlite:///{tmp_path_factory.mktemp('guarded') / 'store.sqlite3'}"
    stores = Stores(Settings(store_url=url))
    keys = [stores.api_keys.create("ann", [scope])[1] for scope in ("plan", "read")]
    stores.close()
    with Service(url, auth="required", num_workers=0, shutdown_delay=0) as process:
        yield urlsplit(process.address).port or 0, *keys


def send(port: int, *lines: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """Status and problem of the response to the bytes of a request."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        found = b""
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                found += piece
    head, _, text = found.partition(b"\r\n\r\n")
    is_problem = b"application/problem+json" in head
    return int(head[9:12] or 0), json.loads(text) if is_problem else {}


LOOK_UP = json.dumps({"graph_sha256": "0" * 64, "mesh": {"shape": [2]}}).encode()
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(LOOK_UP), LOOK_UP)
LENGTH = f"Content-Length: {len(LOOK_UP)}"


@pytest.mark.parametrize(
    ("version", "more", "body"),
    [
        ("1.1", ["Content-Length: 3", LENGTH], LOOK_UP),
        ("1.1", [LENGTH, "Transfer-Encoding: chunked"], CHUNKED),
        ("1.1", ["Transfer-Encoding: gzip, chunked"], CHUNKED),
        ("1.1", ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], CHUNKED),
        ("1.0", ["Transfer-Encoding: chunked"], CHUNKED),
        ("1.1", [LENGTH, "Content-Type: text/plain"], LOOK_UP),
        ("1.1", [LENGTH, "Content-Encoding: gzip", "Content-Encoding: gzip"], LOOK_UP),
        ("1.1", [LENGTH, "Idempotency-Key: a", "Idempotency-Key: b"], LOOK_UP),
        ("1.1", [LENGTH, "Authorization: Bearer x"], LOOK_UP),
        ("1.0", [LENGTH, "Host: evil.example"], LOOK_UP),
        ("1.1", [LENGTH, "X-Folded: a", "  b"], LOOK_UP),
    ],
)
def test_what_two_programs_could_read_differently_is_refused(
    guarded: tuple[int, str, str], version: str, more: list[str], body: bytes
) -> None:
    port, key, _ = guarded
    common = ["Host: localhost", "Connection: close", "Content-Type: application/json"]
    lines = [f"POST /v1/plans:lookup HTTP/{version}", f"Authorization: Bearer {key}", *common]
    status, problem = send(port, *lines, *more, body=body)
    assert (status, problem["status"]) == (400, 400)
    # The same without what is ambiguous.
    assert send(port, *lines, LENGTH, body=LOOK_UP)[1]["type"].endswith("#not-found")


def test_the_address_of_a_request_line_is_that_of_the_host(guarded: tuple[int, str, str]) -> None:
    port, _, key = guarded
    more = [f"Authorization: Bearer {key}", "Connection: close"]
    same = send(port, "GET http://ours.example/v1/plans HTTP/1.1", "Host: ours.example", *more)
    assert same == (200, {})
    target = "http://evil.example/v1/plans"
    status, problem = send(port, f"GET {target} HTTP/1.1", "Host: ours.example", *more)
    assert status == 400
    assert problem["type"].endswith("#host")
    # Without a key it is refused before the application, as a path is.
    status, problem = send(port, f"GET {target} HTTP/1.1", "Host: evil.example")
    assert (status, "request_id" in problem) == (401, False)
    # HTTP/0.9 has no headers, and so no Host.
    assert send(port, "GET /version")[0] == 400


@pytest.mark.parametrize("line", ["NOT HTTP", "GET /version HTTP/9.9", "PRI * HTTP/2.0"])
def test_what_is_not_http_gets_a_problem_too(guarded: tuple[int, str, str], line: str) -> None:
    status, problem = send(guarded[0], line, "Host: localhost")
    assert (status, problem["status"]) == (400, 400)
    assert problem["type"].endswith("#http")


def test_a_pipelined_request_is_not_logged_as_one_of_the_caller_before(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    stores = Stores(Settings(store_url=url))
    _, key = stores.api_keys.create("ann", ["read"], project="red")
    stores.close()
    with Service(url, auth="required", num_workers=0, shutdown_delay=0) as process:
        port = urlsplit(process.address).port or 0
        first = f"GET /v1/plans HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
        assert send(port, f"{first}GET /version HTTP/1.1", "Host: x", "Connection: close")[0] == 200
        deadline = time.monotonic() + 10
        while len(process.events("request")) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        asked = {line["path"]: line for line in process.events("request")}
    assert (asked["/v1/plans"]["caller"], asked["/v1/plans"]["project"]) == ("ann", "red")
    assert not {"caller", "project"} & asked["/version"].keys()


@pytest.mark.parametrize(
    "text",
    [
        '{"graph_sha256": "%s", "mesh": {"shape": [2]}, "mesh": {"shape": [4]}}' % ("0" * 64),
        '{"graph_sha256": "%s", "mesh": {"shape": [2], "sh\\u0061pe": [4]}}' % ("0" * 64),
    ],
)
def test_a_member_that_occurs_twice_is_refused(service: Any, text: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = service.http.post("/v1/plans:lookup", content=text, headers=headers)
    assert response.status_code == 422
    assert "2 times" in response.json()["detail"]


def test_a_topology_has_one_name(service: Any) -> None:
    document = service.http.get("/v1/topologies/h100-sxm").text
    twice = document[:-1] + ',"name":"ours"}'
    headers = {"Content-Type": "application/json"}
    response = service.http.put("/v1/topologies/ours", content=twice, headers=headers)
    assert (response.status_code, "'name' 2 times" in response.json()["detail"]) == (422, True)


def test_a_parameter_that_is_sent_twice_is_refused(service: Any) -> None:
    response = service.http.get("/v1/plans?page_size=1&page_size=100")
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/query/page_size"
    assert service.http.get("/v1/jobs?state=queued&state=failed").status_code == 200


def test_a_forged_event_id_hides_no_events_from_others(
    start_service: Any, graph: bytes, program: Any
) -> None:
    """Whoever follows a job first decides nothing for the next."""
    service = start_service(executor=program("hang"), num_workers=0)
    job = service.post(graph).headers["Location"]
    forged = {"Last-Event-ID": str(2**31 - 1)}
    with (
        service.http.stream("GET", f"{job}/events", headers=forged) as first,
        service.http.stream("GET", f"{job}/events") as second,
        ThreadPoolExecutor(2) as pool,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        read = [pool.submit(lambda one=one: "".join(one.iter_text())) for one in (first, second)]
        time.sleep(0.3)
        assert service.http.post(f"{job}:cancel").status_code == 200
        forged_text, text = (one.result(timeout=20) for one in read)
    assert "cancelled" in forged_text
    assert "queued" in text
    assert "cancelled" in text


def test_the_head_of_a_stream_is_no_stream(start_service: Any, graph: bytes) -> None:
    service = start_service(num_workers=0, max_caller_streams=1)
    job = service.post(graph).headers["Location"]
    for _ in range(2):
        found = service.http.head(f"{job}/events", timeout=10)
        assert (found.status_code, found.content) == (200, b"")
    assert service.http.get(job, timeout=10).json()["state"] == "queued"


@pytest.mark.parametrize("name", ["\u202enna", "ann\n", "a\x1b[31m"])
def test_a_key_has_a_name_that_can_be_read(tmp_path: Path, name: str) -> None:
    store = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    ended = CliRunner().invoke(app, ["keys", "create", name, "--store", store])
    assert ended.exit_code == 1
    assert "cannot be seen" in ended.output.replace("\n", " ")
