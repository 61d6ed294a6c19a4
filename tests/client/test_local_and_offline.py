"""Plans without a service: stored on this machine, or made in this process."""

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from support.services import Mlp, serving

from autoshard import compare_plans, export_plan
from autoshard.client import AsyncClient, Client, JobProgress, Retry
from autoshard.errors import (
    ArgumentTypeError,
    AutoshardError,
    MeshError,
    OptionError,
    RequestRejectedError,
    ServiceUnavailableError,
)
from autoshard.graph import export_model
from autoshard.plan import Plan, PlanOptions
from autoshard.requests.models import PlanRequest
from autoshard.requests.this_process import ThisProcess
from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve
from autoshard_server.store.api_keys import ApiKeyStore
from autoshard_server.store.database import migrate
from autoshard_solver_cache import open_engine

NOBODY = "http://127.0.0.1:9"
AT_ONCE = Retry(attempts=1)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(ThreadExecutor(solve)) as url, Client(url, cache=False) as made:
        yield made


@pytest.fixture
def kept(client: Client, graph: bytes, tmp_path: Path) -> tuple[Path, Plan]:
    """A folder in which a client has kept a plan."""
    url = client._transport.url
    with Client(url, cache=tmp_path) as made:
        return tmp_path, made.plan(graph, mesh=(2, 2))


def without_service(folder: Path | bool, **options: Any) -> Client:
    return Client(NOBODY, cache=folder, retry=AT_ONCE, **options)


@pytest.mark.parametrize("mesh", [None, 4.5, (2.5,)], ids=["none", "number", "part"])
def test_what_is_no_mesh_is_told_before_anybody_is_asked(graph: bytes, mesh: Any) -> None:
    with Client.local(cache=False) as here, without_service(folder=False) as away:
        for client in (here, away):
            with pytest.raises(
                ArgumentTypeError, match="in place of a mesh: pass a Mesh of make_mesh"
            ):
                client.plan(graph, mesh=mesh)


