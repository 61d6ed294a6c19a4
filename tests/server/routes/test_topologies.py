"""Stored topologies, and requests that name them."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.client import Client
from autoshard.errors import RequestRejectedError
from autoshard.mesh import Topology, get_topology, topology_from_json, topology_to_json
from autoshard.plan import Plan
from autoshard_server import Settings, ThreadExecutor
from autoshard_server.solvers.solving import solve
from autoshard_server.store.database import Stores


def cluster(name: str, bandwidth: float = 1e9) -> Topology:
    """The H100 preset with other links between machines."""
    preset = get_topology("h100-sxm")
    inner, outer = preset.levels
    return replace(preset, name=name, levels=(inner, replace(outer, bandwidth=bandwidth)))


def put(service: Any, name: str, document: Topology | str | bytes, **options: Any) -> Any:
    text = topology_to_json(document) if isinstance(document, Topology) else document
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return service.http.put(f"/v1/topologies/{name}", content=text, headers=headers, **options)


@pytest.fixture(scope="module")
def digest(service: Any, make_graph: Any) -> str:
    graph = make_graph(40)
    found = hashlib.sha256(graph).hexdigest()
    assert service.http.put(f"/v1/graphs/{found}", content=graph).status_code == 201
    return found


def test_a_topology_is_stored_replaced_and_forgotten(service: Any) -> None:
    mine = cluster("mine")
    first = put(service, "mine", mine)
    assert (first.status_code, first.headers["Location"]) == (201, "/v1/topologies/mine")
    found = service.http.get("/v1/topologies/mine")
    assert topology_from_json(found.content) == mine
    tags = {answer.headers["ETag"].removeprefix("W/") for answer in (found, first)}
    assert tags == {f'"{first.json()["sha256"]}"'}
    tag = {"If-None-Match": found.headers["ETag"]}
    assert service.http.get("/v1/topologies/mine", headers=tag).status_code == 304
    second = put(service, "mine", cluster("mine", 2e9))
    assert (second.status_code, "Location" in second.headers) == (200, False)
    assert second.json()["created_at"] == first.json()["created_at"]
    assert service.http.get("/v1/topologies/mine", headers=tag).status_code == 200
    listed = service.http.get("/v1/topologies").json()
    assert {"mine", "h100-sxm"} <= set(listed["topologies"])
    assert [t["sha256"] for t in listed["stored"] if t["name"] == "mine"] == [
        second.json()["sha256"]
    ]
    assert service.http.delete("/v1/topologies/mine").status_code == 204
    assert service.http.delete("/v1/topologies/mine").status_code == 404
    assert service.http.get("/v1/topologies/mine").status_code == 404
    assert "mine" not in service.http.get("/v1/topologies").json()["topologies"]


def test_only_what_was_seen_is_changed(service: Any) -> None:
    new = {"If-None-Match": "*"}
    first = put(service, "seen", cluster("seen"), headers=new)
    assert first.status_code == 201
    seen = {"If-Match": f'"{"0" * 64}", {first.headers["ETag"]}'}
    stale = {"If-Match": f'"{"1" * 64}", "{"0" * 64}"'}
    refused = [put(service, "seen", cluster("seen", 2e9), headers=h) for h in (new, stale)]
    refused.append(service.http.delete("/v1/topologies/seen", headers=stale))
    refused.append(put(service, "unseen", cluster("unseen"), headers={"If-Match": "*"}))
    for answer in refused:
        assert answer.status_code == 412
        assert answer.json()["type"].endswith("#precondition-failed")
    assert first.headers["ETag"] in service.http.get("/v1/topologies/seen").headers["ETag"]
    assert put(service, "seen", cluster("seen", 2e9), headers=seen).status_code == 200
    assert service.http.delete("/v1/topologies/seen", headers=seen).status_code == 412
    assert service.http.delete("/v1/topologies/seen", headers={"If-Match": "*"}).status_code == 204


def test_a_preset_has_a_tag_and_stays(service: Any) -> None:
    found = service.http.get("/v1/topologies/h100-sxm")
    assert topology_from_json(found.content) == get_topology("h100-sxm")
    tag = {"If-None-Match": found.headers["ETag"]}
    assert service.http.get("/v1/topologies/h100-sxm", headers=tag).status_code == 304
    refused = put(service, "h100-sxm", cluster("h100-sxm"))
    for answer in (refused, service.http.delete("/v1/topologies/h100-sxm")):
        assert answer.status_code == 409
        assert answer.json()["type"].endswith("#topology-preset")
        assert "'my-h100-sxm'" in answer.json()["detail"]
    assert service.http.get("/v1/topologies/h100-sxm").content == found.content


@pytest.mark.parametrize(
    ("name", "document", "kind", "told"),
    [
        ("mine", cluster("other"), "mesh", "'other', but the path has 'mine'"),
        ("mine", b"{", "mesh", "JSON"),
        ("mine", b'{"name": "mine"}', "mesh", "topology.device"),
        (
            "mine",
            json.dumps({**json.loads(topology_to_json(cluster("mine"))), "x": 1}),
            "mesh",
            "x",
        ),
        ("a b", cluster("a b"), "request", "name"),
        ("n" * 65, cluster("n" * 65), "request", "name"),
    ],
    ids=["other-name", "no-json", "no-device", "unknown-field", "space", "long"],
)
def test_what_cannot_be_stored(
    service: Any, name: str, document: Any, kind: str, told: str
) -> None:
    answer = put(service, name, document)
    assert answer.status_code == 422
    assert answer.json()["type"].endswith(f"#{kind}")
    assert told in answer.json()["detail"]
    assert service.http.get(f"/v1/topologies/{name}").status_code == 404


def test_sizes_and_numbers_have_limits(start_service: Any) -> None:
    service = start_service(num_workers=0, max_topologies=1, max_topology_bytes=8192)
    assert put(service, "first", cluster("first")).status_code == 201
    full = put(service, "second", cluster("second"))
    assert (full.status_code, full.json()["limit_name"]) == (422, "AUTOSHARD_MAX_TOPOLOGIES")
    assert put(service, "first", cluster("first", 2e9)).status_code == 200
    large = put(service, "first", topology_to_json(cluster("first")) + " " * 8192)
    assert (large.status_code, large.json()["limit_name"]) == (413, "AUTOSHARD_MAX_TOPOLOGY_BYTES")
    as_text = put(service, "first", cluster("first"), headers={"Content-Type": "text/plain"})
    assert as_text.status_code == 415


def test_storing_needs_what_planning_needs(start_service: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    stores = Stores(Settings(store_url=url))
    tokens = {scope: stores.api_keys.create(scope, [scope])[1] for scope in ("read", "plan")}
    stores.close()
    service = start_service(store_url=url, auth="required", num_workers=0)
    bearer = {scope: {"Authorization": f"Bearer {token}"} for scope, token in tokens.items()}
    assert put(service, "mine", cluster("mine")).status_code == 401
    assert put(service, "mine", cluster("mine"), headers=bearer["read"]).status_code == 403
    assert put(service, "mine", cluster("mine"), headers=bearer["plan"]).status_code == 201
    path = "/v1/topologies/mine"
    assert service.http.get(path, headers=bearer["read"]).status_code == 200
    assert service.http.delete(path, headers=bearer["read"]).status_code == 403
    assert service.http.delete(path, headers=bearer["plan"]).status_code == 204


def test_a_request_means_the_topology_that_has_the_name_now(service: Any, digest: str) -> None:
    asked = {"graph_sha256": digest, "mesh": {"shape": [16], "topology": "changing"}}
    wait = {"Prefer": "wait=60"}
    unknown = service.http.post("/v1/plans", json=asked, headers=wait)
    assert unknown.status_code == 422
    assert "PUT /v1/topologies/{name}" in unknown.json()["detail"]
    plans = []
    for bandwidth in (1e9, 50e9):
        put(service, "changing", cluster("changing", bandwidth))
        # Nobody has asked for this one yet, though for another of the name.
        assert service.http.post("/v1/plans:lookup", json=asked).status_code == 404
        answer = service.http.post("/v1/plans", json=asked, headers=wait)
        assert answer.headers["Autoshard-Cache"] == "miss"
        plans.append(Plan.from_json(answer.content))
        assert service.http.post("/v1/plans:lookup", json=asked).json()["id"] == plans[-1].id
        assert plans[-1].mesh.topology == cluster("changing", bandwidth)
    slow, fast = plans
    assert slow.id != fast.id
    # The one that it was first: its plan is known.
    put(service, "changing", cluster("changing", 1e9))
    again = service.http.post("/v1/plans", json=asked)
    assert (again.headers["Autoshard-Cache"], again.json()["id"]) == ("hit", slow.id)
    assert service.http.get(f"/v1/plans/{fast.id}").status_code == 200
    service.http.delete("/v1/topologies/changing")
    assert service.http.post("/v1/plans", json=asked).status_code == 422


def test_searches_and_coverages_name_topologies_too(service: Any, digest: str) -> None:
    wait = {"Prefer": "wait=60"}
    search = {"graph_sha256": digest, "num_devices": 16, "topology": "searched", "max_axes": 1}
    covered = {"graph_sha256": digest, "mesh": {"shape": [16], "topology": "searched"}}
    sized = {**covered, "validate_only": True}
    paths = {"/v1/searches": search, "/v1/operators:coverage": covered, "/v1/plans": sized}
    for path, body in paths.items():
        assert service.http.post(path, json=body, headers=wait).status_code == 422
    found = []
    for bandwidth in (1e9, 50e9):
        put(service, "searched", cluster("searched", bandwidth))
        answers = {p: service.http.post(p, json=b, headers=wait) for p, b in paths.items()}
        assert [answer.status_code for answer in answers.values()] == [200, 200, 200]
        mesh = answers["/v1/searches"].json()["meshes"][0]
        assert mesh["mesh"]["topology"]["levels"][1]["bandwidth"] == bandwidth
        found.append(answers["/v1/plans"].json()["plan_id"])
    assert found[0] != found[1]
    service.http.delete("/v1/topologies/searched")


def test_servers_of_one_database_mean_the_same(
    start_service: Any, make_graph: Any, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    one, two = (start_service(store_url=url, executor=ThreadExecutor(solve)) for _ in range(2))
    asked = {"mesh": {"shape": [16], "topology": "shared"}}
    ids = []
    for bandwidth, (here, there) in ((1e9, (one, two)), (50e9, (two, one))):
        put(here, "shared", cluster("shared", bandwidth))
        ids += [
            service.post(make_graph(40), asked, wait=60).json()["id"] for service in (here, there)
        ]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_a_client_may_name_one(service: Any, make_graph: Any, tmp_path: Path) -> None:
    put(service, "named", cluster("named"))
    mesh = {"shape": [16], "topology": "named"}
    with Client(service.url, cache=tmp_path) as client:
        found = client.plan(make_graph(40), mesh=mesh)
        assert found.mesh.topology == cluster("named")
        with pytest.raises(RequestRejectedError, match="topology 'nobody' is unknown"):
            client.plan(make_graph(40), mesh={**mesh, "topology": "nobody"})
    service.http.delete("/v1/topologies/named")


def test_many_that_store_a_new_name_at_once(start_service: Any) -> None:
    service = start_service(num_workers=0)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: put(service, "a", cluster("a", 1e9 + i)), range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 11 + [201]
    assert len(service.http.get("/v1/topologies").json()["stored"]) == 1
