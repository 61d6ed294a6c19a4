"""The stores of the service's database except jobs, on SQLite and PostgreSQL."""

import hashlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text

from autoshard_server import Settings
from autoshard_server.callers import Caller, Scope
from autoshard_server.problems import ServerError
from autoshard_server.projects import is_project_name, split_namespace, stored_namespace
from autoshard_server.store.api_keys import ApiKeyStore
from autoshard_server.store.artifacts import PLANS, GraphStore, PlanIndex
from autoshard_server.store.audit import AuditAction, AuditLog
from autoshard_server.store.caches import open_cache
from autoshard_server.store.idempotency import IdempotencyRecord, IdempotencyStore
from autoshard_server.store.topologies import TopologyStore
from autoshard_solver_cache import SolverCache

ME = Caller("me", frozenset({Scope.PLAN}))


def test_topologies_are_replaced_under_their_names(engine: Engine) -> None:
    store = TopologyStore(engine)
    with ThreadPoolExecutor(6) as pool:
        put = list(pool.map(lambda i: store.put("p", "a", f"{i}", max_stored=9), range(12)))
    assert sum(is_new for _, is_new in put) == 1
    assert len({info.created_at for info, _ in put}) == 1
    document = store.get("p", "a")
    assert document is not None
    (listed,) = store.list("p")
    assert listed in [entry for entry, _ in put]
    assert listed.sha256 == hashlib.sha256(document.encode()).hexdigest()
    for name in ("b", "B"):
        store.put("p", name, "{}", max_stored=3)
    assert [info.name for info in store.list("p")] == ["B", "a", "b"]
    with pytest.raises(ServerError, match=r"3 topologies are stored.*AUTOSHARD_MAX_TOPOLOGIES"):
        store.put("p", "c", "{}", max_stored=3)
    assert not store.put("p", "b", "[]", max_stored=3)[1]
    assert store.get("p", "c") is None
    assert store.get("p", "a\x00") is None
    assert (store.delete("p", "b"), store.delete("p", "b")) == (True, False)


def test_an_idempotency_key_stands_for_the_first_request(engine: Engine) -> None:
    keys = IdempotencyStore(engine)
    assert keys.find(ME, "k") is None
    bodies = [letter * 64 for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda body: keys.reserve(ME, "k", body), bodies))
    assert len({record.body_sha256 for record in got}) == 1
    first = got[0]
    assert first.job_id is None
    keys.set_job(ME, "k", "z" * 64, "another body's")
    assert keys.find(ME, "k") == first
    for job in ("1", "2"):
        keys.set_job(ME, "k", first.body_sha256, job)
    assert keys.find(ME, "k") == keys.reserve(ME, "k", "c" * 64)
    assert keys.reserve(ME, "k", "c" * 64) == IdempotencyRecord(first.body_sha256, "1")
    assert keys.find(Caller("you", ME.scopes), "k") is None
    assert keys.find(ME, "K" * 10_000) is None
    assert keys.purge() == 0


def test_an_idempotency_key_is_forgotten_in_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = IdempotencyStore(engine, lifetime=60)
    keys.reserve(ME, "k", "b" * 64)
    keys.set_job(ME, "k", "b" * 64, "1")
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert keys.find(ME, "k") is None
    assert keys.reserve(ME, "k", "c" * 64) == IdempotencyRecord("c" * 64)
    keys.reserve(ME, "l", "c" * 64)
    monkeypatch.setattr(time, "time", lambda: later + 61)
    assert keys.purge() == 2


def test_a_key_shows_who_it_is_until_it_is_revoked(engine: Engine) -> None:
    keys = ApiKeyStore(engine)
    made, token = keys.create("me", ["plan", "read"])
    assert keys.authenticate(token) == made
    assert made.scopes == {"plan", "read"}
    for wrong in (
        "",
        "x",
        token + "x",
        token[:-1],
        token.replace("autoshard", "other"),
        "_" + token,
    ):
        assert keys.authenticate(wrong) is None
    assert keys.revoke(made.id)
    assert not keys.revoke(made.id)
    assert keys.authenticate(token) is None
    assert [key.id for key in keys.list()] == [made.id]
    with engine.begin() as connection:
        row = connection.execute(text("SELECT * FROM api_keys")).one()
    assert token.split("_", 2)[2] not in str(row)


