import gc
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from support.models import Bias, gpt2, graph_of, llama, meta, mlp, small_graph
from torch import nn

from autoshard.base.outcome import SolveStatus
from autoshard.errors import GraphError, OptionError
from autoshard.graph import export_model, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan, plan_id
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import brute_force


class Alarm:
    """A cancel token that fires after it was looked at a number of times."""

    def __init__(self, looks: int) -> None:
        self._looks = iter(range(looks))

    def is_set(self) -> bool:
        return next(self._looks, None) is None


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def formulations() -> Iterator[Formulation]:
    with torch.device("meta"):
        graph = graph_of((Bias(), {"x": torch.zeros(8, 8)}))
    for shape, mode in product([(2,), (4,)], ["training", "inference"]):
        yield Formulation.of(graph, make_mesh(shape), PlanOptions(mode=mode))


@pytest.mark.parametrize("formulation", list(formulations()))
def test_the_plan_of_a_small_graph_is_the_best_of_all(formulation: Formulation) -> None:
    best = brute_force(formulation.problem)
    options = PlanOptions(mode="training" if formulation.prices.training else "inference")
    plan = make_plan(formulation.graph, formulation.mesh, options)
    assert plan.certificate.objective == pytest.approx(best.objective)
    assert plan.certificate.bound <= best.objective * (1 + 1e-9)


def test_training_without_parameters_is_refused() -> None:
    graph = graph_of((Nothing(), {"x": torch.zeros(4, 4)}))
    with pytest.raises(GraphError, match=r"nothing to train.*inference"):
        make_plan(graph, make_mesh((2,)))


def test_an_empty_graph_is_planned_for_inference() -> None:
    graph = graph_of((Nothing(), {"x": torch.zeros(4, 4)}))
    plan = make_plan(graph, make_mesh((2,)), PlanOptions(mode="inference"))
    assert plan.found
    assert plan.collectives == ()
    assert plan.stages[0].nodes == ()


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(OptionError, match="adamw"):
        make_plan(small_graph(mlp), make_mesh((2,)), PlanOptions(optimizer="adamant"))


def test_cancelling_is_an_outcome() -> None:
    plan = make_plan(small_graph(gpt2), make_mesh((2, 4)), cancel=Alarm(0))
    assert plan.certificate.status is SolveStatus.CANCELLED
    assert "cancelled" in plan.reason


def test_progress_names_the_phases() -> None:
    phases = []
    make_plan(small_graph(gpt2), make_mesh((2, 4)), on_progress=lambda p: phases.append(p.phase))
    assert phases
    assert all(isinstance(phase, str) for phase in phases)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [2.0, 0.8])
def test_progress_has_bounds_of_all_plans_that_fit(share: float) -> None:
    graph, mesh = small_graph(partial(llama, layers=3)), make_mesh((2, 2))
    free = make_plan(graph, mesh)
    assert free.memory is not None
    bounds: list[float] = []
    options = PlanOptions(memory_budget=int(share * free.memory.peak))
    plan = make_plan(graph, mesh, options, on_progress=lambda p: bounds.append(p.bound))
    assert bounds == sorted(bounds)
    assert plan.certificate.objective is not None
    assert 0 < bounds[-1] <= plan.certificate.objective * (1 + 1e-9)


def test_a_problem_is_freed_without_the_garbage_collector() -> None:
    def number() -> int:
        return sum(type(x) is Formulation for x in gc.get_objects())

    graph, mesh = small_graph(partial(llama, layers=3)), make_mesh((2, 2))
    gc.collect()
    gc.disable()
    try:
        before = number()
        make_plan(graph, mesh)
        assert number() == before
    finally:
        gc.enable()


def test_the_same_request_has_the_same_id_and_plan() -> None:
    model, kwargs = meta(mlp)
    graphs = [load_graph(export_model(model, (), kwargs)) for _ in range(2)]
    plans = [make_plan(graph, make_mesh((2, 2))) for graph in graphs]
    assert plans[0].id == plans[1].id == plan_id(graphs[0], make_mesh((2, 2)), PlanOptions())
    assert plans[0].stages == plans[1].stages


def test_whatever_changes_the_plan_changes_the_id() -> None:
    graph, mesh = small_graph(mlp), make_mesh((2, 2))
    ids = {
        plan_id(graph, mesh, PlanOptions()),
        plan_id(graph_of(meta(mlp, 32)), mesh, PlanOptions()),
        plan_id(graph, make_mesh((4,)), PlanOptions()),
        plan_id(graph, make_mesh((2, 2), axes=("a", "b")), PlanOptions()),
        plan_id(graph, make_mesh((2, 2), intra_bandwidth=1e9, inter_bandwidth=1e9), PlanOptions()),
        plan_id(graph, mesh, PlanOptions(mode="inference")),
        plan_id(graph, mesh, PlanOptions(memory_budget=10**9)),
        plan_id(graph, mesh, PlanOptions(optimizer="sgd")),
    }
    assert len(ids) == 8


def test_usage_counts_what_a_rank_holds() -> None:
    (formulation, *_) = formulations()
    parameter = next(v for v in formulation.variables if v.name == "p_bias")
    held = dict(
        zip(
            map(str, (s.outputs[0] for s in parameter.strategies)),
            parameter.usage["parameters"],
            strict=True,
        )
    )
    assert held == {"I": 32.0, "S(0)": 16.0}
    assert np.array_equal(parameter.usage["optimizer"], 2 * parameter.usage["parameters"])
