"""Migrations of the service's database, from every release and on both databases."""

import hashlib
import json
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, inspect, text
from support.worker_threads import running_workers

from autoshard.mesh import mesh_from_json
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import plan_id
from autoshard.requests.running import load_request_graph
from autoshard_server import ProcessExecutor, Settings
from autoshard_server.callers import Caller
from autoshard_server.problems import TYPE_PREFIX
from autoshard_server.store.artifacts import PLANS
from autoshard_server.store.database import (
    Stores,
    _config,
    check_schema,
    migrate,
    min_compatible,
    newest_revision,
)
from autoshard_server.store.idempotency import IdempotencyRecord, IdempotencyStore
from autoshard_server.store.job_store import JobStore
from autoshard_server.store.jobs import JobState
from autoshard_server.store.tables import metadata
from autoshard_server.store.topologies import TopologyStore
from autoshard_solver_cache import StoreUnavailableError
from autoshard_solver_cache.tables import metadata as cache_metadata

OLD = Path(__file__).parents[1] / "data" / "store-0.1.0.db"
OLD_PLAN = "bdc4747b5666bc1c0c879efd0e8959085839a127f7daa07990c6a1abc616e062"
OLD_RUNNING = "0ab81128c68041cc989a51903f496983"

OpenEngine = Callable[[], Engine]


def is_current(engine: Engine) -> bool:
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_heads() == (newest_revision(),)


