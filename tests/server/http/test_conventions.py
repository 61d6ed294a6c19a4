"""HTTP semantics: content encodings, idempotency keys, pagination, event streams."""

import gzip
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import pytest
import zstandard

from autoshard_server.solvers.executor import Solved, ThreadExecutor
from autoshard_server.solvers.solving import solve

MESH = {"mesh": {"shape": [2, 2]}}


@pytest.fixture(scope="module")
def graph(make_graph: Any) -> bytes:
    """A graph that no other module has asked the shared service about."""
    made: bytes = make_graph(72)
    return made


def put(service: Any, body: bytes, digest: str, coding: str) -> Any:
    return service.http.put(
        f"/v1/graphs/{digest}", content=body, headers={"Content-Encoding": coding}
    )


def zstd(body: bytes) -> bytes:
    """As a stream whose frame does not say how long it is."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(body) + packer.flush()


def unpacked(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(body)


CODINGS = {
    "gzip": gzip.compress,
    "zstd": zstd,
    "identity": bytes,
}


@pytest.mark.parametrize("coding", CODINGS)
def test_bodies_arrive_in_any_coding(service: Any, graph: bytes, coding: str) -> None:
    digest = hashlib.sha256(graph).hexdigest()
    packed = CODINGS[coding](graph)
    answer = put(service, packed, digest, coding)
    assert answer.status_code in {200, 201}, answer.text
    twice = CODINGS[coding](graph[:100]) + CODINGS[coding](graph[100:])
    assert put(service, twice, digest, coding).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_form_may_be_coded(service: Any, graph: bytes, coding: str) -> None:
    request = httpx2.Request(
        "POST",
        f"{service.url}/v1/plans",
        files={"graph": ("g", graph), "request": (None, json.dumps(MESH))},
    )
    body = CODINGS[coding](request.read())
    kind = request.headers["Content-Type"]
    headers = {"Content-Type": kind, "Content-Encoding": coding, "Prefer": "wait=60"}
    answer = service.http.post("/v1/plans", content=body, headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_bomb_is_stopped_on_the_way(service: Any, coding: str) -> None:
    bomb = CODINGS[coding](bytes(256 << 20))
    assert len(bomb) < 1 << 19
    answer = put(service, bomb, "0" * 64, coding)
    assert answer.status_code == 413
    assert "after decompression" in answer.json()["detail"]
    assert service.is_up()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", b"not gzip"),
        ("zstd", b"not zstd"),
        ("gzip", gzip.compress(b"x" * 1000)[:-4]),
        ("zstd", zstd(b"x" * 1000)[:-2]),
        ("br", b""),
        ("gzip, zstd", b""),
    ],
    ids=["gzip", "zstd", "gzip-cut", "zstd-cut", "unknown", "several"],
)
def test_a_body_that_is_not_what_it_says(service: Any, coding: str, body: bytes) -> None:
    answer = put(service, body, "0" * 64, coding)
    assert answer.status_code == 415
    assert answer.json()["type"].endswith("#content-coding")


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_answers_are_coded_as_asked(service: Any, graph: bytes, coding: str) -> None:
    plan = service.post(graph, wait=60)
    path = plan.headers["Content-Location"]
    plain = service.http.get(path, headers={"Accept-Encoding": "identity"})
    coded = service.http.get(path, headers={"Accept-Encoding": coding})
    assert "Content-Encoding" not in plain.headers
    assert coded.headers["Content-Encoding"] == coding
    assert "accept-encoding" in coded.headers["Vary"].lower()
    # The client of these tests undoes gzip itself.
    content = unpacked(coded.content) if coding == "zstd" else coded.content
    assert content == plain.content == plan.content
    assert int(coded.headers["Content-Length"]) < len(plain.content) / 2


def test_a_key_stands_for_one_request(start_service: Any, graph: bytes, program: Any) -> None:
    service = start_service(executor=program("hang"))

    def ask(request: Any, key: str) -> Any:
        files = {"graph": ("g", graph), "request": (None, json.dumps(request))}
        return service.http.post("/v1/plans", files=files, headers={"Idempotency-Key": key})

    first = ask(MESH, "a").json()["id"]
    assert ask(MESH, "a").json()["id"] == first
    service.http.post(f"/v1/jobs/{first}:cancel")
    cancelled = ask(MESH, "a")
    assert cancelled.status_code == 409
    assert cancelled.json()["type"].endswith("#cancelled")
    assert ask(MESH, "b").json()["id"] != first
    other = ask({"mesh": {"shape": [4]}}, "a")
    assert other.status_code == 422
    assert other.json()["type"].endswith("#idempotency-key-reused")
    assert ask(MESH, "x" * 256).status_code == 422


def test_of_two_requests_under_one_key_one_starts_a_job(start_service: Any, graph: bytes) -> None:
    service = start_service(num_workers=0)
    meshes = [{"shape": [size]} for size in (2, 4, 8, 16)]

    def ask(key: str, mesh: Any) -> Any:
        return service.post(graph, {"mesh": mesh}, headers={"Idempotency-Key": key})

    with ThreadPoolExecutor(len(meshes)) as pool:
        for number in range(8):
            answers = list(pool.map(partial(ask, f"key {number}"), meshes))
            taken = [a for a in answers if a.status_code == 202]
            refused = [a.json()["type"] for a in answers if a.status_code == 422]
            assert len(taken) == 1
            assert [kind.rpartition("#")[2] for kind in refused] == ["idempotency-key-reused"] * 3
            # What was refused has started nothing.
            jobs = service.http.get("/v1/jobs", params={"state": "queued"}).json()["jobs"]
            assert [job["id"] for job in jobs] == [taken[0].json()["id"]]
            service.http.post(f"/v1/jobs/{jobs[0]['id']}:cancel")


def test_a_refused_request_may_be_sent_again_under_its_key(
    start_service: Any, graph: bytes
) -> None:
    service = start_service(num_workers=0, max_queued_jobs=1)
    first = service.post(graph).json()["id"]
    key = {"Idempotency-Key": "k"}
    asked = {"mesh": {"shape": [4]}}
    assert service.post(graph, asked, headers=key).status_code == 429
    service.http.post(f"/v1/jobs/{first}:cancel")
    assert service.post(graph, headers=key).status_code == 422
    again = [service.post(graph, asked, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in again] == [202, 202]
    assert again[0].json()["id"] == again[1].json()["id"]


def test_a_job_of_a_kind_of_a_newer_release(start_service: Any) -> None:
    service = start_service(num_workers=0)
    jobs = service.app.state.service.jobs
    known, other = (jobs.submit(name, "{}", b"", max_queued=9, kind="dream") for name in "ab")
    assert [job["kind"] for job in service.http.get("/v1/jobs").json()["jobs"]] == ["dream"] * 2
    waiting = service.job(known.id)
    assert (waiting["kind"], waiting["state"], "plan_id" in waiting) == ("dream", "queued", False)
    cancelled = service.http.post(f"/v1/jobs/{other.id}:cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert jobs.succeed(jobs.claim("me"), b'{"of": "sheep"}')
    made = service.http.get(f"/v1/jobs/{known.id}")
    assert made.status_code == 409
    assert made.json()["type"].endswith("#other-release")
    assert "'dream'" in made.json()["detail"]


def test_jobs_are_listed_in_pages(start_service: Any, make_graph: Any) -> None:
    service = start_service(num_workers=0)
    made = [service.post(make_graph(width)).json()["id"] for width in (8, 16, 24)]
    service.http.post(f"/v1/jobs/{made[0]}:cancel")
    first = service.http.get("/v1/jobs", params={"page_size": 2}).json()
    token = {"page_size": 2, "page_token": first["next_page_token"]}
    second = service.http.get("/v1/jobs", params=token).json()
    assert [job["id"] for job in first["jobs"] + second["jobs"]] == made[::-1]
    assert second["next_page_token"] == ""
    states = {"state": ["cancelled", "failed"]}
    (only,) = service.http.get("/v1/jobs", params=states).json()["jobs"]
    assert (only["id"], only["state"], only["kind"]) == (made[0], "cancelled", "plan")
    assert service.http.get("/v1/jobs", params={"state": "asleep"}).status_code == 422


def test_pages_link_to_each_other(start_service: Any, make_graph: Any) -> None:
    service = start_service(num_workers=0)
    made = [service.post(make_graph(width)).json()["id"] for width in (8, 16, 24)]
    asked = {"page_size": 2, "state": ["queued", "running"]}
    page = service.http.get("/v1/jobs", params=asked)
    found = []
    while True:
        found += [job["id"] for job in page.json()["jobs"]]
        first = service.http.get(page.url.join(page.links["first"]["url"]))
        assert [job["id"] for job in first.json()["jobs"]] == made[:0:-1]
        if "next" not in page.links:
            break
        page = service.http.get(page.url.join(page.links["next"]["url"]))
    assert found == made[::-1]
    assert page.json()["next_page_token"] == ""
    empty = service.http.get("/v1/plans")
    assert list(empty.links) == ["first"]


def test_a_job_says_when_it_ran_and_for_whom(service: Any, make_graph: Any) -> None:
    made = service.post(make_graph(88), wait=60)
    assert made.status_code == 200
    listed = service.http.get("/v1/jobs", params={"page_size": 1}).json()["jobs"][0]
    job = service.job(listed["id"])
    assert listed["caller"] is None
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]
    assert listed["finished_at"] == job["finished_at"]


PROBLEMS = {
    "no route": ("GET", "/v1/nothing", {}, 404),
    "method": ("PATCH", "/v1/plans", {}, 405),
    "unknown plan": ("GET", f"/v1/plans/{'0' * 64}", {}, 404),
    "page token": ("GET", "/v1/plans?page_token=x", {}, 422),
    "page size": ("GET", "/v1/plans?page_size=x", {}, 422),
    "media type": ("POST", "/v1/plans", {"content": b""}, 415),
    "body": ("POST", "/v1/plans:lookup", {"json": {}}, 422),
    "mesh": ("POST", "/v1/plans:lookup", {"json": {**MESH, "graph_sha256": "0" * 64}}, 404),
    "coding": ("PUT", f"/v1/graphs/{'0' * 64}", {"headers": {"Content-Encoding": "br"}}, 415),
    "size": ("PUT", f"/v1/graphs/{'0' * 64}", {"content": bytes(2 << 20)}, 413),
    "archive": ("PUT", f"/v1/graphs/{hashlib.sha256(b'x').hexdigest()}", {"content": b"x"}, 400),
}


@pytest.mark.parametrize(("method", "path", "sent", "status"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_has_the_id_of_its_request(
    service: Any, method: str, path: str, sent: dict[str, Any], status: int
) -> None:
    headers = {**sent.pop("headers", {}), "X-Request-ID": f"ours-{status}"}
    answer = service.http.request(method, path, headers=headers, **sent)
    assert answer.status_code == status, answer.text
    assert answer.headers["X-Request-ID"] == f"ours-{status}"
    assert answer.json()["request_id"] == f"ours-{status}"


def test_the_problem_of_a_job_has_the_id_of_the_request_that_submitted_it(
    start_service: Any, graph: bytes
) -> None:
    service = start_service(num_workers=0)
    job_id = service.post(graph, headers={"X-Request-ID": "first"}).json()["id"]
    cancelled = service.http.post(f"/v1/jobs/{job_id}:cancel", headers={"X-Request-ID": "second"})
    assert cancelled.json()["error"]["request_id"] == "first"
    assert events(service, job_id)[-1]["data"]["error"]["request_id"] == "first"


def events(service: Any, job_id: str, last: int | None = None) -> list[dict[str, Any]]:
    """What a stream sends until it ends."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    answer = service.http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if "data" in fields:
            data = json.loads(fields["data"])
            assert int(fields["id"]) == data["number"]
            assert fields["event"] == data["kind"]
            found.append(data)
    return found


