"""API keys: authentication, scopes, and services that require keys."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.errors import InputError
from autoshard_server.http.auth import is_loopback
from autoshard_server.store.api_keys import ApiKeyStore


def keys(store: str, *arguments: str, status: int = 0) -> str:
    """What `autoshard keys` prints."""
    ended = CliRunner().invoke(app, ["keys", *arguments, "--store", store])
    assert ended.exit_code == status, ended.output
    return ended.output


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite3'}"


def uses(store: str) -> dict[str, str]:
    """The last use of each key, as it is listed."""
    found = json.loads(keys(store, "list", "--format", "json"))
    return {row["id"]: row["last_used"] for row in found["keys"]}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def make(store: str, name: str, *scopes: str) -> tuple[str, str]:
    """Id and token of a new key."""
    flags = [flag for scope in scopes for flag in ("--scope", scope)]
    first, token = keys(store, "create", name, *flags).split("\n")[:2]
    return first.split()[1].rstrip(":"), token


def test_a_key_allows_what_its_scopes_say(start_service: Any, store: str) -> None:
    tokens = {scope: make(store, scope, scope)[1] for scope in ("read", "plan", "metrics", "admin")}
    service = start_service(store_url=store, auth="required", num_workers=0)
    for path in ("/livez", "/readyz", "/version"):
        assert service.http.get(path).status_code == 200
    seen = {}
    for scope, token in tokens.items():
        asked = [
            service.http.get("/v1/plans", headers=bearer(token)),
            service.http.post(
                "/v1/plans:lookup",
                json={"graph_sha256": "0" * 64, "mesh": {"shape": [2]}},
                headers=bearer(token),
            ),
            service.http.put(f"/v1/graphs/{'0' * 64}", content=b"x", headers=bearer(token)),
            service.http.get("/metrics", headers=bearer(token)),
        ]
        seen[scope] = [answer.status_code for answer in asked]
    assert seen == {
        "read": [200, 404, 403, 403],
        "plan": [200, 404, 422, 403],
        "metrics": [403, 403, 403, 200],
        "admin": [200, 404, 422, 403],
    }


def test_without_a_key_that_counts(start_service: Any, store: str) -> None:
    service = start_service(store_url=store, auth="required", num_workers=0, max_body_bytes=10)
    for header in (None, "Bearer", "Bearer autoshard_00_x", "Basic eDp5", "Bearer é"):
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        answer = service.http.get("/v1/jobs", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["type"].endswith("#unauthenticated")
    # The bodies of strangers are not read.
    assert service.http.put(f"/v1/graphs/{'0' * 64}", content=bytes(1000)).status_code == 401


def test_keys_take_over_from_each_other(start_service: Any, store: str) -> None:
    old, first = make(store, "ann")
    service = start_service(store_url=store, auth="required", num_workers=0)
    said, second = keys(store, "rotate", old).split("\n")[:2]
    new = said.split()[1]
    for token in (first, second):
        assert service.http.get("/v1/jobs", headers=bearer(token)).status_code == 200
    assert "revoke one" in keys(store, "create", "ann", status=1)
    keys(store, "revoke", old)
    assert "no active key" in keys(store, "revoke", old, status=1)
    listed = keys(store, "list")
    assert "revoked" in listed
    assert first not in listed
    assert uses(store) == {old: "never", new: "never"}
    time.sleep(2.1)
    assert service.http.get("/v1/jobs", headers=bearer(first)).status_code == 401
    assert service.http.get("/v1/jobs", headers=bearer(second)).status_code == 200
    service.app.state.service.close()
    assert all(used.startswith(f"{datetime.now(UTC):%Y-}") for used in uses(store).values())


def test_two_at_once_cannot_make_three_keys_of_a_name(engine: Engine) -> None:
    store = ApiKeyStore(engine)

    def make(_number: int) -> bool:
        try:
            return bool(store.create("ann", ["plan"]))
        except InputError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(make, range(8))) == 2
    # Another project has its own, and an expired key counts no more.
    store.create("ann", ["plan"], project="other", expires_at=time.time() - 1)
    assert [key.project for key in store.list()].count("other") == 1


def test_the_last_use_of_a_key_never_goes_back(engine: Engine) -> None:
    store, other = ApiKeyStore(engine), ApiKeyStore(engine)
    key, token = store.create("ann", ["plan"])
    unused, _ = store.create("ann", ["plan"])
    assert other.authenticate(token) is not None
    time.sleep(0.01)
    assert store.authenticate(token) is not None
    assert store.authenticate(f"autoshard_{unused.id}_guessed") is None
    found = []
    for one in (store, other):
        one.write_uses()
        found.append({k.id: k.last_used_at for k in store.list()})
    assert found[0] == found[1]
    assert found[0][unused.id] is None
    assert (found[0][key.id] or 0) > key.created_at


def test_secrets_are_nowhere_in_the_store(store: str, tmp_path: Path) -> None:
    _, token = make(store, "ann")
    secret = token.split("_", 2)[2].encode()
    for file in tmp_path.iterdir():
        assert secret not in file.read_bytes()


def test_a_caller_can_have_so_many_jobs(start_service: Any, store: str, make_graph: Any) -> None:
    tokens = [make(store, name)[1] for name in ("ann", "bob")]
    service = start_service(store_url=store, auth="required", num_workers=0, max_caller_jobs=2)
    service.http.headers.update(bearer(tokens[0]))
    assert [service.post(make_graph(w)).status_code for w in (8, 16, 24)] == [202, 202, 429]
    # What is under way already is nobody's new job.
    assert service.post(make_graph(8)).status_code == 202
    busy = service.post(make_graph(24))
    assert busy.headers["Retry-After"]
    assert busy.json()["limit"] == 2
    assert busy.json()["limit_name"] == "AUTOSHARD_MAX_CALLER_JOBS"
    service.http.headers.update(bearer(tokens[1]))
    assert service.post(make_graph(24)).status_code == 202
    listed = []
    for token in (*tokens, make(store, "root", "admin")[1]):
        service.http.headers.update(bearer(token))
        listed.append(len(service.http.get("/v1/jobs").json()["jobs"]))
    assert listed == [2, 1, 3]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("box", False)],
)
def test_which_addresses_are_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000", "Origin": "http://127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "rebound.example"}, 403),
        ({"Host": "127.0.0.1.rebound.example:8000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_ask(
    service: Any, headers: dict[str, str], status: int
) -> None:
    answer = service.http.get("/v1/jobs", headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["type"].endswith("#forbidden")
        assert "--auth" in answer.json()["detail"]


def test_pages_of_allowed_origins_can_ask(start_service: Any) -> None:
    origin = "https://ml.example.com"
    service = start_service(cors_origins=f"{origin}, https://other.example", num_workers=0)
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, prefer"
    allowed = service.http.options("/v1/plans", headers=asked)
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, origin)
    answer = service.http.get("/v1/jobs", headers={"Origin": origin})
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, origin)
    assert "Location" in answer.headers["Access-Control-Expose-Headers"]
    evil = service.http.get("/v1/jobs", headers={"Origin": "https://evil.example"})
    assert (evil.status_code, "Access-Control-Allow-Origin" in evil.headers) == (403, False)


def test_whoever_wants_no_keys_is_asked_for_nothing(start_service: Any) -> None:
    service = start_service(auth="off", num_workers=0)
    assert service.http.get("/v1/jobs", headers={"Host": "planner.example"}).status_code == 200


def test_it_does_not_start_where_nobody_could_ask(store: str) -> None:
    command = [sys.executable, "-m", "autoshard_server", "--host", "0.0.0.0", "--port", "0"]  # noqa: S104
    ended = subprocess.run(  # noqa: S603  ours
        [*command, "--store-url", store], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 3
    assert "autoshard keys create" in ended.stderr
    assert "--no-auth" in ended.stderr