def upgrade(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def migrate_as_newer(engine: Engine, needed: str) -> None:
    """Migrate a database as a newer release with one more migration does."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs ADD COLUMN colour VARCHAR(8)"))
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        values = {"needed": needed}
        connection.execute(
            text("UPDATE compatibility SET release = '99.1', min_compatible = :needed"), values
        )


def described(engine: Engine) -> dict[str, dict[str, Any]]:
    """Tables with their columns, except the one of migrations."""
    found = inspect(engine)
    return {
        table: {
            "key": found.get_pk_constraint(table)["constrained_columns"],
            **{column["name"]: column for column in found.get_columns(table)},
        }
        for table in found.get_table_names()
    }


def test_migrations_lead_to_the_tables_of_the_code(open_one: OpenEngine) -> None:
    engine = open_one()
    assert not is_current(engine)
    migrate(engine)
    assert is_current(engine)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, [metadata, cache_metadata]) == []


def test_many_that_start_at_once_migrate_once(open_one: OpenEngine) -> None:
    engines = [open_one() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(migrate, engines))
    assert all(map(is_current, engines))


def test_a_database_of_a_newer_release_is_used_if_it_allows_that(
    open_one: OpenEngine, engine: Engine
) -> None:
    check_schema(engine)
    migrate_as_newer(engine, newest_revision())
    other = open_one()
    for opened in (engine, other):
        migrate(opened)
        check_schema(opened)
    jobs = JobStore(other, lease=30, max_attempts=2)
    jobs.submit("p", "{}", b"", max_queued=9)
    claim = jobs.claim("me")
    assert claim is not None
    assert jobs.succeed(claim, b"{}")


def test_a_database_of_a_newer_release_is_refused_if_it_needs_that_one(
    open_one: OpenEngine, engine: Engine
) -> None:
    migrate_as_newer(engine, "9998")
    message = f"9999 of autoshard 99.1, which needs migration 9998.*up to {newest_revision()}"
    for attempt in (migrate, check_schema):
        with pytest.raises(StoreUnavailableError, match=message):
            attempt(open_one())


def test_a_database_of_another_program_is_refused(open_one: OpenEngine) -> None:
    engine = open_one()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('1a2b3c')"))
    with pytest.raises(StoreUnavailableError, match="1a2b3c of a newer release"):
        migrate(engine)


def test_a_database_that_was_replaced_by_an_older_one_is_not_ready(open_one: OpenEngine) -> None:
    engine = open_one()
    upgrade(engine, "0002")
    with pytest.raises(StoreUnavailableError, match="lacks migrations"):
        check_schema(engine)


def test_releases_before_work_on_the_tables_after_all_migrations(open_one: OpenEngine) -> None:
    """Migrations only add, or one of them raises `min_compatible`."""
    engine = open_one()
    upgrade(engine, min_compatible())
    before = described(engine)
    upgrade(engine, "head")
    after = described(engine)
    assert before.keys() <= after.keys()
    for table, columns in before.items():
        for name, column in columns.items():
            assert repr(after[table][name]) == repr(column), (table, name)
        for name in after[table].keys() - columns.keys():
            added = after[table][name]
            assert added["nullable"] or added["default"] is not None, (table, name)


def test_many_jobs_are_numbered_in_their_order(open_one: OpenEngine) -> None:
    engine, count = open_one(), 15_000
    upgrade(engine, "0001")
    with engine.begin() as connection:
        # Several of each second.
        columns = "id, plan_id, state, attempts, created_at, request"
        row = "(:id, :id, 'succeeded', 1, :at, '{}')"
        rows = [{"id": f"{i:032x}", "at": float(-(i // 3))} for i in range(count)]
        connection.execute(text(f"INSERT INTO jobs ({columns}) VALUES {row}"), rows)  # noqa: S608  ours
    migrate(engine)
    with engine.begin() as connection:
        found = connection.execute(text("SELECT number FROM jobs ORDER BY created_at, id"))
        assert list(found.scalars()) == list(range(1, count + 1))


def test_a_migration_that_fails_leaves_nothing_behind(open_one: OpenEngine) -> None:
    engine = open_one()
    # The second migration finds a table of the name that it wants.
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE api_keys (id INTEGER)"))
    with pytest.raises(Exception, match="api_keys"):
        migrate(engine)
    with engine.begin() as connection:
        assert MigrationContext.configure(connection).get_current_heads() == ()
        connection.execute(text("DROP TABLE api_keys"))
    migrate(engine)
    assert is_current(engine)


def test_a_database_of_the_first_release_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    shutil.copy(OLD, path)
    stores = Stores(Settings(store_url=f"sqlite:///{path}"))
    document = stores.cache.get(PLANS, OLD_PLAN)
    assert document is not None
    plan = json.loads(document)
    assert plan["id"] == OLD_PLAN
    assert stores.plans.page("default") == ([], None)
    assert stores.plans.refresh() == 1
    assert [(p.id, p.objective) for p in stores.plans.page("default")[0]] == [
        (OLD_PLAN, plan["costs"]["total"])
    ]
    assert [job.state for job in stores.jobs.page()[0]] == [JobState.RUNNING, JobState.SUCCEEDED]
    assert stores.jobs.result(stores.jobs.page()[0][1].id) == document
    # What ran when the old release ended is taken again, once its worker counts as dead.
    stores.jobs._leases._lease = 0.0
    assert stores.jobs.recover() == 1
    claim = stores.jobs.claim("me")
    assert claim is not None
    assert claim.id == OLD_RUNNING
    assert stores.jobs.release(claim)
    stores.close()


def test_jobs_of_the_first_release_are_run_or_say_why_not(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    shutil.copy(OLD, tmp_path / "store.sqlite3")
    executor = ProcessExecutor(environment={"AUTOSHARD_STORE_URL": url})
    with running_workers(executor, store_url=url, num_workers=1, lease=1.1) as here:
        # Its plan id is one of that release, and so would be the answer.
        old = here.await_job(OLD_RUNNING)
        assert old.state is JobState.FAILED
        assert old.error is not None
        assert old.error["type"] == TYPE_PREFIX + "other-release"
        assert "repeat the request" in old.error["detail"]
        with closing(sqlite3.connect(OLD)) as file:
            query = "SELECT request, graph FROM jobs WHERE id = ?"
            text, packed = file.execute(query, (OLD_RUNNING,)).fetchone()
        request, archive = json.loads(text), zlib.decompress(packed)
        mesh = mesh_from_json(json.dumps(request["mesh"]))
        # What is not in the request, or has another name since, has its default.
        request["options"] = {
            name: value
            for name, value in request["options"].items()
            if name in PlanOptions.model_fields
        }
        options = PlanOptions(**request["options"])
        same = plan_id(load_request_graph(archive, request["rules"]), mesh, options)
        jobs = here.stores.jobs
        asked = json.dumps({**request, "plan_id": same})
        known = here.await_job(jobs.submit(same, asked, archive, max_queued=9).id)
        assert (known.state, known.error) == (JobState.SUCCEEDED, None)
        assert Plan.from_json(here.result(known.id) or b"").id == same
        newer = json.dumps({"kind": "dream"})
        unknown = here.await_job(jobs.submit("x", newer, b"", max_queued=9, kind="dream").id)
        assert unknown.error is not None
        assert unknown.error["type"] == TYPE_PREFIX + "other-release"


def test_a_database_of_the_migration_before_goes_on(open_one: OpenEngine) -> None:
    engine = open_one()
    upgrade(engine, "0002")
    with engine.begin() as connection:
        values = {"caller": "me", "key": hashlib.sha256(b"k").hexdigest(), "at": time.time()}
        connection.execute(
            text(
                "INSERT INTO idempotency_keys (caller, key_sha256, body_sha256, answer, created_at)"
                " VALUES (:caller, :key, 'b', '{\"job\": \"j\"}', :at)"
            ),
            values,
        )
        columns = "id, number, kind, plan_id, state, attempts, created_at, request, graph"
        row = "'j', 1, 'coverage', 'p', 'queued', 0, :at, '{}', :graph"
        job = {"at": values["at"], "graph": zlib.compress(b"graph")}
        connection.execute(text(f"INSERT INTO jobs ({columns}) VALUES ({row})"), job)  # noqa: S608  ours
    assert not is_current(engine)
    migrate(engine)
    jobs = JobStore(engine, lease=30, max_attempts=2)
    found = jobs.get("j")
    assert found is not None
    assert (found.plan_id, found.project, found.caller) == ("p", "default", None)
    assert jobs.submit("p", "{}", b"", max_queued=9).id == "j"
    claim = jobs.claim("me")
    assert claim is not None
    assert (claim.id, claim.graph) == ("j", b"graph")
    me = Caller("me", frozenset())
    assert IdempotencyStore(engine).find(me, "k") == IdempotencyRecord("b", "j")
    topologies = TopologyStore(engine)
    entry, is_new = topologies.put("default", "mine", "{}", max_stored=1)
    assert (is_new, topologies.list("default")) == (True, [entry])
    assert topologies.get("default", "mine") == "{}"
