import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jsonschema
import pytest
import torch
from support.models import Planner, gpt2, meta

from autoshard import parallelize
from autoshard.checker import check_plan
from autoshard.errors import PlanError
from autoshard.plan import Plan, PlanOptions
from autoshard.plan.schema import SCHEMA_PATH, plan_schema
from autoshard.report import fold_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def test_a_plan_reads_back(megatron: Plan) -> None:
    assert Plan.from_json(megatron.to_json()) == megatron


def test_the_committed_schema_is_the_code() -> None:
    assert SCHEMA_PATH.read_text(encoding="utf-8") == plan_schema()


def test_plans_obey_the_schema(megatron: Plan) -> None:
    jsonschema.validate(json.loads(megatron.to_json()), json.loads(plan_schema()))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "document"),
        ("[]", "document"),
        ('{"version": 3}', "version"),
        ('{"version": 2}', "id"),
        ('{"version": 1}', "id"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, place: str) -> None:
    with pytest.raises(PlanError, match=place):
        Plan.from_json(text)


def test_an_unknown_field_is_refused(megatron: Plan) -> None:
    document = json.loads(megatron.to_json())
    document["surprise"] = 1
    with pytest.raises(PlanError, match="surprise"):
        Plan.from_json(json.dumps(document))


def test_a_plan_without_stages_needs_a_reason(megatron: Plan) -> None:
    document = json.loads(megatron.to_json())
    document["stages"] = []
    with pytest.raises(PlanError, match="reason"):
        Plan.from_json(json.dumps(document))


def test_layers_that_are_alike_fold_into_one_row(planned: Planner) -> None:
    rows = fold_parameters(planned(meta(gpt2, layers=4), (2, 2)))
    folded = {row.name: row.count for row in rows}
    assert folded["transformer.h.{0..3}.attn.c_attn.weight"] == 4
    assert folded["transformer.ln_f.weight"] == 1
    assert sum(folded.values()) == 4 * 12 + 4


VERSION_1 = sorted((Path(__file__).parent / "version_1").glob("*.json"))


@pytest.mark.parametrize("path", VERSION_1, ids=lambda path: path.stem)
def test_plans_of_version_1_are_read(path: Path) -> None:
    """Files were written before options had groups; all that they say is still there."""
    before = json.loads(path.read_bytes())
    plan = Plan.load(path)
    assert (plan.version, before["version"]) == (2, 1)
    after = json.loads(plan.to_json())
    for name, value in before["options"].items():
        kept = plan.options.value(name)
        same = PlanOptions(**{"runtime": "other"} | {name: value}).value(name)
        assert kept == same, name
    for old, new in zip(before.pop("baselines"), after["baselines"], strict=True):
        assert old.items() <= new.items()
    differing = {name for name in before if before[name] != after[name]}
    assert differing == {"version", "options"}
    assert Plan.from_json(plan.to_json()) == plan
    if plan.found:
        check_plan(plan)


def test_a_plan_of_version_1_for_another_framework_is_not_applied() -> None:
    found = {path.stem: Plan.load(path).options.runtime.name for path in VERSION_1}
    assert found.pop("another_runtime") == "other"
    assert set(found.values()) == {"autoshard"}
    foreign = Plan.load(VERSION_1[0])
    assert VERSION_1[0].stem == "another_runtime"
    assert "priced for other, not for autoshard's runtime" in foreign.summary().splitlines()[0]
    assert "with other" in str(foreign)
    with pytest.raises(PlanError, match=r"the plan is priced for other, .* runtime='autoshard'"):
        parallelize(torch.nn.Linear(2, 2), foreign, cast("DeviceMesh", None))
