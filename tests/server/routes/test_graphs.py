"""Stored graphs, the requests that name one by digest, and what is computed from their plans."""

import hashlib
import json
from base64 import urlsafe_b64encode
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autoshard import Client
from autoshard.exports import code_exports
from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import candidate_meshes, make_plan, problem_size
from autoshard.pricing import chrome_trace, simulate
from autoshard.report import summarise
from autoshard.report.page import plan_page
from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve

MESH = {"shape": [2, 2]}


@pytest.fixture(scope="module")
def graph(make_graph: Any) -> bytes:
    """A graph that no other module has asked the shared service about."""
    made: bytes = make_graph(56)
    return made


@pytest.fixture(scope="module")
def digest(service: Any, graph: bytes) -> str:
    found = hashlib.sha256(graph).hexdigest()
    assert put(service, graph).status_code == 201
    return found


@pytest.fixture(scope="module")
def plan(service: Any, digest: str) -> Plan:
    return Plan.from_json(ask(service, digest, wait=60).content)


def put(service: Any, graph: bytes, digest: str | None = None, **options: Any) -> Any:
    digest = digest or hashlib.sha256(graph).hexdigest()
    return service.http.put(f"/v1/graphs/{digest}", content=graph, **options)


def ask(service: Any, digest: str, *, wait: int | None = None, **fields: Any) -> Any:
    headers = {} if wait is None else {"Prefer": f"wait={wait}"}
    body = {"graph_sha256": digest, "mesh": MESH, **fields}
    return service.http.post("/v1/plans", json=body, headers=headers)


def test_a_graph_is_stored_once(service: Any, graph: bytes, digest: str) -> None:
    again = put(service, graph)
    assert again.status_code == 200
    program = load_graph(graph)
    document = again.json()
    assert document["sha256"] == digest
    assert document["size"] == len(graph)
    assert document["num_nodes"] == len(program.nodes)
    known = service.http.get(f"/v1/graphs/{digest}")
    assert known.json()["created_at"] == document["created_at"]
    head = service.http.head(f"/v1/graphs/{digest}")
    assert (head.status_code, head.content) == (200, b"")


def test_a_graph_that_is_not_stored(service: Any) -> None:
    other = "1" * 64
    for answer in (service.http.get(f"/v1/graphs/{other}"), ask(service, other)):
        assert answer.status_code == 404
        assert answer.json()["type"].endswith("#graph-unknown")
        assert f"PUT /v1/graphs/{other}" in answer.json()["detail"]
    assert service.http.head(f"/v1/graphs/{other}").status_code == 404


@pytest.mark.parametrize(
    ("body", "digest", "status", "kind"),
    [
        (b"x", "0" * 64, 422, "digest-mismatch"),
        (b"no archive", None, 400, "archive"),
        (bytes(2 << 20), None, 413, "too-large"),
        (b"x", "short", 422, "request"),
    ],
    ids=["digest", "archive", "size", "path"],
)
def test_what_cannot_be_stored(
    service: Any, body: bytes, digest: str | None, status: int, kind: str
) -> None:
    answer = put(service, body, digest)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"].endswith(f"#{kind}")
    assert service.http.head(f"/v1/graphs/{hashlib.sha256(body).hexdigest()}").status_code == 404


def test_a_stored_graph_has_the_plan_of_its_upload(service: Any, graph: bytes, plan: Plan) -> None:
    uploaded = service.post(graph, {"mesh": MESH})
    assert uploaded.headers["Autoshard-Cache"] == "hit"
    assert Plan.from_json(uploaded.content) == plan


def test_limits_are_named(start_service: Any, graph: bytes) -> None:
    small = start_service(max_edges=3, max_devices=4, max_mesh_axes=2, num_workers=0)
    answers = {
        "AUTOSHARD_MAX_EDGES": put(small, graph),
        "AUTOSHARD_MAX_DEVICES": ask(small, "0" * 64, mesh={"shape": [8]}),
        "AUTOSHARD_MAX_MESH_AXES": ask(small, "0" * 64, mesh={"shape": [1, 1, 2]}),
    }
    for name, answer in answers.items():
        assert answer.status_code == 422
        problem = answer.json()
        assert problem["type"].endswith("#limit")
        assert problem["limit_name"] == name
        assert f"{problem['limit']}" in problem["detail"]


