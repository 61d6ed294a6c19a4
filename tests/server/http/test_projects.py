"""Projects: no route shows or changes the resources of another project."""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from autoshard.mesh import get_topology, topology_to_json
from autoshard_server import Settings, ThreadExecutor
from autoshard_server.solvers.solving import solve
from autoshard_server.store.database import Stores

SPECIFICATION = Path(__file__).parents[3] / "openapi" / "openapi.json"

PUBLIC = {"livez", "readyz", "getVersion"}
"""Operations that need no key."""

SLOW = {"explainPlan", "streamJobEvents"}
"""Operations that read by submitting or following a job."""

CHANGING = {"created_at", "updated_at", "used_at", "request_id", "sha256"}
"""Members of responses that differ between equal requests."""


@dataclass(frozen=True, slots=True)
class Known:
    """Names of resources, by the parameters and fields that take them."""

    digest: str
    plan_id: str
    job_id: str
    search_id: str
    name: str


NOBODY_HAS = Known("e" * 64, "d" * 64, "c" * 32, "b" * 64, "nothing")


def topology(name: str) -> str:
    document = json.loads(topology_to_json(get_topology("h100-sxm"), indent=None))
    return json.dumps({**document, "name": name})


def bodies(known: Known) -> dict[str, dict[str, Any]]:
    """Bodies of requests by operation; they name the resources that others may not use."""
    graph = {"graph_sha256": known.digest}
    mesh = {"mesh": {"shape": [2, 2]}}
    octets, as_json = (
        {"headers": {"Content-Type": kind}}
        for kind in ("application/octet-stream", "application/json")
    )
    return {
        "createPlan": {"json": {**graph, **mesh}},
        "lookUpPlan": {"json": {**graph, **mesh}},
        "explainChoice": {"json": {"name": "linear"}},
        "comparePlans": {"json": {"before": known.plan_id, "after": known.plan_id}},
        "searchMeshes": {"json": {**graph, "num_devices": 2}},
        "operatorCoverage": {"json": graph},
        # The digest of other bytes: the response must not depend on what is stored.
        "putGraph": {"content": b"other bytes", **octets},
        "putTopology": {"content": topology(known.name), **as_json},
    }


QUERIES = {"explainPlan": {"name": "linear"}, "exportPlan": {"to": "csv"}}


def operations() -> Iterator[tuple[str, str, str]]:
    """Method, path and id of every operation of the specification."""
    paths = json.loads(SPECIFICATION.read_text())["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield method, path, operation["operationId"]


def walk(http: httpx2.Client, token: str, known: Known) -> dict[str, tuple[int, str]]:
    """Status and text of each operation's response to a key, where names are left out."""
    sent = bodies(known)
    found = {}
    for method, template, operation in operations():
        path = template.format_map({name: getattr(known, name) for name in known.__slots__})
        response = http.request(
            method, path, params=QUERIES.get(operation), **merged(sent.get(operation, {}), token)
        )
        found[operation] = response.status_code, without_names(response, known)
    return found


def merged(options: Mapping[str, Any], token: str) -> dict[str, Any]:
    return {**options, "headers": {**options.get("headers", {}), **bearer(token)}}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def without_names(response: httpx2.Response, known: Known) -> str:
    text = response.text
    if text and "json" in response.headers.get("Content-Type", ""):
        text = json.dumps(without_times(response.json()), sort_keys=True)
    names = "|".join(re.escape(getattr(known, name)) for name in known.__slots__)
    return re.sub(names, "NAME", text)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in CHANGING}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite3'}"


@pytest.fixture
def tokens(store: str) -> dict[str, str]:
    """Keys by project and scope; the callers of all projects have the same name."""
    stores = Stores(Settings(store_url=store))
    found = {
        f"{project} {scope}": stores.api_keys.create("ann", [scope], project=project)[1]
        for project in ("red", "blue", "shared", "default")
        for scope in ("plan", "admin")
    }
    stores.close()
    return found