def test_a_key_that_is_rotated_counts_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeyStore(engine)
    old, old_token = keys.create("me", ["plan"])
    rotated = keys.rotate(old.id, grace=60)
    assert rotated is not None
    new, new_token = rotated
    assert (new.name, new.scopes) == (old.name, old.scopes)
    assert keys.authenticate(old_token) is not None
    assert keys.authenticate(new_token) == new
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert keys.authenticate(old_token) is None
    assert keys.authenticate(new_token) == new
    assert keys.rotate(old.id, grace=60) is None
    assert keys.rotate("nobody", grace=60) is None


def test_a_key_that_is_rotated_lives_no_longer_for_it(engine: Engine) -> None:
    keys = ApiKeyStore(engine)
    end = time.time() + 3600
    old, _ = keys.create("me", ["plan"], expires_at=end)
    rotated = keys.rotate(old.id, grace=60)
    assert rotated is not None
    assert rotated[0].expires_at == end
    assert {key.id: key.expires_at for key in keys.list()}[rotated[0].id] == end


def test_graphs_are_kept_by_their_digests(engine: Engine) -> None:
    cache = SolverCache(engine)
    graphs = GraphStore(cache)
    info, is_new = graphs.put("default", b"graph")
    assert is_new
    assert (graphs.put("default", b"graph"), graphs.info("default", info.key)) == (
        (info, False),
        info,
    )
    assert info.size == 5
    assert graphs.get("default", info.key) == b"graph"
    # Something else under the digest, intact by the cache's own measure.
    cache.delete("graphs", info.key)
    cache.put("graphs", info.key, b"other")
    assert graphs.get("default", info.key) is None
    assert graphs.put("default", b"graph")[1]
    assert cache.delete("graphs", info.key)
    assert graphs.info("default", info.key) is None


def plan_document(number: int, digest: str = "d") -> bytes:
    document: dict[str, Any] = {
        "certificate": {"status": "optimal", "objective": 1.5, "bound": 1.0, "gap": number / 9},
        "graph": {"digest": digest, "num_nodes": 3, "num_parameters": 1 << 40},
        "memory": {"peak": 1 << 40},
        "mesh": {"axes": [{"name": "dp", "size": 2}], "topology": {"name": "t"}},
        "options": {"mode": "training"},
    }
    return json.dumps(document).encode()


def test_plans_are_listed_from_new_to_old_without_opening_them(engine: Engine) -> None:
    cache = SolverCache(engine)
    index = PlanIndex(engine, cache)
    names = [f"plan {i}" for i in range(7)]
    for i, name in enumerate(names):
        cache.put(PLANS, name, plan_document(i, "ab"[i % 2]))
        index.add("default", name, plan_document(i, "ab"[i % 2]))
        index.add("default", name, plan_document(i))
    (first,), _ = index.page("default", limit=1)
    assert (first.mesh, first.peak_memory, first.mode) == ((("dp", 2),), 1 << 40, "training")
    assert first.size == len(plan_document(6))
    # What the cache has dropped is not listed, and leaves no gap in a page.
    for gone in ("plan 2", "plan 4"):
        cache.delete(PLANS, gone)
    page, after = index.page("default", limit=2)
    pages = [[plan.id for plan in page]]
    while after is not None:
        page, after = index.page("default", after=after, limit=2)
        pages.append([plan.id for plan in page])
    assert pages == [["plan 6", "plan 5"], ["plan 3", "plan 1"], ["plan 0"]]
    assert [plan.id for plan in index.page("default", graph_digest="b")[0]] == [
        "plan 5",
        "plan 3",
        "plan 1",
    ]
    cache.put(PLANS, "imported", plan_document(8))
    assert index.refresh() == 1
    assert index.refresh() == 0
    assert index.page("default", limit=1)[0][0].id == "imported"


