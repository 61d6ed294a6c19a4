"""The answer of a plan: its tables agree with the plan and with each other; families in their best
form; the simplest layout that is nearly as fast as the fastest."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import Planner, gpt2, llama, small_graph

from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import compare_baselines, make_plan
from autoshard.report import answer_of, compare_plans
from autoshard.report.answer import SIMPLEST_FIRST, Answer, whole_percents
from autoshard.report.cost_items import cost_items

HOPPER = make_mesh((2, 2), topology="h100-sxm")
TWO_NODES = make_mesh((8,), topology="h100-sxm", nodes=2)
SMALL = partial(llama, layers=2)


@pytest.fixture(scope="module")
def compared(planned: Planner) -> Plan:
    return planned(small_graph(SMALL), HOPPER, comparisons=True)


@pytest.fixture(scope="module")
def found(compared: Plan) -> Answer:
    return answer_of(compared)


def test_costs_sum_to_the_step_and_to_100_percent(compared: Plan, found: Answer) -> None:
    assert compared.costs is not None
    assert sum(item.percent for item in found.costs) == 100
    assert sum(item.seconds for item in found.costs) == pytest.approx(compared.costs.total)
    items = {item.name: item.seconds for item in cost_items(compared)}
    listed = {item.name: item.seconds for item in found.costs}
    assert all(items[name] == listed[name] for name in items.keys() & listed.keys())
    text = compared.summary()
    assert all(f"{item.percent:>3} %  {item.name}" in text for item in found.costs)


@pytest.mark.parametrize(
    "shares", [(1.0,), (0.335, 0.335, 0.33), (1.2, -0.2), (0.004, 0.996), (1 / 7,) * 7]
)
def test_whole_percents_sum_to_100_and_are_off_by_less_than_one(shares: tuple[float, ...]) -> None:
    whole = whole_percents(shares)
    assert sum(whole) == 100
    assert all(abs(100 * share - number) < 1 for share, number in zip(shares, whole, strict=True))


def test_memory_by_kind_sums_to_the_peak(compared: Plan, found: Answer) -> None:
    assert compared.memory is not None
    assert sum(found.memory.values()) == found.peak == compared.memory.peak
    assert found.budget == compared.mesh.topology.device.memory


def test_one_request_has_one_set_of_figures(compared: Plan, found: Answer) -> None:
    own, *families = found.layouts
    assert compared.costs is not None
    assert compared.performance is not None
    assert (own.algo, own.seconds) == (None, compared.costs.total)
    tokens = compared.performance.tokens_per_second
    assert tokens is not None
    assert own.rate == tokens / 4
    assert [row.seconds for row in families] == [
        baseline.step_time
        for baseline in sorted(compared.baselines, key=lambda b: SIMPLEST_FIRST.index(b.algo))
    ]
    assert compared.certificate.objective == pytest.approx(own.seconds)
    same = {figure.name: figure for figure in compare_plans(compared, compared).costs}
    assert same["total"].before == own.seconds


@pytest.mark.parametrize("within", [0.0, 0.001, 0.02, 0.1, 1.0])
def test_the_simplest_layout_is_the_first_family_that_is_near(
    compared: Plan, within: float
) -> None:
    found = answer_of(compared, within=within)
    fastest = min(row.seconds for row in found.layouts if row.seconds is not None)
    assert found.layouts[found.best].seconds == fastest
    near = [
        row.algo
        for row in found.layouts
        if row.seconds is not None and row.seconds <= fastest * (1 + within)
    ]
    expected = next((algo for algo in (*SIMPLEST_FIRST, None) if algo in near), "none")
    assert found.layouts[found.simplest].algo == expected
    if expected is not None:
        assert found.verdict.startswith(f"{found.layouts[found.simplest].name} (")
    assert f"within {100 * within:.3g} %" in compared.summary(within=within)


def test_a_plan_that_was_not_compared_says_so(planned: Planner) -> None:
    found = answer_of(planned(small_graph(SMALL), HOPPER))
    assert found.verdict == "this plan; it was not compared with the usual layouts"
    assert (found.best, found.simplest, len(found.layouts)) == (0, 0, 1)


def test_layouts_are_named_in_the_words_of_the_field(found: Answer) -> None:
    names = {row.algo: row.name for row in found.layouts}
    assert names["ddp"] == "DDP 4"
    assert names["fsdp2"] == "FSDP2 4"
    assert names["hsdp"] == "HSDP 2 x 2"
    assert names["megatron"] in {"DP 2 x TP 2", "TP 4"}
    assert names["megatron-sp"] == f"{names['megatron']} + SP"
    needs = {row.algo: row.needs for row in found.layouts}
    assert needs["ddp"] == "DistributedDataParallel"
    assert needs["fsdp2"] == "fully_shard, no reshard after forward"


def test_what_the_optimizer_keeps_is_said(planned: Planner) -> None:
    graph = small_graph(SMALL)
    number = sum(graph.values[p.name].numel for p in graph.parameters)
    (text,) = [t for t in answer_of(planned(graph, HOPPER)).asked if t.startswith("Optimizer")]
    assert text.endswith(f"{16 * number / 1e3:.3g} kB in all, 16 bytes a parameter")
    none = planned(graph, HOPPER, optimizer="sgd")
    assert any("keeps 0 B of state" in text for text in answer_of(none).asked)


def forms(number: int) -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    """The settings that a user of each family could run on a number of devices."""
    again = ("always", "never")
    for reshard in again:
        yield "fsdp2", {"dp": number}, {"reshard_after_forward": reshard}
        for shard in (2, number // 2):
            sizes = {"replicate": number // shard, "shard": shard}
            yield "hsdp", sizes, {"reshard_after_forward": reshard}
    for checkpointing in again:
        yield "ddp", {"dp": number}, {"activation_checkpointing": checkpointing}
    for algo, weights, zero in product(
        ("megatron", "megatron-sp"), (2, number // 2), (True, False)
    ):
        sizes = {"dp": number // weights, "tp": weights}
        yield algo, sizes, {"distributed_optimizer": zero}


@pytest.mark.parametrize("mesh", [HOPPER, TWO_NODES], ids=["one node", "two nodes"])
def test_no_family_is_slower_than_its_settings(planned: Planner, mesh: Mesh) -> None:
    graph = small_graph(partial(SMALL, batch=8))
    best = {b.algo: b.step_time for b in compare_baselines(graph, mesh)}
    gap = PlanOptions().solver.relative_gap
    for algo, sizes, options in forms(mesh.num_devices):
        own = make_mesh(tuple(sizes.values()), axes=tuple(sizes), topology=mesh.topology)
        plan = planned(graph, own, algo=algo, **options)
        assert plan.costs is not None, (algo, sizes, options)
        fastest = best[algo]
        assert fastest is not None
        assert fastest <= plan.costs.total * (1 + gap), (algo, sizes, options)


def test_families_save_memory_as_their_settings_would(planned: Planner) -> None:
    graph, mesh = small_graph(partial(gpt2, layers=4)), slow_devices(a=4)
    always = {"algo": "fsdp2", "reshard_after_forward": "always"}
    resharded = planned(graph, mesh, **always, activation_checkpointing="never")
    assert resharded.memory is not None
    options = PlanOptions(memory_budget=round(1.02 * resharded.memory.peak), comparisons=True)
    rows = {row.algo: row for row in answer_of(make_plan(graph, mesh, options)).layouts}
    assert "reshard after forward" in rows["fsdp2"].needs
    assert rows["fsdp2"].seconds is not None
    assert rows["fsdp2"].seconds <= 1.01 * resharded.certificate.objective
    assert rows["ddp"].needs.startswith(("does not fit: needs ", "DistributedDataParallel, check"))