def fill(service: Any, graph: bytes) -> Known:
    """Store one resource of each kind."""
    digest = hashlib.sha256(graph).hexdigest()
    http, wait = service.http, {"Prefer": "wait=60"}
    assert http.put(f"/v1/graphs/{digest}", content=graph).status_code == 201
    sent = bodies(Known(digest, "", "", "", "ours"))
    once = {**wait, "Idempotency-Key": "first"}
    plan = http.post("/v1/plans", **sent["createPlan"], headers=once)
    assert plan.headers["Autoshard-Cache"] == "miss"
    search = http.post("/v1/searches", **sent["searchMeshes"], headers=wait)
    assert http.get(search.headers["Content-Location"]).content == search.content
    assert http.put("/v1/topologies/ours", **sent["putTopology"]).status_code == 201
    job = http.get("/v1/jobs").json()["jobs"][-1]
    assert job["plan_id"] == plan.json()["id"]
    return Known(
        digest,
        plan.json()["id"],
        job["id"],
        search.headers["Content-Location"].rsplit("/", 1)[1],
        "ours",
    )


@pytest.mark.thorough
def test_no_route_shows_or_changes_what_another_project_has(
    start_service: Any, store: str, tokens: dict[str, str], graph: bytes
) -> None:
    service = start_service(store_url=store, auth="required")
    service.http.headers.update(bearer(tokens["red plan"]))
    red = fill(service, graph)
    cache = service.app.state.service.cache
    assert {name.partition("_")[0] for name in cache.namespaces()} == {"red"}
    assert {"red_plans", "red_graphs", "red_searches"} <= set(cache.namespaces())
    reading = [
        path
        for method, path, operation in operations()
        if method == "get" and path.startswith("/v1") and operation not in SLOW
    ]

    def seen_by(token: str) -> list[str]:
        names = {name: getattr(red, name) for name in red.__slots__}
        urls = [path.format_map(names) for path in reading]
        params = {"to": "csv"}
        answers = [service.http.get(url, params=params, headers=bearer(token)) for url in urls]
        return [without_names(answer, red) for answer in answers]

    before = seen_by(tokens["red admin"])
    for other in ("blue plan", "blue admin", "default plan", "default admin", "shared admin"):
        strange = walk(service.http, tokens[other], red)
        unknown = walk(service.http, tokens[other], NOBODY_HAS)
        assert strange.keys() == {operation for _, _, operation in operations()}
        for operation, answer in strange.items():
            if operation != "listAuditEvents":  # The second walk finds the events of the first.
                assert answer == unknown[operation], (other, operation)
            is_listing = operation.startswith("list")
            makes_own = operation in {"putTopology", "deleteTopology"}
            if operation not in PUBLIC and not is_listing and not makes_own:
                assert answer[0] in {403, 404, 422}, (other, operation, answer)
        assert strange["getMetrics"][0] == 403
    assert seen_by(tokens["red admin"]) == before


def test_equal_requests_of_two_projects_share_nothing(
    start_service: Any, store: str, tokens: dict[str, str], graph: bytes
) -> None:
    service = start_service(store_url=store, auth="required", executor=ThreadExecutor(solve))
    known = []
    for project in ("red", "blue"):
        # All is new again, also under the same Idempotency-Key of a caller of the same name.
        service.http.headers.update(bearer(tokens[f"{project} plan"]))
        known.append(fill(service, graph))
    red, blue = known
    assert (red.digest, red.plan_id, red.search_id) == (blue.digest, blue.plan_id, blue.search_id)
    assert red.job_id != blue.job_id
    http, ids = service.http, {"plans": red.plan_id, "graphs": red.digest}
    ids |= {"searches": red.search_id, "topologies": "ours"}
    for kind, name in ids.items():
        answers = [http.delete(f"/v1/{kind}/{name}").status_code for _ in range(2)]
        assert answers == [204, 404], kind
        assert http.get(f"/v1/{kind}/{name}").status_code == 404
    assert http.delete(f"/v1/jobs/{red.job_id}").status_code == 404
    assert http.delete(f"/v1/jobs/{blue.job_id}").status_code == 204
    assert http.get(f"/v1/jobs/{blue.job_id}/events").status_code == 404
    assert http.get("/v1/plans").json()["plans"] == []
    service.http.headers.update(bearer(tokens["red plan"]))
    for kind, name in {**ids, "jobs": red.job_id}.items():
        assert http.get(f"/v1/{kind}/{name}").status_code == 200, kind
    assert [plan["id"] for plan in http.get("/v1/plans").json()["plans"]] == [red.plan_id]


