"""Searches, validations, coverages and topologies: with a service and without."""

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.custom_operators import mixer
from support.proxy import Cut, Drop, Lose, Proxy, Say, proxied
from support.services import Mlp, keeping

from autoshard import get_topology, list_topologies, operator_coverage, search_meshes
from autoshard.client import AsyncClient, Client, JobProgress, Retry
from autoshard.discovery import discover
from autoshard.errors import AutoshardError, MeshError, RequestRejectedError, ServiceError
from autoshard.errors import ServiceUnavailableError as UnavailableError
from autoshard.graph import export_model, load_graph
from autoshard.mesh import Topology, make_mesh, topology_from_json, topology_to_json
from autoshard.plan import PlanOptions
from autoshard.planner import MeshCandidate, plan_id, problem_size

QUICK = Retry(attempts=4, first=0.02, longest=1.5, outage=30.0)

Call = Callable[..., Any]


def blocking(url: str) -> Iterator[Call]:
    with Client(url, retry=QUICK, cache=False) as client:
        yield lambda method, *args, **kwargs: getattr(client, method)(*args, **kwargs)


def awaiting(url: str) -> Iterator[Call]:
    with asyncio.Runner() as runner:
        client = AsyncClient(url, retry=QUICK, cache=False)
        yield lambda method, *args, **kwargs: runner.run(getattr(client, method)(*args, **kwargs))
        runner.run(client.close())


REMOTE = {"blocking": blocking, "awaiting": awaiting}


@pytest.fixture(scope="module", params=[*REMOTE, "local"])
def call(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Call]:
    """A client's methods by name; each kind has a service of its own, or none."""
    if request.param == "local":
        client = Client.local(cache=False)
        yield lambda method, *args, **kwargs: getattr(client, method)(*args, **kwargs)
        return
    with keeping(tmp_path_factory.mktemp(request.param)) as url:
        yield from REMOTE[request.param](url)


@pytest.fixture(scope="module", params=REMOTE)
def at_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Call]:
    """The methods of a client of a service: only there are jobs."""
    with keeping(tmp_path_factory.mktemp(request.param)) as url:
        yield from REMOTE[request.param](url)


@cache
def searched(graph: bytes, devices: int, **given: Any) -> tuple[MeshCandidate, ...]:
    return search_meshes(load_graph(graph), devices, **given)


@pytest.mark.matrix(1)
def test_a_search_ranks_every_mesh_and_keeps_the_plans(call: Call, graph: bytes) -> None:
    seen: list[JobProgress] = []
    search = call("search", graph, num_devices=4, on_progress=seen.append)
    expected = searched(graph, 4)
    assert len(expected) == 2
    assert [m.mesh for m in search.meshes] == [c.mesh for c in expected]
    for mesh, candidate in zip(search.meshes, expected, strict=True):
        found, known = candidate.plan, plan_id(load_graph(graph), mesh.mesh, PlanOptions())
        assert found is not None
        assert found.memory is not None
        assert (mesh.plan_id, mesh.certificate) == (known, found.certificate)
        assert (mesh.peak_memory, mesh.reason, mesh.error) == (found.memory.peak, "", "")
        plan = call("get_plan", known)
        assert (plan.costs, plan.stages) == (found.costs, found.stages)
        result = call("request_plan", graph, mesh=mesh.mesh)
        assert (result.plan, result.cached) == (plan, True)
    planned = {progress for progress in seen if progress.phase.startswith("planned")}
    assert planned
    prices = {mesh.certificate.objective for mesh in search.meshes}
    assert {progress.incumbent for progress in planned} <= prices
    again = call("request_search", graph, num_devices=4)
    assert (again.search, again.cached) == (search, again.source == "service")


def test_plans_of_searches_here_are_listed_once(graph: bytes) -> None:
    with Client.local(cache=False) as client:
        (mesh,) = client.search(graph, num_devices=2).meshes
        assert client.plan(graph, mesh=(2,)).id == mesh.plan_id
        assert [entry.id for entry in client.list_plans()] == [mesh.plan_id]


