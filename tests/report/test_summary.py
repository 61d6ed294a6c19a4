"""Cost items and throughput, and the text of a plan's summary."""

import pytest
from support.meshes import slow_devices
from support.models import Planner, bert, gpt2, llama, meta, mlp, resnet, small_graph
from support.transformer_plans import planned

from autoshard.mesh import make_mesh
from autoshard.plan import Plan
from autoshard.plan.predictions import three_digits
from autoshard.pricing.throughput import Batch, batch_of, plan_work
from autoshard.report import restriction_sentences
from autoshard.report.cost_items import cost_items


@pytest.fixture(scope="module")
def pipeline(planned: Planner) -> Plan:
    mesh = slow_devices(pp=2, dp=2)
    return planned(small_graph(llama), mesh, stages=2, micro_batches=4)


@pytest.mark.parametrize("build", [gpt2, bert, resnet])
def test_cost_items_add_up_to_the_step(build: object) -> None:
    plan = planned(build, "2x2", "free")
    assert plan.costs is not None
    items = cost_items(plan)
    assert sum(item.seconds for item in items) == pytest.approx(plan.costs.total)
    assert sum(item.share for item in items) == pytest.approx(1)
    # Inside operators and between them, every collective is listed.
    words = " ".join(item.name for item in items)
    assert {c.kind.replace("_", "-") for c in plan.collectives} <= set(
        words.replace("/", " ").split()
    )


def test_cost_items_of_a_pipeline_are_of_its_busiest_rank(pipeline: Plan) -> None:
    assert pipeline.costs is not None
    items = {item.name: item.seconds for item in cost_items(pipeline)}
    assert sum(items.values()) == pytest.approx(pipeline.costs.total)
    assert items["waiting for other pipeline ranks"] == pytest.approx(pipeline.costs.idle)
    assert "reading of inputs and parameters" in items


def test_batches_are_of_all_micro_batches(planned: Planner, pipeline: Plan) -> None:
    assert batch_of(pipeline) == Batch(16, 8)
    images = planned(small_graph(resnet), slow_devices(dp=2))
    found = batch_of(images)
    assert found == Batch(4, None)
    assert found.tokens is None


def test_flops_and_utilisation_of_a_network_of_two_layers(planned: Planner) -> None:
    plan = planned(meta(mlp, 64, 32, 128, 16), slow_devices(dp=2))
    forward = 2 * 64 * (32 * 128 + 128 * 16)
    # The input requires no gradient, so the first layer has one product in backward.
    backward = 2 * 64 * (32 * 128 + 2 * 128 * 16)
    assert plan_work(plan).flops == {"float32": forward + backward}
    assert plan.costs is not None
    assert plan.performance is not None
    share = (forward + backward) / (1e7 * 2 * plan.costs.total)
    assert plan.performance.mfu == pytest.approx(share)


def test_every_width_has_the_same_words_and_a_pipe_40_lines(pipeline: Plan) -> None:
    for plan in (pipeline, planned(llama, "2x2", "sequence")):
        commands = ["autoshard show plan.json --all", "autoshard check llama.pt2 plan.json"]
        whole = plan.summary(commands=commands)
        assert len(whole.splitlines()) <= 40
        for width in (80, 120):
            text = plan.summary(width=width, commands=commands)
            assert all(len(line) <= width for line in text.splitlines())
            assert sorted(text.split()) == sorted(whole.split())


def test_the_cost_of_restrictions_is_said(planned: Planner) -> None:
    options = {"skip_fully_replicated": True, "pins": {"parameters": {"lm_head.weight": "I"}}}
    plan = planned(small_graph(gpt2), slow_devices(dp=2), comparisons=True, **options)
    assert plan.unrestricted is not None
    assert plan.unrestricted.step_time is not None
    assert plan.costs is not None
    ratio = plan.costs.total / plan.unrestricted.step_time
    assert f"this plan takes {ratio:.2f} x as long" in plan.summary()
    assert restriction_sentences(plan)[0] in plan.summary()
    assert "Without " not in planned(small_graph(gpt2), slow_devices(dp=2)).summary()


def test_where_the_time_of_restrictions_goes_is_said(planned: Planner) -> None:
    mesh = make_mesh((2, 2), axes=("dp", "tp"), topology="h100-sxm")
    plan = planned(small_graph(gpt2), mesh, comparisons=True, algo="megatron-sp")
    assert plan.unrestricted is not None
    assert plan.unrestricted.costs is not None
    assert plan.costs is not None
    sentences = restriction_sentences(plan)
    assert all(sentence in plan.summary() for sentence in sentences)
    more = plan.costs.communication - plan.unrestricted.costs.communication
    assert more > 0
    assert f"{three_digits(more)} more communication (" in sentences[1]
    assert " over tp: " in sentences[1]
    slower = plan.costs.total / plan.unrestricted.costs.total - 1
    assert plan.performance is not None
    assert plan.performance.error is not None
    is_within = "within the error of predictions" in sentences[0]
    errors = [plan.performance.error]
    if plan.unrestricted.performance is not None:
        errors.append(plan.unrestricted.performance.error or 0)
    assert is_within == (slower < max(errors))


def test_a_pipeline_says_how_long_its_ranks_wait(planned: Planner) -> None:
    mesh = make_mesh((2, 2), axes=("pp", "dp"), topology="h100-sxm")
    options = {"stages": 2, "micro_batches": 4, "balance": (1, 1), "schedule": "GPipe"}
    plan = planned(small_graph(gpt2), mesh, comparisons=True, **options)
    assert plan.unrestricted is not None
    assert plan.pipeline is not None
    assert plan.unrestricted.bubble is not None
    assert plan.unrestricted.bubble <= plan.pipeline.bubble


def test_a_document_without_a_plan_gives_the_reason(planned: Planner) -> None:
    missing = planned(small_graph(gpt2), slow_devices(dp=2), memory_budget=1000, time_limit=3)
    text = missing.summary(width=80)
    assert "No plan: " in text
    assert " ".join(missing.reason.split()) in " ".join(text.split())
