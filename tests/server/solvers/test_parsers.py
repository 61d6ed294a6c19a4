"""Graphs and plans are read in processes of their own, whose time and memory are limited."""

import gzip
import hashlib
import json
import os
import signal
from typing import Any

import psutil
import pytest

from autoshard.graph import load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner import plan_id
from autoshard_server import Settings
from autoshard_server.problems import ProblemType, ServerError
from autoshard_server.service import Service
from autoshard_server.solvers.parsers import Parsers

STORE = {"store_url": "sqlite://"}


def put(service: Any, body: bytes, **headers: str) -> Any:
    coded = gzip.compress(body) if headers.get("Content-Encoding") == "gzip" else body
    path = f"/v1/graphs/{hashlib.sha256(body).hexdigest()}"
    return service.http.put(path, content=coded, headers=headers)


def deep(size: int) -> bytes:
    """A JSON object with an array of about so many bytes of empty objects."""
    return b'{"a": [' + b"{}," * (size // 3) + b"1]}"


def fork_server() -> psutil.Process:
    """That of this process without further modules, which those of configs have."""
    (found,) = (
        child
        for child in psutil.Process().children()
        if child.cmdline()[-1:] == ["autoshard_server.solvers.fork_server"]
    )
    return found


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ({"max_parse_bytes": 1 << 20}, "AUTOSHARD_MAX_PARSE_BYTES"),
        ({"max_parse_seconds": 1e-3}, "AUTOSHARD_MAX_PARSE_SECONDS"),
    ],
)
def test_a_parser_over_a_limit_is_stopped_and_replaced(
    graph: bytes, limit: dict[str, Any], name: str
) -> None:
    parsers = Parsers(Settings(**STORE, **limit))
    parsers.start()
    slow = deep(7 << 20)
    for _ in range(3):
        with pytest.raises(ServerError, match=name) as raised:
            parsers.run("describe_graph", {"rules": []}, slow)
        assert raised.value.kind is ProblemType.LIMIT
        assert raised.value.extensions["limit_name"] == name
    parsers.close()
    allowed = Parsers(Settings(**STORE))
    assert json.loads(allowed.run("describe_graph", {"rules": []}, graph))["num_nodes"] > 0
    allowed.close()


def test_a_parser_that_dies_is_replaced(graph: bytes) -> None:
    parsers = Parsers(Settings(**STORE, num_parsers=1))
    parsers.start()
    assert parsers.run("describe_graph", {"rules": []}, graph)
    os.kill(fork_server().pid, signal.SIGKILL)
    assert parsers.run("describe_graph", {"rules": []}, graph)
    parsers.close()


def test_the_service_never_reads_an_upload_itself(
    start_service: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start_service()

    def read(*_args: object, **_options: object) -> None:
        raise AssertionError("it was read in the process of the service")

    monkeypatch.setattr("autoshard.graph.archive.read.read_archive", read)
    monkeypatch.setattr("autoshard.graph.load.read_archive", read)
    graph = make_graph(80)
    assert put(service, graph).json()["num_nodes"] > 0
    made = service.post(graph, wait=60)
    assert made.status_code == 200, made.text
    monkeypatch.setattr("autoshard.plan.Plan.from_json", read)
    plan = made.json()["id"]
    assert service.http.get(f"/v1/plans/{plan}/export?to=csv").status_code == 200
    assert service.http.get(f"/v1/plans/{plan}/trace").status_code == 200
    pair = {"before": plan, "after": plan}
    assert service.http.post("/v1/plans:compare", json=pair).status_code == 200


def test_a_graph_is_read_once(
    start_service: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[str] = []
    parse = Service.parse

    async def counted(self: Service, project: str, task: Any, *given: Any) -> bytes:
        tasks.append(task)
        return await parse(self, project, task, *given)

    monkeypatch.setattr(Service, "parse", counted)
    service = start_service()
    graph = make_graph(96)
    digest = hashlib.sha256(graph).hexdigest()
    first, again = put(service, graph), put(service, graph)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["num_parameters"] == again.json()["num_parameters"] > 0
    found = set()
    for mesh in ([2], [4], [2, 2]):
        request = {"graph_sha256": digest, "mesh": {"shape": mesh}}
        made = service.http.post("/v1/plans", json=request, headers={"Prefer": "wait=60"})
        assert made.status_code == 200, made.text
        options = PlanOptions(**made.json()["options"])
        assert made.json()["id"] == plan_id(load_graph(graph), make_mesh(mesh), options)
        found.add(made.json()["id"])
    assert (len(found), tasks) == (3, ["describe_graph"])


def test_many_values_and_high_ratios_are_refused_by_name(start_service: Any) -> None:
    service = start_service(
        max_model_values=100_000, max_compression_ratio=100, max_bodies_bytes=7 << 19
    )
    many = put(service, deep(3 << 20))
    assert (many.status_code, many.json()["limit"]) == (400, 100_000), many.text
    assert many.json()["limit_name"] == "AUTOSHARD_MAX_MODEL_VALUES"
    bomb = put(service, deep(3 << 20), **{"Content-Encoding": "gzip"})
    assert (bomb.status_code, bomb.json()["limit"]) == (413, 100), bomb.text
    assert bomb.json()["limit_name"] == "AUTOSHARD_MAX_COMPRESSION_RATIO"
    # Below a ratio of 100 nothing hinders many repetitions of few bytes.
    small = put(service, deep(1 << 19), **{"Content-Encoding": "gzip"})
    assert small.json()["limit_name"] == "AUTOSHARD_MAX_MODEL_VALUES"
    large = put(service, deep(4 << 20))
    assert (large.status_code, large.headers["Retry-After"]) == (503, "2")
    assert "AUTOSHARD_MAX_BODIES_BYTES" in large.json()["detail"]
    # What has been refused no longer counts.
    assert put(service, deep(3 << 20)).status_code == 400