def test_a_search_need_not_be_waited_for(at_service: Call, graph: bytes) -> None:
    given = {"num_devices": 2, "mode": "inference", "max_axes": 1}
    asked = at_service("request_search", graph, wait=False, **given)
    assert (asked.search, asked.cached) == (None, False)
    search = at_service("wait_for_search", asked.job_id)
    assert [mesh.mesh.axis_sizes for mesh in search.meshes] == [(2,)]
    status = at_service("get_job", asked.job_id)
    assert (status.state, status.plan, status.plan_id) == ("succeeded", None, "")
    assert status.get_search() == search
    assert at_service("request_search", graph, **given).search == search
    with pytest.raises(ServiceError, match="is not a plan"):
        at_service("wait_for_job", asked.job_id)
    (entry,) = (job for job in at_service("list_jobs") if job.id == asked.job_id)
    assert entry.result is None
    other = at_service("request_plan", graph, mesh=(8,), wait=False)
    with pytest.raises(ServiceError, match="is not a search"):
        at_service("wait_for_search", other.job_id)


def slower(topology: Topology) -> Topology:
    """The same cluster with links that take a thousandth of the bytes."""
    document = topology_to_json(topology).replace("450000000000.0", "450000000.0")
    return topology_from_json(document)


@pytest.mark.matrix(1)
def test_meshes_and_searches_have_nodes(call: Call, graph: bytes) -> None:
    texts = {"topology": "H100", "nodes": 2, "shape": "a=2,b=2"}
    plan = call("plan", graph, mesh=texts, memory_budget="1GB")
    assert plan.mesh == make_mesh((2, 2), axes=("a", "b"), topology="h100-sxm", gpus_per_node=2)
    assert plan.options.memory.budget == 10**9
    links = {"intra_bandwidth": "2GB/s", "inter_bandwidth": "8Gb/s"}
    named = call("plan", graph, mesh={"shape": [4], "nodes": 2, "mesh_dim_names": ["n"], **links})
    assert named.mesh == make_mesh((4,), axes=("n",), nodes=2, **links)
    assert call("plan", graph, mesh="2x2").mesh.topology.assumed == "topology"
    found = call("search", graph, num_devices=4, topology="h100", gpus_per_node=2, max_axes=1)
    assert {mesh.mesh.num_nodes for mesh in found.meshes} == {2}
    for wrong in ({"shape": [4], "nodes": 3}, {"shape": [4], "topology": "h10"}):
        with pytest.raises(AutoshardError, match=r"possible numbers|did you mean h100-sxm"):
            call("plan", graph, mesh=wrong)
    with pytest.raises(MeshError, match="named twice"):
        call("plan", graph, mesh={"shape": "a=2,b=2", "axes": ["c", "d"]})
    with pytest.raises(MeshError, match="'2-2' is not a mesh"):
        call("plan", graph, mesh="2-2")


@pytest.mark.matrix(1)
def test_a_search_takes_a_topology_and_options(call: Call, graph: bytes) -> None:
    topology = slower(get_topology("h100-sxm"))
    assert topology != get_topology("h100-sxm")
    given: dict[str, Any] = {"topology": topology, "max_axes": 1}
    search = call("search", graph, num_devices=2, memory_budget=10, **given)
    (mesh,) = search.meshes
    assert mesh.mesh.topology == topology
    assert mesh.certificate.status == "infeasible"
    assert mesh.reason
    assert not call("get_plan", mesh.plan_id).found
    pins = PlanOptions(pins={"inputs": {"x": "S(0)"}})
    one_axis, two_axes = call("search", graph, num_devices=4, options=pins).meshes
    assert (one_axis.error, two_axes.plan_id, two_axes.certificate) == ("", None, None)
    assert "layout" in two_axes.error