def test_a_topology_is_shared_on_purpose(
    start_service: Any, store: str, tokens: dict[str, str]
) -> None:
    service = start_service(store_url=store, auth="required", num_workers=0)
    put = {"content": topology("ours"), "headers": {"Content-Type": "application/json"}}

    def ask(method: str, who: str, path: str = "/v1/topologies/ours", **options: Any) -> Any:
        return service.http.request(method, path, **merged(options, tokens[who]))

    assert ask("PUT", "shared plan", **put).json()["project"] == "shared"
    for who in ("red plan", "default plan"):
        assert ask("GET", who).status_code == 200
        (entry,) = ask("GET", who, "/v1/topologies").json()["stored"]
        assert (entry["name"], entry["project"]) == ("ours", "shared")
        refused = ask("DELETE", who)
        assert (refused.status_code, "'shared'" in refused.json()["detail"]) == (403, True)
    # A project's own topology of the name comes first, for this project only.
    own = {**put, "content": topology("ours").replace("NVIDIA H100 SXM", "another device")}
    assert ask("PUT", "red plan", **own).status_code == 201
    assert "another device" in ask("GET", "red plan").text
    assert "another device" not in ask("GET", "default plan").text
    (entry,) = ask("GET", "red plan", "/v1/topologies").json()["stored"]
    assert entry["project"] == "red"
    assert ask("DELETE", "red plan").status_code == 204
    assert "another device" not in ask("GET", "red plan").text
    assert ask("DELETE", "shared plan").status_code == 204
    assert ask("GET", "red plan").status_code == 404


def test_the_audit_log_says_who_changed_what(
    start_service: Any, store: str, tokens: dict[str, str], graph: bytes
) -> None:
    service = start_service(store_url=store, auth="required", executor=ThreadExecutor(solve))
    service.http.headers.update(bearer(tokens["red plan"]))
    red = fill(service, graph)
    service.http.post(f"/v1/jobs/{red.job_id}:cancel")
    service.http.delete(f"/v1/plans/{red.plan_id}", headers={"X-Request-ID": "mine"})
    assert service.http.get("/v1/audit").status_code == 403
    admin = bearer(tokens["red admin"])
    events = []
    page = {"next_page_token": ""}
    while True:
        params = {"page_size": 2, "page_token": page["next_page_token"]}
        page = service.http.get("/v1/audit", headers=admin, params=params).json()
        events += page["events"]
        if not page["next_page_token"]:
            break
    newest = events[0]
    assert (newest["caller"], newest["request_id"]) == ("ann", "mine")
    done = [(event["action"], event["resource"].split("/")[-2]) for event in reversed(events)]
    assert done == [
        ("create", "keys"),
        ("create", "keys"),
        ("create", "graphs"),
        ("create", "jobs"),
        ("create", "jobs"),
        ("create", "topologies"),
        # A finished job was not cancelled.
        ("delete", "plans"),
    ]
    blue = service.http.get("/v1/audit", headers=bearer(tokens["blue admin"])).json()["events"]
    assert [event["resource"].split("/")[0] for event in blue] == ["keys", "keys"]


def test_a_deleted_plan_is_gone_on_all_servers(
    start_service: Any, store: str, graph: bytes
) -> None:
    executor = ThreadExecutor(solve)
    one, two = (start_service(store_url=store, executor=executor) for _ in range(2))
    plan = one.post(graph, wait=60)
    path = f"/v1/plans/{plan.json()['id']}"
    for service in (one, two):
        assert service.http.get(path).content == plan.content
    assert one.http.delete(path).status_code == 204
    assert one.http.get(path).status_code == 404
    time.sleep(2.1)
    assert two.http.get(path).status_code == 404
    again = two.post(graph, wait=60)
    assert again.headers["Autoshard-Cache"] == "miss"
    assert one.http.get(path).status_code == 200


def test_a_job_is_deleted_when_it_is_finished(start_service: Any, graph: bytes) -> None:
    service = start_service(num_workers=0)
    path = service.post(graph).headers["Location"]
    refused = service.http.delete(path)
    assert refused.status_code == 409
    assert refused.json()["type"].endswith("#job-not-finished")
    assert ":cancel" in refused.json()["detail"]
    assert service.http.post(f"{path}:cancel").json()["state"] == "cancelled"
    assert [service.http.delete(path).status_code for _ in range(2)] == [204, 404]
    assert service.http.get(path).status_code == 404
