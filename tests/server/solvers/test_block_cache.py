"""Later jobs reuse the blocks that an earlier job has solved."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.models import llama, meta

from autoshard.client import Client
from autoshard.graph import export_model, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan
from autoshard.planner import make_plan
from autoshard_server import ProcessExecutor, Settings
from autoshard_server.store.database import Stores


@pytest.fixture(scope="module")
def archives() -> dict[int, bytes]:
    """A small Llama by its number of layers."""
    made = {}
    for layers in (3, 5):
        model, kwargs = meta(llama, layers=layers, batch=8, sequence=16)
        made[layers] = export_model(model, (), kwargs)
    return made


def counts(plan: Plan) -> tuple[int, int]:
    blocks = plan.provenance.blocks
    return sum(b.num_reused for b in blocks), sum(b.num_solved for b in blocks)


def assert_fresh(plan: Plan, archive: bytes) -> None:
    fresh = make_plan(load_graph(archive), make_mesh((2, 2)))
    left_out = {"provenance"}
    assert plan.model_dump(exclude=left_out) == fresh.model_dump(exclude=left_out)


@pytest.mark.thorough
def test_solver_processes_share_blocks(
    start_service: Any, archives: dict[int, bytes], tmp_path: Path
) -> None:
    service = start_service(store_url=f"sqlite:///{tmp_path / 'store.sqlite3'}")
    with Client(service.url) as client:
        shallow = client.plan(archives[3], mesh=(2, 2))
        deep = client.plan(archives[5], mesh=(2, 2))
    assert counts(shallow)[1] > 0
    assert counts(deep)[0] > 0
    assert [b.key for b in deep.provenance.blocks] == [b.key for b in shallow.provenance.blocks]
    assert_fresh(shallow, archives[3])
    assert_fresh(deep, archives[5])
    assert service.app.state.service.cache.stats("blocks").num_entries > 0


@pytest.mark.thorough
def test_projects_share_no_blocks(
    start_service: Any, archives: dict[int, bytes], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    stores = Stores(Settings(store_url=url))
    tokens = {name: stores.api_keys.create("me", ["plan"], project=name)[1] for name in "ab"}
    stores.close()
    service = start_service(store_url=url, auth="required")
    for project, token in tokens.items():
        with Client(service.url, api_key=token, cache=False) as client:
            assert counts(client.plan(archives[3], mesh=(2, 2)))[0] == 0
        assert service.app.state.service.cache.stats(f"{project}_blocks").num_entries > 0


@pytest.mark.thorough
def test_a_killed_solver_leaves_the_blocks_usable(
    start_service: Any, archives: dict[int, bytes], tmp_path: Path, recording: Any
) -> None:
    settings = Settings(store_url=f"sqlite:///{tmp_path / 'store.sqlite3'}", lease=2.0)
    executor = recording(ProcessExecutor(environment=settings.environment))
    service = start_service(executor=executor, store_url=settings.store_url)
    job = service.post(archives[3]).json()
    service.await_job(job["id"], lambda job: job["state"] == "running")
    os.kill(executor.solvers[-1]._process.pid, signal.SIGKILL)
    done = service.await_job(job["id"])
    assert len(executor.solvers) > 1
    assert done["state"] == "succeeded"
    assert_fresh(Plan.model_validate(done["result"]), archives[3])


@pytest.mark.thorough
def test_a_solver_without_a_store_solves_all_the_same(
    start_service: Any, archives: dict[int, bytes]
) -> None:
    executor = ProcessExecutor(environment={"AUTOSHARD_STORE_URL": "nosuchdb://host/name"})
    service = start_service(executor=executor)
    with Client(service.url) as client:
        plan = client.plan(archives[3], mesh=(2, 2))
    assert counts(plan)[0] == 0
    assert_fresh(plan, archives[3])


def test_a_solver_process_gets_the_settings_of_the_service(monkeypatch: Any) -> None:
    given = Settings(store_url="sqlite:////tmp/x?secret=1", cache_max_bytes=5, max_wait=1.5)
    for name, value in given.environment.items():
        monkeypatch.setenv(name, value)
    assert Settings() == given
