"""The category of a plan, the error of its predicted time, and what users see of it."""

from collections.abc import Callable
from dataclasses import replace
from math import isclose

import pytest
from support.meshes import slow_devices
from support.models import Case, Planner, gpt2, meta, mlp, small_graph

from autoshard.mesh import Mesh, generation_of, get_topology, list_topologies, make_mesh
from autoshard.plan.predictions import Performance
from autoshard.pricing.accuracy import ROWS, TABLE, LayoutCategory, find_accuracy
from autoshard.pricing.performance import plan_performance
from autoshard.report.answer import answer_of

DATA, TENSOR = LayoutCategory.DATA_PARALLEL, LayoutCategory.MODEL_PARALLEL


def category(planned: Planner, model: Callable[[], Case], mesh: Mesh, **options: object) -> str:
    plan = planned(small_graph(model), mesh, **options)
    assert plan.performance is not None
    return plan.performance.comparison


@pytest.mark.parametrize(
    ("model", "axes", "options", "kind"),
    [
        (gpt2, {"dp": 2}, {"algo": "fsdp2"}, DATA),
        (gpt2, {"dp": 2}, {"algo": "ddp"}, DATA),
        (gpt2, {"dp": 2, "tp": 2}, {"algo": "megatron"}, TENSOR),
        (gpt2, {"pp": 2}, {"stages": 2, "micro_batches": 4}, TENSOR),
        (gpt2, {"dp": 2}, {"mode": "inference"}, "inference of several tokens"),
    ],
)
def test_a_plan_has_the_category_of_its_layout(
    planned: Planner,
    model: Callable[[], Case],
    axes: dict[str, int],
    options: dict[str, object],
    kind: str,
) -> None:
    mesh = make_mesh(tuple(axes.values()), axes=tuple(axes), topology="h100-sxm")
    assert f"({kind}, Hopper GPUs" in category(planned, model, mesh, **options)


def test_only_the_hardware_of_presets_was_compared(planned: Planner) -> None:
    text = category(planned, gpt2, slow_devices(dp=2))
    assert text == "not compared with measurements on this hardware"
    known = {name for name in list_topologies() if generation_of(get_topology(name))}
    assert known == {
        *("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm"),
        *("gb200-nvl72", "gb300-nvl72"),
    }
    smaller = make_mesh((2, 4), topology="h100", nodes=2)
    assert generation_of(smaller.topology) == "Hopper"
    h100 = get_topology("h100-sxm")
    slower = replace(h100.levels[1], bandwidth=12.5e9)
    assert generation_of(replace(h100, levels=(h100.levels[0], slower))) is None
    assert generation_of(replace(h100, device=replace(h100.device, memory=1))) is None


def test_the_error_is_that_of_the_table_which_is_shipped() -> None:
    rows = ROWS.validate_json(TABLE.read_bytes())
    assert rows
    assert len({(row.category, row.generation) for row in rows}) == len(rows)
    mesh = make_mesh((8,), topology="h100-sxm")
    row = next(r for r in rows if (r.category, r.generation) == (TENSOR, "Hopper"))
    assert find_accuracy(TENSOR, mesh) == row
    assert find_accuracy(TENSOR, slow_devices(dp=8)) is None
    assert find_accuracy(None, mesh) is None


def test_the_summary_has_the_error_of_the_plan_and_of_its_baselines(planned: Planner) -> None:
    mesh = make_mesh((2, 2), topology="h100-sxm")
    plan = planned(small_graph(gpt2), mesh, comparisons=True)
    assert plan.performance is not None
    assert plan.performance.error is not None
    lines = plan.summary().splitlines()
    step = next(line for line in lines if line.startswith("Predicted step:"))
    assert f"ms{plan.performance.error_bar}, " in step
    assert all(rate in step for rate in plan.performance.rates)
    rows = {row.algo: row for row in answer_of(plan).layouts}
    for baseline in plan.baselines:
        if baseline.costs is not None:
            found = baseline.performance
            assert found is not None
            assert plan.costs is not None
            name = rows[baseline.algo].name
            line = next(line for line in lines if line.startswith(f"{name}  "))
            assert f"ms{found.error_bar} " in line
            tokens, whole = found.tokens_per_second, plan.performance.tokens_per_second
            assert tokens is not None
            assert whole is not None
            assert isclose(tokens * baseline.costs.total, whole * plan.costs.total)


def test_the_summary_says_if_nothing_was_compared(planned: Planner) -> None:
    plan = planned(meta(mlp, 16), slow_devices(a=2))
    lines = plan.summary().splitlines()
    text = "The predicted time is not compared with measurements on this hardware. "
    assert any(line.startswith(text) for line in lines)
    assert plan_performance(plan) == plan.performance
    older = plan.model_copy(update={"performance": None})
    assert older.summary() == plan.summary()


def test_errors_are_rounded_up() -> None:
    def bar(error: float | None) -> str:
        none = dict.fromkeys(("samples_per_second", "tokens_per_second", "mfu"))
        return Performance.model_validate({**none, "error": error, "comparison": ""}).error_bar

    assert bar(0.081) == " +- 9 %"
    assert bar(0.09) == " +- 9 %"
    assert bar(None) == ""
