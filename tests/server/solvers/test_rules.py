"""Sharding rules that are sent with a request; the service does not run custom operators."""

import json
import zipfile
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from support import custom_operators
from support.models import Case

from autoshard.checker import check_plan
from autoshard.client import Client
from autoshard.discovery import discover
from autoshard.errors import RequestRejectedError
from autoshard.graph import RULES_VERSION, export_model, load_graph, rules_to_json
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import plan_id
from autoshard_server import ThreadExecutor
from autoshard_server.requests import PlanQuery, PlanRequestBody
from autoshard_server.settings import Settings
from autoshard_server.solvers.solving import solve

LARGE = partial(custom_operators.mixer, batch=64, sequence=256, features=512)
"""Large enough that cutting it pays."""


def exported(case: Case) -> bytes:
    model, kwargs = case
    return export_model(model, (), kwargs)


@pytest.fixture(scope="module", autouse=True)
def enough_time() -> Iterator[None]:
    """Other tests of the machine may take the time that a call usually needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoshard.discovery.program._TIME_PER_CALL", 600.0)
        yield


@pytest.fixture(scope="module")
def archive() -> bytes:
    return exported(LARGE())


@pytest.fixture(scope="module")
def rules(archive: bytes) -> list[dict[str, Any]]:
    return rules_to_json(discover(load_graph(archive), time_limit=600).graph.rules)


def gate_rule(rules: list[dict[str, Any]]) -> dict[str, Any]:
    (rule,) = (rule for rule in rules if rule["operator"] == "shardtest.gate.default")
    return rule


def layouts(plan: Plan, packet: str) -> tuple[str, ...]:
    (stage,) = plan.stages
    operators = {node["name"]: node["operator"] for node in stage.program["nodes"]}
    (node,) = (n for n in stage.nodes if operators[n.name] == f"shardtest.{packet}.default")
    return node.outputs


def ask(service: Any, archive: bytes, rules: Any) -> Any:
    return service.post(archive, {"mesh": {"shape": [4]}, "rules": rules}, wait=60)


@pytest.mark.thorough
def test_rules_make_another_plan_under_another_id(
    service: Any, archive: bytes, rules: list[dict[str, Any]]
) -> None:
    with_rules = Plan.from_json(ask(service, archive, rules).content)
    without = Plan.from_json(ask(service, archive, []).content)
    assert "S" in layouts(with_rules, "gate")[0]
    assert layouts(without, "gate")[0] in {"I", "R"}
    assert with_rules.id != without.id
    assert with_rules.costs is not None
    assert without.costs is not None
    assert with_rules.costs.total < without.costs.total
    assert check_plan(with_rules) == ()
    again = ask(service, archive, rules)
    assert again.headers["Autoshard-Cache"] == "hit"


@pytest.mark.thorough
def test_rules_that_no_call_needs_change_nothing(
    service: Any, graph: bytes, rules: list[dict[str, Any]]
) -> None:
    assert ask(service, graph, rules).json()["id"] == ask(service, graph, []).json()["id"]


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [["d0", 4]]},
        {"sizes": [[f"d{i}", 2] for i in range(65)]},
        {"linear": [[7]]},
        {"linear": [[0]] * 9},
        {"arguments": [["x", {"ref": "a name"}]]},
        {"dtypes": ["float31"]},
        {"whole": ["z"]},
        {"unknown": 1},
    ],
)
def test_rules_that_contradict_themselves_are_refused(
    service: Any, archive: bytes, rules: list[dict[str, Any]], change: dict[str, Any]
) -> None:
    answer = ask(service, archive, [{**rules[0], **change}, *rules[1:]])
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"] == "/rules"


def test_a_rule_of_other_shapes_is_not_for_these_calls(
    service: Any, archive: bytes, rules: list[dict[str, Any]]
) -> None:
    gate = gate_rule(rules)
    sizes = [[letter, 2 * size] for letter, size in gate["sizes"]]
    other = [{**rule, "sizes": sizes} if rule is gate else rule for rule in rules]
    plan = Plan.from_json(ask(service, archive, other).content)
    assert layouts(plan, "gate")[0] in {"I", "R"}


def test_a_rule_whose_outputs_do_not_fit_is_named(
    service: Any, archive: bytes, rules: list[dict[str, Any]]
) -> None:
    repeated = [[["d0"], ["d1"], ["d1"]]]
    answer = ask(service, archive, [{**gate_rule(rules), "outputs": repeated}])
    assert answer.status_code == 422
    assert "repeated letters" in answer.json()["detail"]
    wrong = {**gate_rule(rules), "outputs": [[["d1"], ["d0"], ["d2"]]]}
    answer = ask(service, archive, [wrong])
    assert answer.status_code == 422, answer.text
    assert "shardtest.gate.default" in answer.json()["detail"]


@pytest.mark.thorough
def test_the_client_tries_operators_and_sends_rules(start_service: Any, archive: bytes) -> None:
    running = start_service(executor=ThreadExecutor(solve))
    model, kwargs = LARGE()
    with Client(running.url) as client:
        plan = client.plan(model, (), kwargs, mesh=(4,))
        assert "S" in layouts(plan, "gate")[0]
        assert client.request_plan(archive, mesh=(4,)).cached
        whole = client.plan(archive, mesh=(4,), discover=False)
        assert layouts(whole, "gate")[0] in {"I", "R"}


calls: list[torch.Size] = []


@torch.library.custom_op("shardtest::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.shape)
    return x.exp()


counted.register_fake(torch.empty_like)


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counted(self.layer(x))


def test_the_service_runs_no_custom_operator(start_service: Any) -> None:
    archive = export_model(Counted(), (torch.zeros(8, 16),))
    calls.clear()
    running = start_service(executor=ThreadExecutor(solve))
    request = {"mesh": {"shape": [2]}, "options": {"mode": "inference"}}
    assert Plan.from_json(running.post(archive, json.dumps(request), wait=60).content).found
    assert calls == []
    with Client(running.url) as client:
        client.plan(archive, mesh=(2,), mode="inference")
    assert calls


class Failing(Counted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return broken(self.layer(x))


@torch.library.custom_op("shardtest::broken", mutates_args=())
def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"it never runs, on {x.dim()} dims or others")


broken.register_fake(torch.empty_like)


def test_the_client_warns_of_operators_that_run_whole(
    start_service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    archive = export_model(Failing(), (torch.zeros(8, 16),))
    running = start_service(executor=ThreadExecutor(solve))
    with Client(running.url) as client:
        client.plan(archive, mesh=(2,), mode="inference")
        client.plan(archive, mesh=(2,), mode="inference", discover=False)
    (record,) = (r for r in caplog.records if r.name == "autoshard.requests.models")
    assert record.levelname == "WARNING"
    assert "shardtest.broken.default is replicated" in record.getMessage()
    assert "it never runs" in record.getMessage()


def test_the_client_reads_more_than_a_service_would(
    start_service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller's own archive is no attack, however well it is compressed."""
    packed = BytesIO()
    with (
        zipfile.ZipFile(BytesIO(export_model(Failing(), (torch.zeros(8, 16),)))) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for item in old.infolist():
            padding = b" " * (1 << 23) if item.filename.endswith("models/model.json") else b""
            new.writestr(item.filename, old.read(item) + padding)
    with (
        Client(start_service(executor=ThreadExecutor(solve)).url) as client,
        pytest.raises(RequestRejectedError, match="zip bomb"),
    ):
        client.plan(packed.getvalue(), mesh=(2,), mode="inference")
    assert "shardtest.broken.default is replicated" in caplog.text


class Distances(Counted):
    """Calls an operator of ATen that has no rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(self.layer(x), x)


def test_a_plan_is_not_kept_where_there_was_no_time_to_try(
    start_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = export_model(Distances(), (torch.zeros(32, 8, 16),))
    running = start_service(executor=ThreadExecutor(solve))
    with monkeypatch.context() as patched:
        patched.setattr("autoshard_server.solvers.solving._DISCOVERY_SECONDS", 0.0)
        untried = ask(running, archive, [])
        assert "rules" not in untried.json()["stages"][0]["program"]
    full = ask(running, archive, [])
    assert full.headers["Autoshard-Cache"] == "miss"
    assert full.json()["stages"][0]["program"]["rules"]
    assert full.json()["id"] == untried.json()["id"]
    assert ask(running, archive, []).headers["Autoshard-Cache"] == "hit"


@pytest.mark.thorough
def test_an_id_says_what_would_find_rules_where_there_are_none(
    archive: bytes, graph: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, known = load_graph(archive), load_graph(graph)
    graphs = (bare, discover(bare, time_limit=600).graph, known)

    def ids() -> list[str]:
        return [plan_id(program, make_mesh([4]), PlanOptions()) for program in graphs]

    before = ids()
    monkeypatch.setattr("autoshard.planner.planner.RULES_VERSION", RULES_VERSION + 1)
    after = ids()
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True]


def test_a_question_says_what_would_find_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanRequestBody.model_validate_json('{"mesh": {"shape": [4]}}')
    before = PlanQuery(request, "0" * 64, Settings()).digest
    assert PlanQuery(request, "0" * 64, Settings()).digest == before
    monkeypatch.setattr("autoshard_server.digests.RULES_VERSION", RULES_VERSION + 1)
    assert PlanQuery(request, "0" * 64, Settings()).digest != before
