"""Plans over HTTP: made by a job, then returned from the cache."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any
from zipfile import ZipFile

import pytest
from support.models import meta, residuals

from autoshard.graph import export_model, graph_from_json, load_graph
from autoshard.mesh import make_mesh, mesh_to_json
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import plan_id
from autoshard_server.solvers.executor import ThreadExecutor
from autoshard_server.solvers.solving import solve


@pytest.fixture(scope="module")
def graph(make_graph: Any) -> bytes:
    """A graph that no other module has asked the shared service about."""
    made: bytes = make_graph(48)
    return made


@pytest.fixture(scope="module")
def answered(service: Any, graph: bytes) -> Any:
    """The first answer for the default request of these tests."""
    return service.post(graph, wait=60)


def test_a_plan_comes_at_once_when_the_caller_waits(answered: Any, graph: bytes) -> None:
    assert answered.status_code == 200
    assert answered.headers["content-type"] == "application/json"
    assert answered.headers["Autoshard-Cache"] == "miss"
    assert answered.headers["Preference-Applied"] == "wait=60"
    plan = Plan.from_json(answered.content)
    assert plan.found
    assert plan.id == plan_id(load_graph(graph), make_mesh((2, 2)), PlanOptions())
    assert answered.headers["ETag"].removeprefix("W/") == f'"{plan.id}"'
    assert answered.headers["Content-Location"] == f"/v1/plans/{plan.id}"


def test_the_same_request_is_answered_from_the_cache(
    service: Any, graph: bytes, answered: Any
) -> None:
    again = service.post(graph)
    assert again.status_code == 200
    assert again.headers["Autoshard-Cache"] == "hit"
    assert again.content == answered.content


def test_a_request_seen_before_is_not_parsed_again(
    service: Any, graph: bytes, answered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_args: object, **_options: object) -> None:
        raise AssertionError("the graph was parsed")

    monkeypatch.setattr("autoshard_server.solvers.parsers.Parsers.run", parse)
    assert service.post(graph).content == answered.content


def test_the_bare_model_json_is_planned_like_its_archive(
    service: Any, graph: bytes, answered: Any
) -> None:
    with ZipFile(BytesIO(graph)) as archive:
        name = next(n for n in archive.namelist() if n.endswith("models/model.json"))
        model = archive.read(name)
    response = service.post(model, wait=60)
    bare, whole = response.json(), answered.json()
    # The archive also records the model's mode and code, so it is another graph.
    assert "model" not in bare["stages"][0]["program"]
    del whole["stages"][0]["program"]["model"]
    assert bare["stages"] == whole["stages"]
    assert bare["costs"] == whole["costs"]


@pytest.mark.parametrize(
    "request_",
    [
        {"mesh": {"shape": [4, 1]}},
        {"mesh": {"shape": [2, 2], "axes": ["a", "b"]}},
        {"mesh": {"shape": [2, 2], "intra_bandwidth": 1e11, "inter_bandwidth": 1e10}},
        {"mesh": {"shape": [2, 2]}, "options": {"mode": "inference"}},
        {"mesh": {"shape": [2, 2]}, "options": {"solver": {"seed": 1}}},
    ],
)
def test_another_mesh_or_option_is_another_plan(
    service: Any, graph: bytes, answered: Any, request_: dict[str, Any]
) -> None:
    response = service.post(graph, request_, wait=60)
    assert response.status_code == 200
    assert response.headers["Autoshard-Cache"] == "miss"
    assert response.json()["id"] != answered.json()["id"]


def test_a_whole_mesh_document_means_the_same_as_its_shorthand(
    service: Any, graph: bytes, answered: Any
) -> None:
    document = f'{{"mesh": {mesh_to_json(make_mesh((2, 2)))}}}'
    response = service.post(graph, document, wait=60)
    assert response.headers["Autoshard-Cache"] == "hit"
    assert response.content == answered.content


def test_a_plan_is_immutable_and_has_an_etag(service: Any, answered: Any) -> None:
    path = answered.headers["Content-Location"]
    response = service.http.get(path)
    assert response.content == answered.content
    assert response.headers["ETag"].removeprefix("W/") == f'"{answered.json()["id"]}"'
    assert "immutable" in response.headers["Cache-Control"]


@pytest.mark.parametrize("known", ['"{id}"', 'W/"{id}"', '"other", "{id}"', "*"])
def test_a_caller_that_has_the_plan_is_told_so(service: Any, answered: Any, known: str) -> None:
    path = answered.headers["Content-Location"]
    headers = {"If-None-Match": known.format(id=answered.json()["id"])}
    response = service.http.get(path, headers=headers)
    assert response.status_code == 304
    assert response.content == b""
    assert response.headers["ETag"].removeprefix("W/") == f'"{answered.json()["id"]}"'


def test_a_caller_that_has_another_plan_gets_this_one(service: Any, answered: Any) -> None:
    path = answered.headers["Content-Location"]
    response = service.http.get(path, headers={"If-None-Match": '"other"'})
    assert response.status_code == 200


@pytest.mark.thorough
def test_a_budget_that_is_too_small_is_an_outcome_with_a_reason(service: Any, graph: bytes) -> None:
    request = {"mesh": {"shape": [2, 2]}, "options": {"memory": {"budget": 100}}}
    response = service.post(graph, request, wait=60)
    assert response.status_code == 200
    plan = Plan.from_json(response.content)
    assert plan.certificate.status == "infeasible"
    assert "memory_budget" in plan.reason
    assert service.post(graph, request).headers["Autoshard-Cache"] == "hit"


def test_named_modules_are_recomputed(service: Any) -> None:
    model, inputs = meta(residuals, layers=3)
    layers = export_model(model, (), inputs)

    def request(names: list[str], activation_checkpointing: str) -> Any:
        options = {
            "checkpointed_modules": names,
            "activation_checkpointing": activation_checkpointing,
        }
        return service.post(layers, {"mesh": {"shape": [2, 2]}, "options": options}, wait=60)

    plan = Plan.from_json(request(["layers.1"], "always").content)
    (stage,) = plan.stages
    program = graph_from_json(stage.program)
    (checkpoint,) = stage.checkpoints
    assert program.nodes[program.numbers[checkpoint.first]].module.startswith("layers.1")
    assert plan.options.memory.checkpointed_modules == ("layers.1",)
    unknown = request(["blocks.*"], "auto")
    assert unknown.status_code == 422
    assert "no module matches 'blocks.*'; there are layers," in unknown.json()["detail"]
    contradiction = request(["layers.1"], "never")
    assert contradiction.status_code == 422
    assert "leave one of them out" in contradiction.json()["detail"]


def test_equal_requests_at_once_share_one_job(
    start_service: Any, graph: bytes, program: Any
) -> None:
    service = start_service(executor=program("hang"), num_workers=2)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: service.post(graph), range(4)))
    assert [a.status_code for a in answers] == [202] * 4
    assert len({a.json()["id"] for a in answers}) == 1
    other = service.post(graph, {"mesh": {"shape": [4]}})
    assert other.json()["id"] != answers[0].json()["id"]


def test_two_clients_at_once_get_the_same_plan_from_one_solve(
    start_service: Any, graph: bytes
) -> None:
    solves = []

    def count(work: Any, on_progress: Any, cancel: Any) -> Any:
        solves.append(work)
        return solve(work, on_progress, cancel)

    service = start_service(executor=ThreadExecutor(count), num_workers=2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: service.post(graph, wait=60), range(2))
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert len(solves) == 1


def test_a_plan_that_time_ran_out_on_is_answered_but_not_kept(
    start_service: Any, graph: bytes
) -> None:
    def run_out(work: Any, on_progress: Any, cancel: Any) -> Any:
        solved = solve(work, on_progress, cancel)
        return type(solved)(solved.document, cacheable=False)

    service = start_service(executor=ThreadExecutor(run_out))
    for _ in range(2):
        response = service.post(graph, wait=60)
        assert response.status_code == 200
        assert response.headers["Autoshard-Cache"] == "miss"
        assert "ETag" not in response.headers
    assert service.http.get(f"/v1/plans/{response.json()['id']}").status_code == 404


def test_topologies_and_versions_are_listed(service: Any) -> None:
    assert "h100-sxm" in service.http.get("/v1/topologies").json()["topologies"]
    assert "autoshard" in service.http.get("/version").json()["versions"]
    assert service.http.get("/livez").status_code == 200
    assert service.is_up()


def test_every_answer_names_its_request(service: Any) -> None:
    given = service.http.get("/livez", headers={"X-Request-ID": "mine-1"})
    assert given.headers["X-Request-ID"] == "mine-1"
    made = service.http.get("/livez", headers={"X-Request-ID": "not {an} id"})
    assert len(made.headers["X-Request-ID"]) == 32
