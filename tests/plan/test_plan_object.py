"""A plan in a Python session: access by name, files, and how it is shown."""

from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate, Shard

from autoshard.errors import AutoshardError, OptionError, PlanError, UnknownNameError
from autoshard.plan import Plan, PlanOptions


def test_placements_by_name_are_those_of_the_document(megatron: Plan) -> None:
    (stage,) = megatron.stages
    for parameter in stage.parameters:
        placements = megatron[parameter.target]
        assert tuple(map(repr, placements)) == parameter.placements
        assert all(isinstance(placement, Replicate | Shard) for placement in placements)
    assert set(megatron.placements) == {p.target for p in stage.parameters}
    assert any(isinstance(p, Shard) for p in megatron[stage.parameters[0].target])


def test_an_unknown_name_says_which_was_meant(megatron: Plan) -> None:
    known = megatron.stages[0].parameters[0].target
    with pytest.raises(UnknownNameError, match=f"did you mean '{known}'"):
        _ = megatron[known + "s"]
    with pytest.raises(KeyError):
        _ = megatron.placements["nothing like it"]
    assert issubclass(UnknownNameError, AutoshardError)
    assert known in megatron.placements
    assert known + "s" not in megatron.placements
    assert len(repr(megatron.placements)) < 100


def test_a_saved_plan_is_loaded(megatron: Plan, tmp_path: Path) -> None:
    megatron.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == megatron
    with pytest.raises(OptionError, match="cannot write"):
        megatron.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(PlanError, match="there is no file"):
        Plan.load(tmp_path / "other.json")


def test_a_plan_is_shown_in_one_line(megatron: Plan) -> None:
    text = str(megatron)
    assert repr(megatron) == f"<{text}>"
    assert len(text) < 200
    assert "\n" not in text
    for part in (megatron.id[:12], "training", "axis0=2 x axis1=2", "optimal"):
        assert part in text


def test_what_a_notebook_shows_is_escaped(megatron: Plan) -> None:
    assert "Certificate" in megatron._repr_html_()
    page = without_stages(megatron, "<script>")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def without_stages(plan: Plan, reason: str) -> Plan:
    changed = {"stages": (), "costs": None, "memory": None, "reason": reason}
    return plan.model_copy(update=changed)


def test_a_document_without_a_plan_says_why(megatron: Plan) -> None:
    empty = without_stages(megatron, "it does not fit")
    assert "it does not fit" in str(empty)
    assert not empty.placements


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_budget": -1}, "^memory_budget: "),
        ({"mode": "evaluation"}, "^mode: .*training"),
        ({"memory_budgets": 1}, "no option 'memory_budgets'; did you mean 'memory_budget'"),
        ({"xyzzy": 1}, "the options are mode, "),
        ({"pins": {"parameter": {}}}, "pins.parameter"),
    ],
)
def test_errors_of_options_are_ours(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PlanOptions(**given)  # type: ignore[arg-type]  # wrong on purpose
