"""Activation checkpointing of named modules, and of what cannot be found."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from support.models import Planner, graph_of, llama, meta, mlp, residuals
from torch import nn

from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.graph import Graph, graph_from_json
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan, problem_size

MESH = slow_devices(a=2, b=2)
ALWAYS = {"activation_checkpointing": "always"}


def checkpointed(plan: Plan) -> Iterator[set[str]]:
    """The modules of the operators in each checkpoint."""
    for stage in plan.stages:
        graph = graph_from_json(stage.program)
        for one in stage.checkpoints:
            nodes = graph.nodes[graph.numbers[one.first] : graph.numbers[one.last] + 1]
            yield {node.module for node in nodes}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(meta(llama, layers=3))


def test_every_layer_is_checkpointed_also_the_first_whose_input_has_no_gradient(
    planned: Planner,
) -> None:
    plan = planned(residuals(layers=3), MESH, **ALWAYS)
    assert [min(modules) for modules in checkpointed(plan)] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["*.mlp"], [{f"model.layers.{i}.mlp"} for i in range(3)]),
        (["model.layers.1"], [{"model.layers.1"}]),
        (["model.layers.?.self_attn", "model.layers.2"], []),
        (["*"], [{"model"}, {"lm_head"}]),
    ],
)
def test_named_modules_are_checkpointed_and_of_nested_ones_the_outermost(
    planned: Planner, graph: Graph, names: list[str], expected: list[set[str]]
) -> None:
    if not expected:
        expected = [{f"model.layers.{i}.self_attn"} for i in range(2)] + [{"model.layers.2"}]
    plan = planned(graph, MESH, **ALWAYS, checkpointed_modules=names)
    found = list(checkpointed(plan))
    # The head keeps nothing but its inputs, and what keeps nothing else is no checkpoint.
    assert len(found) in {len(expected), len(expected) - ("*" in names)}
    for modules, (path,) in zip(found, expected, strict=False):
        assert all(f"{module}.".startswith(f"{path}.") for module in modules)
    certificate = plan.certificate.statement
    assert "checkpointed_modules" in certificate


@pytest.mark.thorough
def test_to_fit_memory_named_modules_are_taken(planned: Planner) -> None:
    model = residuals(layers=3, batch=512)
    free = planned(model, MESH)
    budget = int(0.8 * free.memory.peak)
    plan = planned(model, MESH, memory_budget=budget, checkpointed_modules=["layers.1"])
    assert plan.memory.peak <= budget
    for modules in checkpointed(plan):
        assert {module.split(".")[1] for module in modules} == {"1"}


class Again(nn.Module):
    """A model that calls one layer three times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x.square().mean()


def test_each_call_of_a_module_is_a_checkpoint(planned: Planner) -> None:
    plan = planned(
        (Again(), {"x": torch.randn(256, 64)}), MESH, **ALWAYS, checkpointed_modules=["layer"]
    )
    assert [len(modules) for modules in checkpointed(plan)] == [4, 4, 4]


def test_each_pipeline_stage_has_the_checkpoints_of_its_modules(planned: Planner) -> None:
    plan = planned(
        residuals(layers=4),
        MESH,
        **ALWAYS,
        checkpointed_modules=["layers.0", "layers.1"],
        cuts=["before:layers.2"],
        micro_batches=2,
    )
    assert [len(stage.checkpoints) for stage in plan.stages] == [2, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ALWAYS, r"is 'always', but the program has no repeated block: name modules .*up, down"),
        (
            {"checkpointed_modules": ["layers.*"]},
            r"checkpointed_modules: no module matches 'layers\.\*'; there are up, .*down",
        ),
        (
            {"checkpointed_modules": ["up"], "activation_checkpointing": "never"},
            "but activation_checkpointing is 'never': leave one of them out",
        ),
    ],
)
def test_what_is_not_found_is_said(options: dict[str, Any], message: str) -> None:
    graph = graph_of(mlp())
    for asked in (options, {**options, "cuts": ["before:down"], "micro_batches": 2}):
        for ask in (make_plan, problem_size):
            with pytest.raises(OptionError, match=message):
                ask(graph, MESH, PlanOptions(**asked))


def test_modules_without_gradients_have_nothing_to_recompute() -> None:
    model, inputs = mlp()
    model.up.requires_grad_(requires_grad=False)
    options = PlanOptions(**ALWAYS | {"checkpointed_modules": ("up",)})
    with pytest.raises(OptionError, match="no module of these names has gradients"):
        make_plan(graph_of((model, inputs)), MESH, options)


def test_in_inference_nothing_is_recomputed(planned: Planner) -> None:
    plan = planned(mlp(), MESH, **ALWAYS, mode="inference")
    assert plan.found


def test_a_checkpoint_that_is_no_named_module_is_noticed(planned: Planner, graph: Graph) -> None:
    plan = planned(graph, MESH, **ALWAYS, checkpointed_modules=["*.mlp"])
    options = plan.options.with_values(checkpointed_modules=("*.self_attn",))
    problems = check_plan(plan.model_copy(update={"options": options}), graph)
    assert any("is no module named for it" in problem for problem in problems)
    assert any("is not checkpointed as asked for" in problem for problem in problems)
