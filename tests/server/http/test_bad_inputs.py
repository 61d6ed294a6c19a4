"""Invalid requests: the response is a problem document that names the error."""

import json
import socket
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard_server.http.examples import PATH_EXAMPLES
from autoshard_server.problems import PROBLEM_MEDIA_TYPE, TYPE_PREFIX

SPECIFICATION = Path(__file__).parents[3] / "openapi" / "openapi.json"
MESH = {"mesh": {"shape": [2, 2]}}


@pytest.fixture(autouse=True)
def _service_stays_up(service: Any, graph: bytes) -> Iterator[None]:
    yield
    assert service.is_up()
    assert service.post(graph, wait=60).status_code == 200


def expect_problem(response: Any, status: int, slug: str, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    problem: dict[str, Any] = response.json()
    assert problem["type"] == TYPE_PREFIX + slug
    assert problem["status"] == status
    assert problem["title"]
    for word in words:
        assert word in problem["detail"], problem["detail"]
    return problem


def archive(model: bytes, compression: int = ZIP_STORED) -> bytes:
    buffer = BytesIO()
    with ZipFile(buffer, "w", compression) as file:
        file.writestr("m/models/model.json", model)
    return buffer.getvalue()


@pytest.mark.parametrize("body", [b"", b"no zip at all", b"PK\x03\x04", bytes(100)])
def test_what_is_no_archive(service: Any, body: bytes) -> None:
    expect_problem(service.post(body), 400, "archive", ".pt2")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_truncated_archive(service: Any, graph: bytes, keep: float) -> None:
    expect_problem(service.post(graph[: int(len(graph) * keep)]), 400, "archive")


def test_an_archive_without_a_model(service: Any) -> None:
    buffer = BytesIO()
    with ZipFile(buffer, "w") as file:
        file.writestr("something/else.txt", "hello")
    expect_problem(service.post(buffer.getvalue()), 400, "archive", "model.json")


def test_a_zip_bomb(service: Any) -> None:
    bomb = archive(b" " * (64 << 20), ZIP_DEFLATED)
    assert len(bomb) < 100_000
    expect_problem(service.post(bomb), 400, "archive", "zip bomb")


@pytest.mark.parametrize(
    "document", [b"{}", b"[1]", b'{"graph_module": 3}', b'{"a": ', b"[" * 100_000, b'{"\xff": 1}']
)
def test_json_of_another_schema(service: Any, document: bytes) -> None:
    expect_problem(service.post(archive(document)), 422, "program")


@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(position=st.integers(0, 10**6), junk=st.binary(min_size=1, max_size=8))
def test_a_damaged_archive_is_refused_or_planned(
    service: Any, graph: bytes, position: int, junk: bytes
) -> None:
    at = position % len(graph)
    response = service.post(graph[:at] + junk + graph[at + len(junk) :])
    assert response.status_code in {200, 202, 400, 422}, response.text


def test_a_graph_without_parameters_has_nothing_to_train(
    service: Any, graph_without_parameters: bytes
) -> None:
    response = service.post(graph_without_parameters, wait=60)
    expect_problem(response, 422, "graph", "parameter")
    inference = {**MESH, "options": {"mode": "inference"}}
    assert service.post(graph_without_parameters, inference, wait=60).status_code == 200


@pytest.mark.parametrize(
    ("mesh", "word"),
    [
        ({"shape": []}, "empty"),
        ({"shape": [0, 2]}, "size 0"),
        ({"shape": [-2]}, "size -2"),
        ({"shape": [2, 2], "axes": ["a"]}, "axis names"),
        ({"shape": [2, 2], "axes": ["a", "a"]}, "'a'"),
        ({"shape": [2], "topology": "abacus"}, "abacus"),
        ({"shape": [2], "backend": "pigeon"}, "pigeon"),
        ({"shape": [2], "intra_bandwidth": -1.0}, "-1"),
        ({"shape": [2], "intra_bandwidth": 0}, "0"),
        ({"shape": [2, 2], "intra_bandwidth": 1e9}, "inter_bandwidth"),
        ({"axes": [{"name": "a", "size": 2}], "topology": {"name": "x"}}, "mesh"),
    ],
)
def test_an_impossible_mesh(service: Any, graph: bytes, mesh: Any, word: str) -> None:
    expect_problem(service.post(graph, {"mesh": mesh}), 422, "mesh", word)


@pytest.mark.parametrize(
    ("request_", "pointer"),
    [
        ({}, "/mesh"),
        ({"mesh": {}}, "/mesh/shape"),
        ({"mesh": {"shape": ["two"]}}, "/mesh/shape/0"),
        ({"mesh": {"shape": [2.5]}}, "/mesh/shape/0"),
        ({"mesh": {"shape": [True]}}, "/mesh/shape/0"),
        ({"mesh": {"shape": [2], "color": "red"}}, "/mesh/color"),
        ({"mesh": {"shape": [2], "a/b~": 1}}, "/mesh/a~1b~0"),
        ({**MESH, "priority": 1}, "/priority"),
        ({**MESH, "options": {"mode": "guess"}}, "/options/mode"),
        ({**MESH, "options": {"memory": {"budget": 0}}}, "/options/memory/budget"),
        ({**MESH, "options": {"solver": {"time_limit": -1}}}, "/options/solver/time_limit"),
        ({**MESH, "options": {"colour": 1}}, "/options/colour"),
        ("[]", ""),
        ("not json", ""),
        ('{"mesh": {"shape": [2], "intra_bandwidth": NaN}}', "/mesh/intra_bandwidth"),
    ],
)
def test_a_request_that_is_not_valid(
    service: Any, graph: bytes, request_: Any, pointer: str
) -> None:
    problem = expect_problem(service.post(graph, request_), 422, "request")
    assert pointer in [error["pointer"] for error in problem["errors"]]


def test_more_time_than_the_service_allows(service: Any, graph: bytes) -> None:
    response = service.post(graph, {**MESH, "options": {"solver": {"time_limit": 1e6}}})
    expect_problem(response, 422, "options", "AUTOSHARD_MAX_TIME_LIMIT", "3600")


@pytest.mark.parametrize("limit", ["1e9", "Infinity", "NaN"])
def test_a_time_that_is_none(service: Any, graph: bytes, limit: str) -> None:
    request = f'{{"mesh": {{"shape": [2]}}, "options": {{"solver": {{"time_limit": {limit}}}}}}}'
    problem = expect_problem(service.post(graph, request), 422, "request")
    assert "/options/solver/time_limit" in [error["pointer"] for error in problem["errors"]]


def test_a_solver_that_the_service_does_not_allow(service: Any, graph: bytes) -> None:
    response = service.post(graph, {**MESH, "options": {"solver": {"name": "GUROBI"}}})
    named = ("'GUROBI'", "autoshard and ilp", "AUTOSHARD_SOLVERS")
    expect_problem(response, 422, "options", *named)
    plain = service.post(graph, {**MESH, "options": {"solver": {"name": "ilp"}}}, wait=60)
    assert plain.status_code == 200
    assert plain.json()["options"]["solver"]["name"] == "ilp"


def test_an_optimizer_that_is_not_known(service: Any, graph: bytes) -> None:
    response = service.post(graph, {**MESH, "options": {"training": {"optimizer": "newton"}}})
    expect_problem(response, 422, "request", "adafactor")


def test_a_body_over_the_limit(service: Any) -> None:
    problem = expect_problem(service.post(bytes(2 << 20)), 413, "too-large", "1,048,576")
    assert problem["limit"] == 1 << 20


def test_a_body_over_the_limit_that_does_not_announce_its_length(service: Any) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="graph"; filename="g"\r\n\r\n'

    def chunks() -> Iterator[bytes]:
        yield head
        for _ in range(40):
            yield bytes(1 << 16)

    response = service.http.post(
        "/v1/plans",
        content=chunks(),
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    expect_problem(response, 413, "too-large")


def test_a_request_part_over_its_limit(start_service: Any, graph: bytes) -> None:
    strict = start_service(max_request_bytes=100)
    as_field = strict.post(graph, json.dumps(MESH) + " " * 200)
    expect_problem(as_field, 400, "multipart")
    files = {"graph": ("g", graph), "request": ("r.json", json.dumps(MESH) + " " * 200)}
    expect_problem(strict.http.post("/v1/plans", files=files), 413, "too-large", "request")


@pytest.mark.parametrize(
    "files",
    [
        {"graph": ("g", b"x")},
        {"request": (None, json.dumps(MESH))},
        {"graph": ("g", b"x"), "request": (None, "{}"), "more": (None, "x")},
        {"graph": (None, "text"), "request": (None, json.dumps(MESH))},
    ],
)
def test_a_form_with_other_parts(service: Any, files: Any) -> None:
    expect_problem(service.http.post("/v1/plans", files=files), 400, "multipart", "graph")


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=b"])
def test_a_form_that_cannot_be_read(service: Any, content_type: str) -> None:
    response = service.http.post(
        "/v1/plans", content=b"no form", headers={"Content-Type": content_type}
    )
    expect_problem(response, 400, "multipart")


def routes_with_bodies() -> list[tuple[str, str, list[str]]]:
    """Method, path and media types of each route of the specification that reads a body."""
    paths = json.loads(SPECIFICATION.read_text())["paths"]
    found = [
        (method, path.format_map(PATH_EXAMPLES), list(operation["requestBody"]["content"]))
        for path, methods in paths.items()
        for method, operation in methods.items()
        if "requestBody" in operation
    ]
    assert len(found) >= 8
    return found


@pytest.mark.parametrize(("method", "path", "accepted"), routes_with_bodies())
def test_another_media_type(service: Any, method: str, path: str, accepted: list[str]) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "json", "", None, "a, b"):
        # What has no type counts as bytes, which `curl -T` sends so.
        if not kind and "application/octet-stream" in accepted:
            continue
        headers = {} if kind is None else {"Content-Type": kind}
        response = service.http.request(method, path, content=b"{}", headers=headers)
        problem = expect_problem(response, 415, "media-type", *accepted)
        assert problem["accepted"] == accepted
        assert response.headers["Accept"] == ", ".join(accepted)


def test_a_request_sent_as_a_file_is_welcome(service: Any, graph: bytes) -> None:
    files = {"graph": ("g.pt2", graph), "request": ("r.json", json.dumps(MESH))}
    response = service.http.post("/v1/plans", files=files, headers={"Prefer": "wait=60"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "slug"),
    [
        ("GET", "/nope", 404, "not-found"),
        ("GET", f"/v1/plans/{'0' * 64}", 404, "not-found"),
        ("GET", "/v1/plans/short", 422, "request"),
        ("GET", f"/v1/jobs/{'0' * 32}", 404, "not-found"),
        ("POST", f"/v1/jobs/{'0' * 32}:cancel", 404, "not-found"),
        ("GET", "/v1/jobs/..%2f..", 404, "not-found"),
        ("DELETE", "/v1/plans", 405, "method-not-allowed"),
        ("PUT", "/v1/plans", 405, "method-not-allowed"),
    ],
)
def test_what_is_not_there(service: Any, method: str, path: str, status: int, slug: str) -> None:
    response = service.http.request(method, path)
    expect_problem(response, status, slug)
    assert (status == 405) == ("allow" in response.headers)


def test_a_caller_that_goes_away_in_the_middle(service: Any) -> None:
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        )
    assert service.is_up()


