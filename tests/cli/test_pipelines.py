"""Commands with plans of several pipeline stages."""

import json
from pathlib import Path

import pytest
from support.command_line import autoshard
from support.models import gpt2, meta

from autoshard.base.quantities import format_seconds
from autoshard.cli.rendering.output import console
from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan, stage_modules, stage_plan
from autoshard.planner import explain
from autoshard.report import compare_plans, fold_parameters, operator_coverage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2, exported."""
    module, kwargs = meta(gpt2, layers=4)
    path = tmp_path_factory.mktemp("pipelines") / "gpt2.pt2"
    path.write_bytes(export_model(module, (), kwargs))
    return path


@pytest.fixture(scope="module")
def planned(model: Path) -> Path:
    """A plan of it: four stages that begin at its layers, on two pipeline ranks."""
    path = model.with_name("pipeline.json")
    result = autoshard(
        *("plan", model, "--mesh", "2,2", "--topology", "h100-sxm", "--no-cache", "-o", path),
        *("--balance", "1,1,1,1", "--schedule", "Interleaved1F1B", "--stages-per-rank", "2"),
        *("--micro-batches", "4"),
    )
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def one_stage(model: Path) -> Path:
    path = model.with_name("plan.json")
    result = autoshard(
        "plan", model, "--mesh", "2,2", "--no-cache", "--micro-batches", "4", "-o", path
    )
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def pipeline(planned: Path) -> Plan:
    return Plan.from_json(planned.read_bytes())


def test_a_pipeline_is_shown(
    planned: Path, pipeline: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 200)
    summary, tables = autoshard("show", planned), autoshard("show", planned, "--all")
    assert (summary.exit_code, tables.exit_code) == (0, 0), tables.output
    output = summary.output + tables.output
    described = pipeline.pipeline
    assert described is not None
    assert pipeline.costs is not None
    for text in (
        "Pipeline of 4 stages on 2 pipeline ranks, schedule Interleaved1F1B, 4 micro-batches",
        f"idle for {described.bubble:.1%}",
        "transformer.h.1",
        "lm_head.weight is held by stages 0, 3",
        "2 to 3",
        format_seconds(pipeline.costs.idle),
        "It holds for these pipelines: ",
    ):
        assert text in output
    for stage in described.stages:
        assert format_seconds(stage.times.forward) in output


def test_modules_of_stages_are_named(pipeline: Plan) -> None:
    found = stage_modules(pipeline)
    assert [modules.first for modules in found[1:]] == [f"transformer.h.{n}" for n in (1, 2, 3)]
    assert [modules.last for modules in found[:3]] == [f"transformer.h.{n}" for n in (0, 1, 2)]
    assert found[1].whole == ("transformer.h.1",)
    assert "transformer.wte" in found[0].whole
    assert {"transformer.ln_f", "lm_head"} <= set(found[3].whole)


def test_a_pipeline_is_checked_against_its_archive(model: Path, planned: Path) -> None:
    assert autoshard("check", model, planned).exit_code == 0
    document = json.loads(planned.read_text())
    document["pipeline"]["bubble"] = 0.0
    wrong = planned.with_name("wrong.json")
    wrong.write_text(json.dumps(document))
    result = autoshard("check", model, wrong)
    assert result.exit_code == 1
    assert "ranks are idle for" in result.output


def test_a_choice_is_explained_in_its_stage(planned: Path, pipeline: Plan) -> None:
    name = "transformer.h.2.mlp.c_fc.weight"
    found = explain(None, pipeline, name)
    own, program = stage_plan(pipeline, 2)
    assert found.stage == 2
    assert own.certificate.objective == found.objective
    assert any(i.target == name for i in program.inputs)
    chosen = next(alternative for alternative in found.alternatives if alternative.chosen)
    placed = next(p for p in pipeline.stages[2].parameters if p.target == name)
    assert chosen.layouts == placed.layout
    result = autoshard("explain", planned, name)
    assert result.exit_code == 0, result.output
    assert "micro-batches of stage 2" in " ".join(result.output.split())
    assert explain(None, pipeline, "0").stage == 3
    result = autoshard("explain", planned, "nobody")
    assert result.exit_code == 1
    assert "no node, value, input or output is named" in result.output


def test_a_pipeline_is_compared_with_one_stage(
    planned: Path, one_stage: Path, pipeline: Plan
) -> None:
    other = Plan.from_json(one_stage.read_bytes())
    difference = compare_plans(pipeline, other)
    changes = {change.name: change for change in difference.pipeline}
    assert changes["schedule"].before == "Interleaved1F1B"
    assert changes["stage 1"].before == "transformer.h.1 to transformer.h.1 on devices 2 to 3"
    assert changes["stage 1"].after == ""
    assert {figure.name for figure in difference.costs} >= {"idle", "total"}
    assert not any(change.name in ("add_1", "mul_3") for change in difference.inputs)
    assert compare_plans(pipeline, pipeline).is_empty
    assert "idle" not in {figure.name for figure in compare_plans(other, other).costs}
    result = autoshard("compare", planned, one_stage)
    assert result.exit_code == 0, result.output
    assert "Parts of the pipeline that differ" in result.output


def test_coverage_counts_the_work_of_all_stages(model: Path, planned: Path, pipeline: Plan) -> None:
    found = operator_coverage(load_graph(model.read_bytes()), pipeline)
    described = pipeline.pipeline
    assert described is not None
    assert found.total == sum(summary.costs.total for summary in described.stages)
    times = [node.time + node.communication for s in pipeline.stages for node in s.nodes]
    assert sum(use.time or 0.0 for use in found.operators) == pytest.approx(sum(times))
    result = autoshard("coverage", model, planned)
    assert result.exit_code == 0, result.output


def test_tied_parameters_count_once(pipeline: Plan, one_stage: Path) -> None:
    counts = [
        sum(row.count for row in fold_parameters(plan))
        for plan in (pipeline, Plan.from_json(one_stage.read_bytes()))
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (("profile", "PLAN", "--steps", "1"), "a profile needs a plan of one stage"),
        (("mase", "write", "PLAN", "solution.pkl"), "a solution of MASE needs a plan of one"),
    ],
)
def test_commands_for_one_stage_say_so(
    planned: Path, command: tuple[str, ...], complaint: str
) -> None:
    result = autoshard(*(planned if part == "PLAN" else part for part in command))
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "the plan is a pipeline of 4 stages" in text
    assert complaint in text
    assert "plan with --stages 1" in text


def test_a_schedule_that_does_not_fit_is_refused(model: Path) -> None:
    result = autoshard("plan", model, "--mesh", "2", "--stages", "2", "--schedule", "2F2B")
    assert result.exit_code == 2
    assert "schedule" in result.output


def test_a_search_shows_which_meshes_have_a_pipeline(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 200)
    best = tmp_path / "best.json"
    result = autoshard(
        *("search", model, "--devices", "4", "--stages", "auto", "--micro-batches", "4"),
        *("--max-axes", "2", "--cache", tmp_path / "cache", "--schedule", "1F1B"),
        *("-o", best),
    )
    assert result.exit_code == 0, result.output
    for text in ("pp=2 x axis1=2", "pp=4", "one stage", "2 stages, 1F1B", "idle"):
        assert text in result.output
    assert Plan.from_json(best.read_bytes()).found