def test_a_problem_can_be_too_large(start_service: Any, graph: bytes) -> None:
    small = start_service(max_strategies=10)
    answer = small.post(graph, wait=60)
    assert answer.status_code == 422
    assert "at most 10" in answer.json()["detail"]
    only_looked_at = small.post(graph, {"mesh": MESH, "validate_only": True}, wait=60)
    assert only_looked_at.status_code == 422
    assert only_looked_at.json()["type"].endswith("#options")
    assert "at most 10" in only_looked_at.json()["detail"]
    body = {"graph_sha256": put(small, graph).json()["sha256"], "num_devices": 2}
    search = small.http.post("/v1/searches", json=body, headers={"Prefer": "wait=60"})
    assert search.status_code == 422, search.text
    assert "at most 10" in search.json()["detail"]


def test_an_explanation_may_take_no_longer_than_a_plan(start_service: Any, graph: bytes) -> None:
    service = start_service(max_time_limit=20, executor=ThreadExecutor(solve))
    options = {"time_limit": 20}
    plan = service.post(graph, {"mesh": MESH, "options": options}, wait=60).json()
    path = f"/v1/plans/{plan['id']}:explain"
    asked = {"name": plan["stages"][0]["nodes"][0]["name"]}
    assert service.http.post(path, json={**asked, "time_limit": 20}).status_code == 200
    refused = service.http.post(path, json={**asked, "time_limit": 21})
    assert refused.status_code == 422
    assert "AUTOSHARD_MAX_TIME_LIMIT" in refused.json()["detail"]


def test_a_request_is_validated_without_solving(
    service: Any, graph: bytes, digest: str, plan: Plan
) -> None:
    answer = ask(service, digest, validate_only=True)
    assert answer.status_code == 200
    assert answer.json()["plan_id"] == plan.id
    size = answer.json()["size"]
    assert size == problem_size(load_graph(graph), make_mesh([2, 2])).model_dump()
    assert size["num_strategies"] > size["num_nodes"] > 0
    assert size["feasible"] is None
    assert plan.memory is not None
    assert 0 < size["memory_bound"] <= plan.memory.peak
    again = service.post(graph, {"mesh": MESH, "validate_only": True})
    assert again.headers["Autoshard-Cache"] == "hit"


@pytest.mark.thorough
def test_a_request_that_no_memory_can_hold(service: Any, digest: str) -> None:
    options = {"memory_budget": 100}
    answer = ask(service, digest, options=options, validate_only=True)
    assert answer.json()["size"]["feasible"] is False
    assert Plan.from_json(ask(service, digest, options=options, wait=60).content).reason


def test_meshes_are_searched(start_service: Any, graph: bytes, tmp_path: Path) -> None:
    service = start_service(store_url=f"sqlite:///{tmp_path / 'store.sqlite3'}")
    body = {
        "graph_sha256": put(service, graph).json()["sha256"],
        "num_devices": 4,
        "topology": "h100-sxm",
    }
    answer = service.http.post("/v1/searches", json=body, headers={"Prefer": "wait=60"})
    assert answer.status_code == 200, answer.text
    meshes = answer.json()["meshes"]
    expected = {m.axis_sizes for m in candidate_meshes(4, topology="h100-sxm")}
    assert {tuple(a["size"] for a in m["mesh"]["axes"]) for m in meshes} == expected
    prices = [m["certificate"]["objective"] for m in meshes]
    assert prices == sorted(prices)
    best = Plan.from_json(service.http.get(f"/v1/plans/{meshes[0]['plan_id']}").content)
    alone = make_plan(load_graph(graph), best.mesh, PlanOptions())
    assert best.id == alone.id
    assert best.costs == alone.costs
    again = service.http.post("/v1/searches", json=body)
    assert again.headers["Autoshard-Cache"] == "hit"


class Deaf:
    """A cache that silently stores nothing."""

    def get(self, _key: str) -> None: ...

    def put(self, _key: str, _body: bytes) -> None: ...


