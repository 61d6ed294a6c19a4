"""Plans of several pipeline stages over HTTP."""

import tomllib
from typing import Any

import pytest
from support.models import llama, meta

from autoshard.checker import check_plan
from autoshard.client import Client
from autoshard.errors import RequestRejectedError
from autoshard.graph import export_model
from autoshard.graph.load import load_graph
from autoshard.plan import Plan, PlanOptions

OPTIONS = PlanOptions(balance=(1, 1), schedule="1F1B", micro_batches=4, algo="megatron")


@pytest.fixture(scope="module")
def archive() -> bytes:
    model, kwargs = meta(llama, layers=2)
    return export_model(model, (), kwargs)


@pytest.fixture(scope="module")
def client(service: Any) -> Any:
    with Client(service.url) as found:
        yield found


@pytest.fixture(scope="module")
def plan(client: Client, archive: bytes) -> Plan:
    result = client.request_plan(archive, mesh=(2, 2), options=OPTIONS)
    assert result.plan is not None
    assert result.plan.found, result.plan.reason
    assert len(result.plan.stages) == 2
    return result.plan


def test_a_pipeline_is_planned_checked_and_kept(client: Client, archive: bytes, plan: Plan) -> None:
    assert check_plan(plan, load_graph(archive)) == ()
    again = client.request_plan(archive, mesh=(2, 2), options=OPTIONS)
    assert again.cached
    assert again.plan == plan


def test_a_pipeline_is_listed_and_looked_up(service: Any, plan: Plan) -> None:
    listed = service.http.get("/v1/plans", params={"graph_digest": plan.graph.digest}).json()
    assert plan.id in {row["id"] for row in listed["plans"]}
    assert Plan.from_json(service.http.get(f"/v1/plans/{plan.id}").content) == plan


def test_a_choice_of_a_stage_is_explained(service: Any, plan: Plan) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    answer = service.http.post(
        f"/v1/plans/{plan.id}:explain", json={"name": name}, headers={"Prefer": "wait=60"}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["stage"] == 1
    assert any(alternative["chosen"] for alternative in answer.json()["alternatives"])


def test_pipelines_are_compared_exported_and_traced(
    client: Client, service: Any, archive: bytes, plan: Plan
) -> None:
    single = client.request_plan(archive, mesh=(2, 2), options=PlanOptions(micro_batches=4)).plan
    assert single is not None
    difference = service.http.post(
        "/v1/plans:compare", json={"before": plan.id, "after": single.id}
    )
    assert difference.status_code == 200, difference.text
    assert {"schedule", "stage 0", "stage 1"} <= {c["name"] for c in difference.json()["pipeline"]}
    text = service.http.get(f"/v1/plans/{plan.id}/export", params={"to": "torchtitan"}).text
    assert tomllib.loads(text)["parallelism"]["pipeline_parallel_degree"] == 2
    refused = service.http.get(f"/v1/plans/{plan.id}/export", params={"to": "fsdp2"})
    assert refused.status_code == 422
    assert refused.json()["type"].endswith("#plan")
    assert "2 pipeline stages" in refused.json()["detail"]
    trace = service.http.get(f"/v1/plans/{plan.id}/trace")
    assert trace.status_code == 200
    assert trace.json()["traceEvents"]
    assert client.trace(plan.id) == client.trace(plan) == trace.text


def test_a_pipeline_is_validated_on_its_sub_mesh(
    client: Client, archive: bytes, plan: Plan
) -> None:
    found = client.validate(archive, mesh=(2, 2), options=OPTIONS)
    single = client.validate(
        archive, mesh=(2,), options=PlanOptions(micro_batches=4, algo="megatron")
    )
    assert found.plan_id == plan.id
    assert found.size.num_strategies == single.size.num_strategies
    assert plan.memory is not None
    assert 0 < found.size.memory_bound <= plan.memory.peak
    tight = OPTIONS.with_values(memory_budget=1000)
    small = client.validate(archive, mesh=(2, 2), options=tight)
    assert small.size.feasible is False


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"balance": [1, 2]}, "sums to 3, but the program has 2 layers"),
        (
            {"balance": None, "stages": 2, "cuts": ["before:nobody"]},
            "before:nobody.: the program has no",
        ),
        ({"balance": None, "stages": 3}, "do not divide the 4 devices"),
        ({"schedule": "ZBVZeroBubble", "stages_per_rank": 1}, "exactly 2 stages per pipeline"),
    ],
)
def test_options_that_do_not_fit_are_named(
    client: Client, archive: bytes, changes: dict[str, Any], complaint: str
) -> None:
    options = PlanOptions(**OPTIONS.given | changes)
    with pytest.raises(RequestRejectedError, match=complaint):
        client.request_plan(archive, mesh=(2, 2), options=options)
