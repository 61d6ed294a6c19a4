"""Plans made together, compared with all layouts that parameters could have."""

from itertools import product
from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from support.models import graph_of, mlp

from autoshard.checker import check_plan
from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan, make_plans

MESH = slow_devices(latency=1e-4, a=2)
NAMES = ("up.weight", "up.bias", "down.weight", "down.bias")


@pytest.fixture(scope="module")
def train() -> Graph:
    return graph_of(mlp(batch=64, features=32, hidden=64, outputs=32))


@pytest.fixture(scope="module")
def evaluate() -> Graph:
    return graph_of(mlp(batch=2, features=32, hidden=64, outputs=32))


@pytest.mark.parametrize("weights", [(1, 1), (1, 40), (30, 1)])
def test_no_other_layouts_of_parameters_are_better(
    train: Graph, evaluate: Graph, weights: tuple[float, float]
) -> None:
    inference = PlanOptions(mode="inference")
    joint = make_plans(
        {"train": (train, PlanOptions()), "eval": (evaluate, inference)},
        MESH,
        weights=dict(zip(("train", "eval"), weights, strict=True)),
    )
    assert all(check_plan(plan) == () for plan in joint.plans.values())
    shapes = {p.target: train.values[p.name].shape for p in train.parameters}
    found = []
    for layouts in product(*(("I", "S(0)", "S(1)")[: len(shapes[name]) + 1] for name in NAMES)):
        pins = {"parameters": dict(zip(NAMES, layouts, strict=True))}
        plans = (
            make_plan(train, MESH, PlanOptions(pins=pins)),
            make_plan(evaluate, MESH, PlanOptions(pins=pins, mode="inference")),
        )
        found.append(sum(w * seconds(p) for w, p in zip(weights, plans, strict=True)))
    assert joint.objective == pytest.approx(min(found), rel=1e-3)
    assert joint.bound is not None
    assert joint.bound <= min(found) * (1 + 1e-9)
    stored = [
        {i.target: i.layout.replace("I", "R") for i in plan.stages[0].parameters}
        for plan in joint.plans.values()
    ]
    assert stored[0] == stored[1]


def seconds(plan: Any) -> float:
    return float(plan.costs.total)


def test_own_pins_and_budgets_are_kept(train: Graph, evaluate: Graph) -> None:
    pinned = PlanOptions(pins={"parameters": {"up.weight": "S(0)"}})
    inference = PlanOptions(mode="inference")
    joint = make_plans({"train": (train, pinned), "eval": (evaluate, inference)}, MESH)
    for plan in joint.plans.values():
        layouts = {i.target: i.layout for i in plan.stages[0].parameters}
        assert layouts["up.weight"] == "S(0)"
    free = make_plan(train, MESH)
    assert free.memory is not None
    tight = PlanOptions(memory_budget=int(0.92 * free.memory.peak))
    joint = make_plans({"train": (train, tight), "eval": (evaluate, inference)}, MESH)
    memory = joint.plans["train"].memory
    assert memory is not None
    assert memory.peak <= 0.92 * free.memory.peak


def test_what_cannot_be_planned_together_says_why(train: Graph) -> None:
    with pytest.raises(OptionError, match="no programs"):
        make_plans({}, MESH)
    programs = {"train": (train, PlanOptions())}
    with pytest.raises(OptionError, match="weight for 'eval'"):
        make_plans(programs, MESH, weights={"eval": 1.0})
    with pytest.raises(OptionError, match="must be positive"):
        make_plans(programs, MESH, weights={"train": torch.nan})
    with pytest.raises(PlanError, match="program 'train': no plan fits"):
        make_plans({"train": (train, PlanOptions(memory_budget=10))}, MESH)
    with pytest.raises(OptionError, match="'train': its options ask for pipeline stages"):
        make_plans({"train": (train, PlanOptions(stages=2, micro_batches=2))}, MESH)