@pytest.mark.thorough
def test_a_search_names_only_plans_that_are_kept(start_service: Any, graph: bytes) -> None:
    # A process of its own has a memory of its own; a full disk keeps nothing.
    deaf = ThreadExecutor(partial(solve, plans=Deaf()))
    for executor, cached in ((None, "hit"), (deaf, "miss")):
        service = start_service(executor=executor)
        body = {"graph_sha256": put(service, graph).json()["sha256"], "num_devices": 2}
        answer = service.http.post("/v1/searches", json=body, headers={"Prefer": "wait=60"})
        assert [mesh.get("plan_id") for mesh in answer.json()["meshes"]] == [None]
        assert answer.json()["meshes"][0]["certificate"]["status"] == "optimal"
        assert service.http.post("/v1/searches", json=body).headers["Autoshard-Cache"] == cached


def test_a_search_of_very_many_meshes_is_refused(service: Any, digest: str) -> None:
    for num_devices, max_axes in ((5040, 6), (720720, 3)):
        body = {"graph_sha256": digest, "num_devices": num_devices, "max_axes": max_axes}
        answer = service.http.post("/v1/searches", json=body)
        assert answer.status_code == 422
        assert answer.json()["limit_name"] == "AUTOSHARD_MAX_SEARCH_MESHES"
        assert "65 or more meshes" in answer.json()["detail"]


def test_a_choice_is_explained(service: Any, plan: Plan) -> None:
    node = plan.stages[0].nodes[0].name
    path = f"/v1/plans/{plan.id}:explain"
    answer = service.http.post(path, json={"name": node})
    assert answer.status_code == 200, answer.text
    (chosen,) = (a for a in answer.json()["alternatives"] if a["chosen"])
    assert chosen["regret"] == 0.0
    assert service.http.post(path, json={"name": node}).headers["Autoshard-Cache"] == "hit"
    unknown = service.http.post(path, json={"name": "nobody"})
    assert unknown.status_code == 422
    assert unknown.json()["type"].endswith("#options")
    misspelled = service.http.post(path, json={"name": node, "valeu": True})
    assert misspelled.json()["errors"][0]["pointer"] == "/valeu"


def test_explaining_with_get_is_deprecated_and_goes_on(service: Any, plan: Plan) -> None:
    path = f"/v1/plans/{plan.id}/explain"
    query = {"name": plan.stages[0].nodes[0].name}
    new = service.http.post(f"/v1/plans/{plan.id}:explain", json=query)
    old = service.http.get(path, params=query)
    assert (old.status_code, old.content) == (200, new.content)
    assert old.headers["Link"] == f'</v1/plans/{plan.id}:explain>; rel="successor-version"'
    assert {"deprecation", "sunset"} <= set(old.headers)
    assert "Deprecation" not in new.headers
    assert service.http.get(path, params={**query, "valeu": 1}).status_code == 422
    # It would submit a job, and tell nothing.
    assert service.http.head(path, params=query).status_code == 405


def test_two_plans_are_compared(service: Any, digest: str, plan: Plan) -> None:
    other = ask(service, digest, wait=60, mesh={"shape": [4]}).json()["id"]
    pair = {"before": plan.id, "after": other}
    difference = service.http.post("/v1/plans:compare", json=pair).json()
    assert difference["meshes"] == ["axis0=2 x axis1=2", "axis0=4"]
    same = {"before": plan.id, "after": plan.id}
    assert service.http.post("/v1/plans:compare", json=same).json()["inputs"] == []
    missing = service.http.post("/v1/plans:compare", json={**same, "after": "0" * 64})
    assert missing.status_code == 404


def test_a_plan_is_exported(service: Any, plan: Plan) -> None:
    path = f"/v1/plans/{plan.id}/export"
    table = service.http.get(path, params={"to": "csv"})
    assert table.status_code == 200
    assert table.headers["content-type"].startswith("text/csv")
    # Another release may write it otherwise, so it is asked for again, under a tag of its own.
    assert table.headers["Cache-Control"] == "private, no-cache"
    assert hashlib.sha256(table.content).hexdigest() in table.headers["ETag"]
    known = {"If-None-Match": table.headers["ETag"]}
    assert service.http.get(path, params={"to": "csv"}, headers=known).status_code == 304
    refused = service.http.get(path, params={"to": "torchtitan", "min_expressed": 1})
    assert refused.status_code == 422
    assert "torchtitan would express" in refused.json()["detail"]
    assert service.http.get(path, params={"to": "abacus"}).status_code == 422


