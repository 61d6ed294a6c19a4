"""Looking up the plan of an earlier request, without sending the graph."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.client import Client
from autoshard.errors import RequestRejectedError
from autoshard.plan import Plan


@pytest.fixture(scope="module")
def graph(make_graph: Any) -> bytes:
    """A graph that no other module has asked the shared service about."""
    made: bytes = make_graph(40)
    return made


def lookup(service: Any, graph: bytes, **fields: Any) -> Any:
    digest = hashlib.sha256(graph).hexdigest()
    body = {"graph_sha256": digest, "mesh": {"shape": [2, 2]}, **fields}
    return service.http.post("/v1/plans:lookup", json=body)


def test_a_plan_is_found_by_the_digest_of_its_graph(service: Any, graph: bytes) -> None:
    before = lookup(service, graph)
    assert before.status_code == 404
    assert before.json()["type"].endswith("#not-found")
    made = Plan.from_json(service.post(graph, wait=60).content)
    found = lookup(service, graph)
    assert found.status_code == 200
    assert found.json() == {"id": made.id}
    where = found.headers["Content-Location"]
    assert Plan.from_json(service.http.get(where).content) == made


@pytest.mark.parametrize(
    "fields", [{"mesh": {"shape": [4]}}, {"options": {"mode": "inference"}}], ids=["mesh", "mode"]
)
def test_another_question_has_another_answer(
    service: Any, graph: bytes, fields: dict[str, Any]
) -> None:
    service.post(graph, wait=60)
    assert lookup(service, graph).status_code == 200
    assert lookup(service, graph, **fields).status_code == 404


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"graph_sha256": "abc"}, "request"),
        ({"mesh": None}, "request"),
        ({"extra": 1}, "request"),
        ({"mesh": {"shape": [0]}}, "mesh"),
        ({"options": {"solver": {"time_limit": 1e6}}}, "options"),
    ],
)
def test_what_is_wrong_is_named(
    service: Any, graph: bytes, fields: dict[str, Any], kind: str
) -> None:
    answer = lookup(service, graph, **fields)
    assert answer.status_code in {400, 422}
    assert answer.json()["type"].endswith(f"#{kind}")


def test_the_body_is_json_of_bounded_length(start_service: Any) -> None:
    service = start_service(max_request_bytes=1000)
    as_text = service.http.post("/v1/plans:lookup", content=b"{}")
    assert as_text.status_code == 415
    long = json.dumps({"graph_sha256": "0" * 2000})
    headers = {"content-type": "application/json"}
    too_long = service.http.post("/v1/plans:lookup", content=long, headers=headers)
    assert too_long.status_code == 413
    assert too_long.json()["limit"] == 1000
    assert too_long.json()["limit_name"] == "AUTOSHARD_MAX_REQUEST_BYTES"


def test_a_client_sends_a_graph_once(start_service: Any, graph: bytes, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    with Client(start_service(store_url=url).url) as client:
        first = client.request_plan(graph, mesh=(2, 2))
    small = start_service(store_url=url, max_body_bytes=2000, num_workers=0)
    with Client(small.url) as client:
        again = client.request_plan(graph, mesh=(2, 2))
        assert again.cached
        assert again.plan == first.plan
        assert client.request_plan(graph, mesh=(2, 2)).plan is again.plan
        with pytest.raises(RequestRejectedError, match="limit of 2,000 bytes"):
            client.request_plan(graph, mesh=(4,))


def test_a_plan_that_was_dropped_is_made_again(start_service: Any, graph: bytes) -> None:
    service = start_service(memory_cache_bytes=0)
    with Client(service.url) as client:
        first = client.request_plan(graph, mesh=(2, 2))
    assert first.plan is not None
    service.app.state.service.cache.delete("plans", first.plan.id)
    with Client(service.url) as client:
        again = client.request_plan(graph, mesh=(2, 2))
    assert not again.cached
    assert again.plan is not None
    assert again.plan.id == first.plan.id