@pytest.mark.thorough
def test_a_bug_is_answered_as_a_problem_without_its_inside(
    service: Any, graph: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("secret inside")

    with monkeypatch.context() as patch:
        patch.setattr("autoshard_server.service.Service.plan", fail)
        response = service.post(graph)
    problem = expect_problem(response, 500, "internal")
    assert "secret" not in json.dumps(problem)
    assert len(response.headers["X-Request-ID"]) == 32


def listed(unit: str, number: int = 300_000) -> str:
    return "[" + ",".join([unit] * number) + "]"


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        (f'{{"mesh": {{"shape": {listed("1", 90_000)}}}}}', "request"),
        (f'{{"mesh": {{"shape": {listed("1", 7)}}}}}', "limit"),
        (f'{{"mesh": {{"shape": {listed("1")}}}}}', "limit"),
        (f'{{"mesh": {{"topology": {{}}, "axes": {listed("{}", 40_000)}}}}}', "limit"),
        (f'{{"mesh": {{"shape": [2], "axes": {listed(chr(34) * 2, 90_000)}}}}}', "request"),
        (
            f'{{"mesh": {{"shape": [2]}}, "options": {{"balance": {listed("0", 90_000)}}}}}',
            "request",
        ),
        (f'{{"mesh": {{"shape": [2]}}, "options": {{"cuts": {listed("{}", 40_000)}}}}}', "request"),
        ('{"mesh": {"shape": [1048573], "nodes": 2}}', "mesh"),
        ('{"mesh": {"shape": [1000000000, 1000000000], "nodes": 7}}', "limit"),
    ],
)
def test_long_lists_and_large_meshes_are_refused_before_they_are_made(
    service: Any, graph: bytes, text: str, slug: str
) -> None:
    problem = expect_problem(service.post(graph, text), 422, slug)
    assert len(json.dumps(problem)) < 2000


def test_many_errors_are_counted_and_not_listed(service: Any, graph: bytes) -> None:
    unknown = ", ".join(f'"x{number}": 1' for number in range(200))
    problem = expect_problem(service.post(graph, f"{{{unknown}}}"), 422, "request", "too many")
    assert problem["errors"] == [{"pointer": "", "detail": "201 errors, too many to list"}]