def test_a_plan_is_summarised(service: Any, digest: str, plan: Plan) -> None:
    path = f"/v1/plans/{plan.id}/summary"
    answer = service.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == summarise(plan, width=80) + "\n"
    known = {"If-None-Match": answer.headers["ETag"]}
    assert service.http.get(path, headers=known).status_code == 304
    assert service.http.get(f"/v1/plans/{'0' * 64}/summary").status_code == 404
    with Client(service.url, cache=False) as client:
        assert client.summarise(plan.id) == client.summarise(plan) == answer.text
    none = ask(service, digest, wait=60, mesh={"shape": [2]}, options={"memory": {"budget": 1}})
    assert "No plan: " in service.http.get(f"/v1/plans/{none.json()['id']}/summary").text


def test_a_plan_has_a_page(service: Any, plan: Plan) -> None:
    path = f"/plans/{plan.id}"
    answer = service.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.text == plan_page(plan, exports=code_exports(plan), source=plan.id)
    known = {"If-None-Match": answer.headers["ETag"]}
    assert service.http.get(path, headers=known).status_code == 304
    assert service.http.get(f"/plans/{'0' * 64}").status_code == 404


def test_a_plan_is_traced(service: Any, plan: Plan) -> None:
    path = f"/v1/plans/{plan.id}/trace"
    answer = service.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.text == chrome_trace(simulate(plan))
    known = {"If-None-Match": answer.headers["ETag"]}
    assert service.http.get(path, headers=known).status_code == 304
    assert service.http.get(f"/v1/plans/{'0' * 64}/trace").status_code == 404
    with Client(service.url, cache=False) as client:
        assert client.trace(plan.id) == client.trace(plan) == answer.text


def test_operators_are_covered(service: Any, digest: str) -> None:
    whole = service.http.post("/v1/operators:coverage", json={"graph_sha256": digest})
    names = {use["operator"] for use in whole.json()["operators"]}
    assert "aten.relu.default" in names
    odd = {"graph_sha256": digest, "mesh": {"shape": [13]}}
    on_13 = service.http.post("/v1/operators:coverage", json=odd).json()["operators"]
    assert sum(u["num_whole"] for u in on_13) > sum(
        u["num_whole"] for u in whole.json()["operators"]
    )


def test_plans_are_listed_in_pages(service: Any, digest: str, plan: Plan) -> None:
    others = [ask(service, digest, wait=60, mesh={"shape": shape}) for shape in ([2], [4])]
    assert [answer.status_code for answer in others] == [200, 200]
    seen: list[str] = []
    token = ""
    while True:
        params = {"page_size": 2, "page_token": token}
        page = service.http.get("/v1/plans", params=params).json()
        assert len(page["plans"]) <= 2
        seen += [entry["id"] for entry in page["plans"]]
        token = page["next_page_token"]
        if not token:
            break
    assert plan.id in seen
    assert len(set(seen)) == len(seen) > 2
    mine = service.http.get("/v1/plans", params={"graph_digest": plan.graph.digest}).json()
    assert {entry["graph_digest"] for entry in mine["plans"]} == {plan.graph.digest}
    wrong = service.http.get("/v1/plans", params={"page_token": "x"})
    assert wrong.status_code == 422
    assert wrong.json()["errors"][0]["pointer"] == "/query/page_token"
    for key in ("\ud800", "\0", "", "x" * 8):
        forged = urlsafe_b64encode(json.dumps([1.0, key]).encode()).decode()
        for path in ("/v1/plans", "/v1/jobs"):
            assert service.http.get(path, params={"page_token": forged}).status_code == 422


def test_topologies_are_there_to_start_from(service: Any, digest: str) -> None:
    topology = service.http.get("/v1/topologies/h100-sxm").json()
    body = {"graph_sha256": digest, "num_devices": 2, "topology": topology}
    answer = service.http.post("/v1/searches", json=body, headers={"Prefer": "wait=60"})
    assert answer.status_code == 200
    assert service.http.get("/v1/topologies/abacus").status_code == 404
