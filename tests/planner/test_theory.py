"""Plans that theory predicts, found without hints."""

from collections.abc import Callable

import pytest
from support.meshes import mase_mesh, roofline_mesh, slow_devices
from support.models import Case, Planner, bert, gpt2, llama, meta, mlp, small_graph

from autoshard.base.outcome import SolveStatus
from autoshard.plan import Plan


def layouts(plan: Plan) -> dict[str, str]:
    return {p.target: p.layout for p in plan.stages[0].parameters}


def collectives(plan: Plan) -> dict[tuple[str, str], int]:
    return {(c.kind, c.direction): c.count for c in plan.collectives}


def test_many_tokens_and_small_weights_give_data_parallelism(planned: Planner) -> None:
    plan = planned(meta(mlp, 65536, 512, 512, 512), (4,))
    # An all-reduce is a reduce-scatter and an all-gather; between the two each rank updates its
    # part alone. The four parameters share one of each.
    assert set(layouts(plan).values()) == {"S(0)"}
    assert collectives(plan) == {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}
    whole = planned(meta(mlp, 65536, 512, 512, 512), (4,), pins={"parameters": {"*": "I"}})
    assert collectives(whole) == {("all_reduce", "backward"): 1}
    assert plan.costs.optimizer < whole.costs.optimizer / 3
    (batch,) = [i for i in plan.stages[0].inputs if i.kind == "user"]
    assert batch.layout == "S(0)"


def test_data_parallelism_uses_both_axes(planned: Planner) -> None:
    plan = planned(meta(mlp, 65536, 512, 512, 512), (2, 4))
    assert not any("S(1)" in node for n in plan.stages[0].nodes for node in n.inputs)
    (batch,) = [i for i in plan.stages[0].inputs if i.kind == "user"]
    assert batch.local_shape == (65536 // 8, 512)


def test_one_token_gives_the_megatron_pair(planned: Planner) -> None:
    plan = planned(meta(mlp, 1, 8192, 32768, 8192), (4,))
    assert layouts(plan) == {
        "up.weight": "S(0)",
        "up.bias": "S(0)",
        "down.weight": "S(1)",
        "down.bias": "I",
    }
    assert collectives(plan) == {("all_reduce", "forward"): 1}


def test_inference_with_one_token_never_gathers_a_weight(planned: Planner) -> None:
    plan = planned(meta(mlp, 1, 8192, 32768, 8192), (4,), mode="inference")
    assert all("S" in layout for name, layout in layouts(plan).items() if "weight" in name)
    assert all(c.nbytes < 1e6 for c in plan.collectives)


def test_a_memory_budget_shards_parameters_at_rest(planned: Planner) -> None:
    case, mesh = meta(mlp, 8192, 1024, 1024, 1024), roofline_mesh()
    free = planned(case, mesh)
    assert "I" in layouts(free).values()
    whole = free.memory.parameters + free.memory.gradients + free.memory.optimizer
    budget = free.memory.peak - whole * 3 // 8
    tight = planned(case, mesh, memory_budget=budget, relative_gap=1e-4)
    assert tight.memory.peak <= budget
    weights = [x for name, x in layouts(tight).items() if "weight" in name]
    assert any("S" in layout for layout in weights)
    assert tight.costs.total > free.costs.total
    assert tight.certificate.gap <= 1e-4


def test_a_budget_below_everything_says_what_would_work(planned: Planner) -> None:
    case = meta(mlp, 8192, 1024, 1024, 1024)
    plan = planned(case, (4,), memory_budget=1_000_000)
    assert plan.certificate.status is SolveStatus.INFEASIBLE
    assert not plan.found
    assert plan.conflict is not None
    least, bound = plan.conflict.least_budget, plan.conflict.least_budget_bound
    assert bound <= least
    known = f"{least:,}" if bound == least else f"between {bound:,} and {least:,}"
    assert f"the smallest feasible budget is {known} bytes" in plan.reason
    assert planned(case, (4,), memory_budget=least).found
    below = planned(case, (4,), memory_budget=int(least * 0.99))
    assert not below.found
    assert below.conflict is not None
    assert below.conflict.least_budget == least


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_one_device_has_the_trivial_plan_only(
    planned: Planner, shape: tuple[int, ...], mode: str
) -> None:
    plan = planned(meta(mlp), shape, mode=mode)
    whole = "I" if mode == "training" else "R"
    assert set(layouts(plan).values()) == {",".join([whole] * len(shape))}
    assert plan.collectives == ()
    assert plan.stages[0].reshardings == ()


def test_an_axis_of_one_rank_changes_nothing(planned: Planner) -> None:
    case = meta(mlp, 1, 8192, 32768, 8192)
    plain, padded = planned(case, (4,)), planned(case, (1, 4))
    assert padded.certificate.objective == pytest.approx(plain.certificate.objective)
    assert layouts(padded) == {name: f"I,{layout}" for name, layout in layouts(plain).items()}


def test_an_axis_larger_than_every_dim_is_left_idle(planned: Planner) -> None:
    plan = planned(meta(mlp, 4, 4, 4, 4), (7,))
    assert set(layouts(plan).values()) == {"I"}
    assert plan.collectives == ()


@pytest.mark.matrix
@pytest.mark.parametrize("build", [mlp, gpt2, bert, llama])
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_small_models_are_planned_to_optimality(
    planned: Planner, build: Callable[[], Case], mode: str, shape: tuple[int, ...]
) -> None:
    graph = small_graph(build)
    plan = planned(graph, slow_devices(**{f"a{i}": n for i, n in enumerate(shape)}), mode=mode)
    assert plan.certificate.status is SolveStatus.OPTIMAL
    assert plan.certificate.gap <= 1e-4
    assert plan.costs.compute < planned(graph, slow_devices(a=1), mode=mode).costs.compute


def test_mases_mlp_is_planned(planned: Planner) -> None:
    assert planned(meta(mlp, 16, 64, 128, 64), mase_mesh()).certificate.gap == 0


def test_mases_bert_is_planned(planned: Planner) -> None:
    case = meta(bert, layers=3, hidden=96, sequence=4)
    assert planned(case, mase_mesh()).certificate.gap <= 1e-4


def test_a_gpt2_layer_count_does_not_change_the_layout_of_a_layer(planned: Planner) -> None:
    mesh = slow_devices(a=2, b=2)
    few, many = (planned(meta(gpt2, layers=n), mesh) for n in (3, 6))

    def middle(plan: Plan) -> dict[str, str]:
        return {n: x for n, x in layouts(plan).items() if ".h.1." in n}

    assert middle(few) == middle(many)
