"""Rules that come with a request: they make the plan, and the service runs no operator."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from support import custom_operators
from support.models import Case

from autoshard.client import Client
from autoshard.discovery import discover
from autoshard.graph import export_model, load_graph, rules_to_json
from autoshard.plan import Plan, check_plan
from autoshard_server import ThreadExecutor
from autoshard_server.solving import solve

LARGE = partial(custom_operators.mixer, batch=64, sequence=256, features=512)
"""Large enough that cutting it pays."""


def exported(case: Case) -> bytes:
    model, kwargs = case
    return export_model(model, (), kwargs)


@pytest.fixture(scope="module")
def archive() -> bytes:
    return exported(LARGE())


@pytest.fixture(scope="module")
def rules(archive: bytes) -> list[dict[str, Any]]:
    return rules_to_json(discover(load_graph(archive)).graph.rules)


def layouts(plan: Plan, packet: str) -> tuple[str, ...]:
    (stage,) = plan.stages
    operators = {node["name"]: node["operator"] for node in stage.program["nodes"]}
    (node,) = (n for n in stage.nodes if operators[n.name] == f"shardtest.{packet}.default")
    return node.outputs


def ask(service: Any, archive: bytes, rules: Any) -> Any:
    return service.post(archive, {"mesh": {"shape": [4]}, "rules": rules}, wait=60)


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
    sizes = [[letter, 2 * size] for letter, size in rules[1]["sizes"]]
    other = [rules[0], {**rules[1], "sizes": sizes}, *rules[2:]]
    plan = Plan.from_json(ask(service, archive, other).content)
    assert layouts(plan, "gate")[0] in {"I", "R"}


def test_a_rule_whose_outputs_do_not_fit_is_named(
    service: Any, archive: bytes, rules: list[dict[str, Any]]
) -> None:
    answer = ask(service, archive, [{**rules[1], "outputs": [["d0", "d1", "d1"]]}])
    assert answer.status_code == 422
    wrong = {**rules[1], "outputs": [["d1", "d0", "d2"]]}
    answer = ask(service, archive, [wrong])
    assert answer.status_code == 422, answer.text
    assert "shardtest.gate.default" in answer.json()["detail"]


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