def test_a_job_is_followed_and_taken_up_again(start_service: Any, graph: bytes) -> None:
    go = threading.Event()

    def slowly(work: Any, on_progress: Any, cancel: Any) -> Solved:
        on_progress({"phase": "search", "incumbent": 2.0, "bound": 1.0, "gap": 0.5})
        go.wait(300)
        return solve(work, on_progress, cancel)

    service = start_service(executor=ThreadExecutor(slowly))
    job_id = service.post(graph).json()["id"]
    service.await_job(job_id, lambda job: job["metadata"].get("incumbent") == 2.0)
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        # What was there before comes at once, the rest as it happens.
        lines = (line for line in stream.iter_lines() if line.startswith("event: "))
        live = [next(lines) for _ in range(3)]
        go.set()
        live += lines
    whole = events(service, job_id)
    assert [e["number"] for e in whole] == list(range(1, len(whole) + 1))
    states = [e["data"]["state"] for e in whole if e["kind"] == "state"]
    assert states == ["queued", "running", "succeeded"]
    assert any(e["data"].get("incumbent") == 2.0 for e in whole if e["kind"] == "progress")
    assert live == [f"event: {e['kind']}" for e in whole]
    assert events(service, job_id, last=2) == whole[2:]
    assert events(service, job_id, last=len(whole)) == []
    assert service.http.get(f"/v1/jobs/{'0' * 32}/events").status_code == 404