def test_a_plan_that_is_kept_serves_when_nobody_answers(
    kept: tuple[Path, Plan], graph: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plan = kept
    with without_service(folder) as client, caplog.at_level(logging.WARNING):
        result = client.request_plan(graph, mesh=(2, 2))
        assert (result.plan, result.source, result.cached) == (plan, "offline", True)
        assert "kept on this machine" in caplog.text
        assert client.get_plan(plan.id) == plan
        with pytest.raises(ServiceUnavailableError):
            client.plan(graph, mesh=(4,))
        with pytest.raises(ServiceUnavailableError):
            client.plan(graph, mesh=(2, 2), options=PlanOptions(seed=5))
        with pytest.raises(ServiceUnavailableError):
            client.plan(graph, mesh=(2, 2), offline="never")
    with without_service(folder) as client, pytest.raises(ServiceUnavailableError):
        client.get_plan(plan.id, offline="never")


def test_the_service_need_not_even_be_asked(kept: tuple[Path, Plan], graph: bytes) -> None:
    folder, plan = kept
    # No attempt is made, so nothing can fail.
    with Client("http://127.0.0.1:9", cache=folder, retry=Retry(attempts=99)) as client:
        result = client.request_plan(graph, mesh={"shape": [2, 2]}, offline="only")
        assert (result.plan, result.source) == (plan, "offline")
        assert client.get_plan(plan.id, offline="only") == plan
        with pytest.raises(ServiceUnavailableError, match="kept on this machine"):
            client.plan(graph, mesh=(8,), offline="only")


def test_another_export_of_the_program_finds_its_plan(kept: tuple[Path, Plan]) -> None:
    folder, plan = kept
    inputs = (torch.zeros(8, 16),)
    with without_service(folder) as client:
        assert client.plan(Mlp(), inputs, mesh=(2, 2)) == plan
        # Other bytes, the same program.
        assert client.plan(with_comment(export_model(Mlp(), inputs)), mesh=(2, 2)) == plan


def with_comment(archive: bytes) -> bytes:
    """The same archive with a comment at its end."""
    return archive[:-2] + b"\x02\x00hi"


def test_what_was_changed_on_the_disk_is_not_used(kept: tuple[Path, Plan], graph: bytes) -> None:
    folder, plan = kept
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    with without_service(folder) as client:
        with pytest.raises(ServiceUnavailableError):
            client.plan(graph, mesh=(2, 2))
        with pytest.raises(ServiceUnavailableError):
            client.get_plan(plan.id)


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_plan(
    client: Client, graph: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = client._transport.url
    blocked = tmp_path / "file"
    blocked.write_text("no folder", encoding="utf-8")
    with Client(url, cache=blocked) as other:
        assert other.plan(graph, mesh=(2, 2)).found
    assert "is not kept" in caplog.text


def test_one_process_plans_as_the_service_does(client: Client, graph: bytes) -> None:
    theirs = client.plan(graph, mesh=(2, 4))
    with Client.local(cache=False) as local:
        result = local.request_plan(graph, mesh=(2, 4))
        ours = result.plan
        assert ours is not None
        assert (result.source, result.cached) == ("local", False)
        assert local.request_plan(graph, mesh=(2, 4)).cached
        assert local.get_plan(ours.id) == ours
        assert {"autoshard", "plan"} <= local.health().keys()
    assert ours.id == theirs.id
    assert without_times(ours) == without_times(theirs)


def without_times(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(plan.to_json())
    document.pop("provenance")
    return document


@pytest.mark.parametrize("where", ["service", "process"])
def test_plans_are_explained_compared_and_exported(
    where: str, client: Client, graph: bytes
) -> None:
    talk = client if where == "service" else Client.local(cache=False)
    one, two = talk.plan(graph, mesh=(2,)), talk.plan(graph, mesh=(4,))
    explained = talk.explain(one.id, "up.weight")
    assert explained.kind == "input"
    assert explained.alternatives[0].regret == 0
    assert talk.compare(one.id, two.id) == compare_plans(one, two)
    assert talk.export(one.id, "csv") == export_plan(one, "csv")
    assert talk.export(one.id, "json") == export_plan(one, "json")
    listed = talk.list_plans(graph_digest=one.graph.digest)
    assert [entry.id for entry in listed if entry.id in {one.id, two.id}] == [two.id, one.id]
    assert listed[0].model_dump(exclude={"created_at"}) == {
        "id": two.id,
        "status": "optimal",
        "objective": two.certificate.objective,
        "gap": two.certificate.gap,
        "peak_memory": two.memory.peak if two.memory else None,
        "mode": "training",
        "mesh": ((two.mesh.axes[0].name, 4),),
        "topology": two.mesh.topology.name,
        "graph_digest": two.graph.digest,
        "size": len(two.to_json()),
        "bound": two.certificate.bound,
        "num_nodes": two.graph.num_nodes,
        "num_parameters": two.graph.num_parameters,
    }
    assert len(talk.list_plans(limit=1)) == 1
    jobs = {job.plan_id for job in talk.list_jobs()}
    assert jobs >= {one.id, two.id} if where == "service" else not jobs
    assert talk.list_jobs(states=["failed"]) == ()
    with pytest.raises(AutoshardError, match="nobody"):
        talk.explain(one.id, "nobody")
    with pytest.raises(RequestRejectedError, match="no plan") as caught:
        talk.explain("0" * 64, "up.weight")
    assert caught.value.status == 404


def test_one_process_has_no_jobs(graph: bytes) -> None:
    local = Client.local(cache=False)
    with pytest.raises(OptionError, match="no jobs to poll; wait for the result"):
        local.request_plan(graph, mesh=(2, 2), wait=False)
    for ask in (local.get_job, local.wait_for_job, local.cancel, local.delete_job):
        with pytest.raises(RequestRejectedError, match="no job") as caught:
            ask("0" * 32)
        assert caught.value.status == 404
    with pytest.raises(MeshError, match="abacus"):
        local.plan(graph, mesh={"shape": [2], "topology": "abacus"})
    with pytest.raises(OptionError, match="nowhere"):
        local.plan(graph, mesh=(2,), options=PlanOptions(batch_axis="nowhere"))


def test_what_cannot_be_had_from_the_service_is_made_here(graph: bytes) -> None:
    with without_service(False, fallback="local") as client:
        result = client.request_plan(graph, mesh=(2, 2))
        assert result.source == "local"
        assert result.plan is not None
        with pytest.raises(ServiceUnavailableError):
            client.health()

    async def ask() -> Any:
        async with AsyncClient(NOBODY, cache=False, retry=AT_ONCE, fallback="local") as other:
            return await other.request_plan(graph, mesh=(2, 2))

    assert asyncio.run(ask()).plan.id == result.plan.id


def test_a_task_that_is_cancelled_cancels_what_it_waits_for(graph: bytes) -> None:
    async def ask() -> str:
        client = AsyncClient.local(cache=False)
        started = asyncio.Event()
        task = asyncio.create_task(
            client.plan(graph, mesh=(2, 2), on_progress=lambda _: started.set())
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The client is as good as before.
        return (await client.plan(graph, mesh=(2, 2))).id

    assert len(asyncio.run(ask())) == 64


def test_who_stops_waiting_ends_the_solve(graph: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = Event(), Event()

    def hold(*_: Any, cancel: Event, **__: Any) -> Plan:
        begun.set()
        cancel.wait()
        ended.set()
        raise OptionError("stopped")

    monkeypatch.setattr("autoshard.planner.make_plan", hold)

    async def ask() -> None:
        task = asyncio.create_task(AsyncClient.local(cache=False).plan(graph, mesh=(2, 2)))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    assert ended.wait(10)


def test_a_plan_that_was_stopped_is_known_but_not_used_again(graph: bytes) -> None:
    here, request, stopped = ThisProcess(cache=False), PlanRequest(graph, mesh=(2, 4)), Event()
    stopped.set()
    first = here.plan(request, cancel=stopped).plan
    assert first is not None
    assert first.certificate.status == "cancelled"
    assert here.get_plan(first.id) == first
    second = here.plan(request)
    assert second.plan is not None
    assert (second.cached, second.plan.certificate.status) == (False, "optimal")
    assert here.plan(request).cached


def test_threads_may_share_a_client(graph: bytes) -> None:
    client = Client.local(cache=False)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(client.plan, graph, mesh=(2, 2)) for _ in range(4)]
        assert len({plan.result().id for plan in asked}) == 1


async def _heard(graph: bytes) -> list[JobProgress]:
    seen: list[JobProgress] = []

    async def hear(progress: JobProgress) -> None:
        await asyncio.sleep(0)
        seen.append(progress)

    await AsyncClient.local(cache=False).plan(graph, mesh=(8,), on_progress=hear)
    return seen


def test_progress_may_be_awaited(graph: bytes) -> None:
    assert asyncio.run(_heard(graph))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A service that wants keys, and one."""
    store = f"sqlite:///{tmp_path_factory.mktemp('keys') / 'store.sqlite3'}"
    engine = open_engine(store)
    migrate(engine)
    _, token = ApiKeyStore(engine).create("test", ["plan"])
    engine.dispose()
    with serving(ThreadExecutor(solve), store_url=store, auth="required") as url:
        yield url, token


def is_let_in(url: str, graph: bytes, **options: Any) -> bool:
    with Client(url, cache=False, **options) as client:
        return client.plan(graph, mesh=(2,)).found


def test_a_key_opens_the_door(
    guarded: tuple[str, str], graph: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, token = guarded
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with (
        Client(url, cache=False) as stranger,
        pytest.raises(RequestRejectedError, match="API key") as caught,
    ):
        stranger.plan(graph, mesh=(2,))
    assert caught.value.status == 401
    assert is_let_in(url, graph, api_key=token)
    monkeypatch.setenv("AUTOSHARD_API_KEY", token)
    assert is_let_in(url, graph)
    monkeypatch.delenv("AUTOSHARD_API_KEY")
    secret = tmp_path / "secret"
    secret.write_text(token + "\n", encoding="utf-8")
    monkeypatch.setenv("AUTOSHARD_API_KEY_FILE", str(secret))
    assert is_let_in(url, graph)
    monkeypatch.delenv("AUTOSHARD_API_KEY_FILE")
    own = tmp_path / "autoshard" / "api-key"
    own.parent.mkdir()
    own.write_text(token, encoding="utf-8")
    own.chmod(0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        Client(url)
    own.chmod(0o600)
    assert is_let_in(url, graph)


def test_a_key_that_cannot_be_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OptionError, match="characters"):
        Client(NOBODY, api_key="two words")
    monkeypatch.setenv("AUTOSHARD_API_KEY_FILE", "/nowhere/key")
    with pytest.raises(OptionError, match="/nowhere/key"):
        Client(NOBODY)
    Client("http://planner.example:8000", api_key="k", cache=False)
    assert "unencrypted to planner.example" in caplog.text