def test_a_search_that_is_refused_says_why(call: Call, graph: bytes) -> None:
    with pytest.raises(AutoshardError, match="abacus"):
        call("search", graph, num_devices=2, topology="abacus")
    with pytest.raises(AutoshardError, match="num_devices"):
        call("search", graph, num_devices=0)
    with pytest.raises(AutoshardError, match="in_flight"):
        call("search", graph, num_devices=2, options=PlanOptions(in_flight=2))
    with pytest.raises(AutoshardError, match="memory_budget"):
        call("search", graph, num_devices=2, memory_budget=-1)


def test_a_search_can_be_cancelled(at_service: Call, graph: bytes) -> None:
    # So many meshes that some are left.
    asked = at_service("request_search", graph, num_devices=2**12, max_axes=3, wait=False)
    assert at_service("cancel", asked.job_id).state == "cancelled"
    with pytest.raises(RequestRejectedError, match="cancelled") as caught:
        at_service("wait_for_search", asked.job_id)
    assert caught.value.status == 409


def test_what_is_validated_is_not_planned(call: Call, graph: bytes) -> None:
    mesh, program = make_mesh((4, 8)), load_graph(graph)
    options = PlanOptions(mode="inference")
    found = call("validate", graph, mesh=(4, 8), mode="inference")
    assert found.plan_id == plan_id(program, mesh, options)
    assert found.size == problem_size(program, mesh, options)
    assert found.size.feasible is None
    assert found.plan_id not in {entry.id for entry in call("list_plans")}
    small = call("validate", Mlp(), (torch.zeros(8, 16),), mesh=(4, 8), memory_budget=10)
    assert small.size.feasible is False
    assert call("validate", graph, mesh=mesh, options=options) == found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mesh": ({"mesh": {"shape": [2], "topology": "abacus"}}, "abacus"),
    "axis": ({"mesh": (2,), "options": PlanOptions(batch_axis="nowhere")}, "nowhere"),
    "pins": (
        {"mesh": (2,), "options": PlanOptions(pins={"inputs": {"y": "R"}})},
        "'y'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_planning_would_refuse_is_refused(name: str, call: Call, graph: bytes) -> None:
    """For the reason for which the plan is refused."""
    given, complaint = REFUSED[name]
    with pytest.raises(AutoshardError, match=complaint) as validated:
        call("validate", graph, **given)
    with pytest.raises(AutoshardError) as planned:
        call("plan", graph, **given)
    assert str(validated.value) == str(planned.value)


def test_an_archive_that_cannot_be_read_is_refused(call: Call, graph: bytes) -> None:
    for method, given in (("validate", {"mesh": (2,)}), ("coverage", {})):
        with pytest.raises(AutoshardError, match="archive"):
            call(method, graph[:100], **given)


class Distances(Mlp):
    """Calls an operator of ATen that has no rule, which is found by running it."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return torch.cdist(self.down(self.up(x)), x).sum() * scale


@pytest.fixture(scope="module")
def distances() -> bytes:
    return export_model(Distances(), (torch.zeros(8, 4, 16),))


def test_a_validation_knows_the_rules_that_planning_finds(call: Call, distances: bytes) -> None:
    found, mesh = call("validate", distances, mesh=(2,)), make_mesh((2,))
    bare = load_graph(distances)
    assert found.size == problem_size(discover(bare).graph, mesh)
    assert found.size.num_strategies > problem_size(bare, mesh).num_strategies


def test_coverage_says_which_operators_can_be_cut(
    call: Call, graph: bytes, distances: bytes
) -> None:
    program = load_graph(graph)
    assert call("coverage", graph) == operator_coverage(program)
    odd = call("coverage", graph, mesh=(1, 64))
    assert odd == operator_coverage(program, axis_sizes=[64])
    assert odd.num_whole > operator_coverage(program).num_whole
    found = {use.operator: use for use in call("coverage", distances).operators}
    assert found["aten.cdist.default"].found_rule
    assert found["aten.cdist.default"].num_whole == 0
    with pytest.raises(AutoshardError, match="abacus"):
        call("coverage", graph, mesh={"shape": [2], "topology": "abacus"})


def test_operators_of_the_models_own_are_covered_where_they_may_be_run(call: Call) -> None:
    model, kwargs = mixer()
    expected = operator_coverage(discover(load_graph(export_model(model, (), kwargs))).graph)
    assert call("coverage", model, kwargs=kwargs) == expected
    whole = call("coverage", model, kwargs=kwargs, discover=False)
    assert whole.num_whole > expected.num_whole


def test_topologies_are_those_of_the_library(call: Call) -> None:
    names = call("list_topologies")
    assert names == list_topologies()
    for name in names:
        assert call("get_topology", name) == get_topology(name)
    for name in ("abacus", "a/b", "a?c=d#e"):
        with pytest.raises(AutoshardError, match=re.escape(name)):
            call("get_topology", name)


@pytest.mark.matrix(1)
def test_a_topology_that_is_stored_can_be_named(call: Call, graph: bytes) -> None:
    own = replace(get_topology("h100-sxm"), name="own")
    call("put_topology", own)
    assert call("list_topologies") == tuple(sorted({*list_topologies(), "own"}))
    assert call("get_topology", "own") == own
    mesh = {"shape": [2], "topology": "own"}
    plan = call("plan", graph, mesh=mesh)
    assert plan.mesh.topology == own
    assert call("validate", graph, mesh=mesh).plan_id == plan.id
    assert call("coverage", graph, mesh=mesh).num_calls > 0
    # Under the name there is another one now, for which nothing is known.
    call("put_topology", slower(own))
    given = {"num_devices": 2, "topology": "own", "mode": "inference"}
    first = call("request_search", graph, **given)
    assert first.search.meshes[0].mesh.topology == slower(own) == call("get_topology", "own")
    other = call("plan", graph, mesh=mesh)
    assert (other.mesh.topology, other.id == plan.id) == (slower(own), False)
    call("put_topology", own)
    second = call("request_search", graph, **given)
    assert (first.cached, second.cached) == (False, False)
    assert second.search.meshes[0].mesh.topology == own
    call("delete_topology", "own")
    assert "own" not in call("list_topologies")
    for refused in (
        partial(call, "delete_topology", "own"),
        partial(call, "get_topology", "own"),
        partial(call, "plan", graph, mesh=mesh),
        partial(call, "search", graph, **given),
    ):
        with pytest.raises(AutoshardError, match="'own'"):
            refused()
    with pytest.raises(AutoshardError, match="'h100-sxm' is built in"):
        call("put_topology", get_topology("h100-sxm"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with keeping(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with proxied(url) as made:
        yield made


@pytest.fixture(params=REMOTE)
def through(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Call]:
    """The methods of a client whose way to the service fails as the proxy is told."""
    yield from REMOTE[request.param](proxy.url)


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "search": ("/v1/searches", {"num_devices": 2, "max_axes": 1}),
    "validate": ("/v1/plans", {"mesh": (2,)}),
    "coverage": ("/v1/operators:coverage", {"mesh": (2,)}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("method", ASKED)
def test_what_fails_on_the_way_is_sent_again_and_stays_the_same(
    method: str, through: Call, proxy: Proxy, graph: bytes
) -> None:
    path, given = ASKED[method]
    proxy.only = lambda request: request.path == path
    # The answer is cut after the order was taken: it must not be taken twice.
    proxy.faults.extend([Drop(), Say(502), Say(429, {"Retry-After": "0"})])
    assert through(method, graph, **given)
    orders = [request for request in proxy.passed if request.path == path]
    assert len(orders) >= 4
    assert len({(order.body, order.headers["Idempotency-Key"]) for order in orders}) == 1
    sent = len(proxy.passed)
    assert through(method, graph, **given)
    # The graph is known by now.
    assert [request.path for request in proxy.passed[sent:]] == [path]
    proxy.faults.append(Cut())
    assert through(method, graph, **given)


def test_plans_and_jobs_are_deleted(at_service: Call, graph: bytes) -> None:
    first, second = (
        at_service("request_plan", graph, mesh=(shape,), mode="inference", wait=False)
        for shape in (3, 5)
    )
    plan = at_service("wait_for_job", first.job_id)
    assert plan.id in {entry.id for entry in at_service("list_plans")}
    at_service("delete_plan", plan.id)
    assert plan.id not in {entry.id for entry in at_service("list_plans")}
    at_service("wait_for_job", second.job_id)
    at_service("delete_job", second.job_id)
    for refused in (
        partial(at_service, "get_plan", plan.id),
        partial(at_service, "delete_plan", plan.id),
        partial(at_service, "get_job", second.job_id),
        partial(at_service, "delete_job", second.job_id),
        partial(at_service, "delete_graph", "0" * 64),
    ):
        with pytest.raises(RequestRejectedError) as caught:
            refused()
        assert caught.value.status == 404
    assert at_service("plan", graph, mesh=(3,), mode="inference").id == plan.id


def test_a_graph_is_deleted_and_sent_again(through: Call, proxy: Proxy, graph: bytes) -> None:
    given = {"mesh": (7,), "mode": "inference"}
    through("delete_plan", through("plan", graph, **given).id)
    digest = hashlib.sha256(graph).hexdigest()
    through("delete_graph", digest)
    with pytest.raises(RequestRejectedError, match=digest):
        through("delete_graph", digest)
    sent = len(proxy.passed)
    through("plan", graph, **given)
    assert f"/v1/graphs/{digest}" in [request.path for request in proxy.passed[sent:]]


def test_a_topology_whose_deletion_was_lost_on_the_way_is_deleted(
    through: Call, proxy: Proxy
) -> None:
    own = replace(get_topology("h100-sxm"), name="own")
    proxy.faults.extend([Drop(), Say(502)])
    through("put_topology", own)
    proxy.faults.append(Cut())
    assert through("get_topology", "own") == own
    # The answer to the first attempt is lost, and the second finds nothing to delete.
    proxy.faults.append(Lose())
    through("delete_topology", "own")
    assert [request.method for request in proxy.passed].count("DELETE") == 2
    with pytest.raises(RequestRejectedError, match="'own'") as caught:
        through("delete_topology", "own")
    assert caught.value.status == 404


def test_a_search_that_was_lost_is_asked_for_again(
    through: Call, proxy: Proxy, graph: bytes
) -> None:
    # A service that forgets its jobs, as one does that keeps them in memory and restarts.
    gone = Say(404, {}, b'{"type": "https://x#not-found", "title": "Not found"}')
    proxy.only = lambda request: request.path.startswith("/v1/jobs/")
    proxy.faults.extend([gone, gone])
    # What the other client has not asked for.
    budget = 10**6 + int(proxy.url.rpartition(":")[2])
    given = {"num_devices": 2, "memory_budget": budget, "on_progress": lambda _: None}
    assert through("search", graph, **given).meshes[0].plan_id
    orders = [request for request in proxy.passed if request.path == "/v1/searches"]
    assert len({order.headers["Idempotency-Key"] for order in orders}) == 2
    assert not proxy.faults


def test_where_nobody_answers_it_is_done_here(graph: bytes) -> None:
    nobody = "http://127.0.0.1:9"
    at_once = Retry(attempts=1, outage=0)
    with Client(nobody, retry=at_once, cache=False, fallback="local") as client:
        result = client.request_search(graph, num_devices=2, max_axes=1)
        assert result.source == "local"
        assert client.coverage(graph) == operator_coverage(load_graph(graph))
        assert client.validate(graph, mesh=(2,)).size.num_nodes > 0
    with Client(nobody, retry=at_once, cache=False) as client:
        for ask in (
            lambda: client.search(graph, num_devices=2),
            lambda: client.validate(graph, mesh=(2,)),
            lambda: client.coverage(graph),
            client.list_topologies,
        ):
            with pytest.raises(UnavailableError):
                ask()