def test_a_stream_ends_with_a_hint_when_the_service_does(
    start_service: Any, graph: bytes, program: Any
) -> None:
    service = start_service(executor=program("hang"))
    job_id = service.post(graph).json()["id"]
    with service.http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("event: state")
        service.app.state.service.drain()
        rest = list(lines)
    assert any(line.startswith("retry: ") for line in rest)
    assert service.http.get("/readyz").status_code == 503


def test_figures_are_there_for_prometheus(service: Any, graph: bytes) -> None:
    service.post(graph, wait=60)
    text = service.http.get("/metrics").text
    assert 'autoshard_http_requests_total{method="POST",route="/v1/plans",status="200"}' in text
    assert 'autoshard_jobs{state="succeeded"}' in text
    assert 'autoshard_cache_entries{namespace="plans",project="default"}' in text
    assert 'autoshard_job_duration_seconds_count{kind="plan",outcome="succeeded"}' in text
    assert 'autoshard_job_wait_seconds_count{class="solve"}' in text
    assert "process_resident_memory_bytes" in text
    assert "autoshard_build_info{" in text
    job = service.http.get("/v1/jobs").json()["jobs"][0]["id"]
    assert job not in text


def test_options_without_groups_are_taken_and_deprecated(service: Any, graph: bytes) -> None:
    digest = hashlib.sha256(graph).hexdigest()
    put(service, graph, digest, "identity")
    options = {"solver": {"time_limit": 30}}
    grouped, flat = (
        service.http.post(
            "/v1/plans",
            json={**MESH, "graph_sha256": digest, "options": given},
            headers={"Prefer": "wait=60"},
        )
        for given in (options, {"time_limit": 30})
    )
    assert grouped.status_code == flat.status_code == 200
    assert grouped.json()["id"] == flat.json()["id"]
    assert flat.headers["Autoshard-Deprecated"] == "time_limit=solver.time_limit"
    assert flat.headers["Deprecation"].startswith("@")
    assert flat.headers["Sunset"].endswith("GMT")
    assert not {"Deprecation", "Autoshard-Deprecated"} & set(grouped.headers)
