"""Prices of edges: the same as matrices and as steps between layouts."""

from typing import Any

import numpy as np
import pytest
from support.meshes import slow_devices
from support.models import gpt2, small_graph

from autoshard.plan.options import PlanOptions
from autoshard.planner.formulation import formulation
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import ShortestPathCost


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "inference"},
        {"micro_batches": 3},
        {"forbid": [{"kind": "all_to_all"}]},
        {"regather_activations": True},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_steps_between_layouts_cost_what_the_matrix_says(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, mesh = small_graph(gpt2), slow_devices(a=2, b=2)
    made = PlanOptions(**options)
    monkeypatch.setattr(formulation, "_MANY_LAYOUTS", 0)
    by_steps = Formulation.of(graph, mesh, made).problem
    monkeypatch.setattr(formulation, "_MANY_LAYOUTS", 10**9)
    by_matrix = Formulation.of(graph, mesh, made).problem
    assert by_steps.has_path_costs
    assert not by_matrix.has_path_costs
    known: dict[tuple[int, ...], None] = {}
    for steps, matrix in zip(by_steps.edges, by_matrix.edges, strict=True):
        key = (id(steps.prices), id(steps.rows), id(steps.cols))
        if isinstance(steps.prices, ShortestPathCost) and key not in known:
            known[key] = None
            np.testing.assert_allclose(steps.dense(), matrix.dense(), rtol=1e-12)