def test_a_plan_that_cannot_be_listed_hides_no_other(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    cache = SolverCache(engine)
    index = PlanIndex(engine, cache)
    large = json.loads(plan_document(1))
    large["graph"]["num_parameters"] = large["memory"]["peak"] = 1 << 70
    odd = json.loads(plan_document(2))
    odd["graph"]["num_nodes"] = 1 << 70
    bad = {"a": b"no JSON", "b": b"[]", "c": b"{}", "d": json.dumps(odd).encode()}
    good = {"e": json.dumps(large).encode(), "f": plan_document(3)}
    for key, document in (bad | good).items():
        cache.put(PLANS, key, document)
    while index.refresh():
        pass
    assert {plan.id for plan in index.page("default")[0]} == set(good)
    assert {plan.num_parameters for plan in index.page("default")[0]} == {(1 << 63) - 1, 1 << 40}
    assert len(caplog.records) == len(bad)
    # Nor does it hold up who has made it; put anew, it is looked at anew, as by another release.
    index.add("default", "g", b"no JSON")
    cache.delete(PLANS, "a")
    assert index.refresh() == 0
    with engine.begin() as connection:
        connection.execute(text("UPDATE unindexed_plans SET tried_by = '0.0.1' WHERE id = 'b'"))
    assert (index.refresh(), index.refresh()) == (1, 0)
    cache.put(PLANS, "a", plan_document(4))
    assert index.refresh() == 1


def test_a_cache_in_postgresql_keeps_bytes_intact(postgres: Any) -> None:
    url = postgres.create_database()
    cache = SolverCache(url, max_bytes=3500)
    noise = [bytes((i * 31 + j * j * 17 + j // 7) % 251 for j in range(1000)) for i in range(3)]
    assert cache.put("plans", "0", noise[0])
    assert not cache.put("plans", "0", b"other")
    assert cache.get("plans", "0") == noise[0]
    assert [entry.key for entry in cache.entries("plans")] == ["0"]
    with cache._engine.begin() as connection:
        connection.execute(text("UPDATE cache_entries SET sha256 = repeat('0', 64)"))
    assert cache.get("plans", "0") is None
    assert cache.stats("plans").corrupted == 1
    assert cache.put("plans", "0", noise[0])
    assert cache.evict(max_bytes=10) == 1
    cache.put("plans", "1", noise[1])
    assert cache.evict(max_age=60) == 0
    assert cache.evict(max_age=-60) == 1
    cache.close()


def test_many_that_open_an_empty_database_at_once_make_its_tables_once(postgres: Any) -> None:
    url = postgres.create_database()
    with ThreadPoolExecutor(6) as pool:
        caches = list(pool.map(SolverCache, [url] * 6))
    assert sum(cache.put("plans", "k", b"body") for cache in caches) == 1
    for cache in caches:
        cache.close()


def test_a_project_that_stores_much_evicts_only_its_own(engine: Engine) -> None:
    cache = open_cache(engine, Settings(store_url="sqlite://", cache_max_bytes=100_000))
    graphs = GraphStore(cache)
    small, _ = graphs.put("modest", random.Random(0).randbytes(20_000))
    for i in range(1, 21):
        graphs.put("greedy", random.Random(i).randbytes(20_000))
    assert graphs.info("modest", small.key) is not None
    usage = cache.usage()
    assert usage["modest_graphs"].num_entries == 1
    assert sum(used.nbytes for used in usage.values()) <= 100_000
    # A budget for each project applies also if all together have enough.
    limited = Settings(store_url="sqlite://", project_max_bytes=50_000)
    open_cache(engine, limited).enforce_budget()
    assert cache.usage()["greedy_graphs"].nbytes <= 50_000
    assert graphs.info("modest", small.key) is not None


def test_the_audit_log_is_deleted_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = AuditLog(engine)
    for _ in range(3):
        audit.add(ME, AuditAction.DELETE, "/v1/plans/1", {"request_id": "r"})
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    audit.add(ME, AuditAction.CREATE, "/v1/graphs/2")
    (newest, *_), after = audit.page("default", limit=1)
    assert (newest.caller, newest.action, newest.request_id) == ("me", AuditAction.CREATE, None)
    assert [event.request_id for event in audit.page("default", after=after)[0]] == ["r"] * 3
    assert audit.page("other") == ([], None)
    assert audit.purge(30) == 3
    assert len(audit.page("default")[0]) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((good, True) for good in ("default", "a", "vision-2", "7", "a" * 32)),
        *((bad, False) for bad in ("", "A", "a_b", "-a", "a-", "a" * 33, "a/b", "a\n", "é")),
    ],
)
def test_names_of_projects(name: str, expected: bool) -> None:
    assert is_project_name(name) is expected


@pytest.mark.parametrize("project", ["default", "red", "plans", "vision-2"])
def test_namespaces_of_projects_are_different(project: str) -> None:
    assert split_namespace(stored_namespace(project, "plans")) == (project, "plans")
