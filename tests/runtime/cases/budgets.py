"""Plans that the planner makes where memory is short, run on real ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support import models
from support.comparison import check_collectives
from support.meshes import slow_devices
from support.models import graph_of
from support.recomputation import holding_everything, run_step

from autoshard.checker import check_plan
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

TOLERANCE = 1e-10


def double(build: Callable[[], models.Case]) -> models.Case:
    """In double precision, where a difference of 1e-10 is a different computation."""
    model, inputs = build()
    return model.double(), {
        name: value.double() if _is_float(value) else value for name, value in inputs.items()
    }


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@dataclass
class Case:
    """A model that is planned twice: freely, and with less memory."""

    build: Callable[[], models.Case]
    mesh: dict[str, int]
    options: dict[str, Any]
    share: float = 1.0
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph, mesh = graph_of(self.build()), slow_devices(**self.mesh)
        budget = None
        if self.share < 1:
            free = make_plan(graph, mesh, PlanOptions(**self.options))
            assert free.memory is not None
            budget = int(self.share * free.memory.peak)
        options = PlanOptions(**self.options | {"memory_budget": budget})
        plan = make_plan(graph, mesh, options)
        assert plan.found, plan.reason
        assert check_plan(plan, graph) == ()
        assert any(resharding.regather for resharding in plan.stages[0].reshardings)
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        plain = run_step(holding_everything(self.plan), self.build)
        step = run_step(self.plan, self.build)
        torch.testing.assert_close(step.loss, plain.loss, rtol=TOLERANCE, atol=TOLERANCE)
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(
                step.gradients[name], gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=name
            )
        check_collectives(step.collectives, self.plan)
        assert step.held < plain.held


FULLY_SHARDED = {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}}
HYBRID = {
    "pins": {"parameters": {"*": "*,S(0)"}, "inputs": {"*": "S(0),S(0)"}},
    "reshard_after_forward": "always",
    "activation_checkpointing": "always",
}

CASES = {
    "gathered again under a budget": Case(
        partial(double, models.gpt2), {"dp": 4}, FULLY_SHARDED, share=0.85
    ),
    "gathered again and checkpointed": Case(
        partial(double, models.llama), {"dp": 2, "tp": 2}, HYBRID
    ),
    "named modules checkpointed": Case(
        partial(double, models.llama),
        {"dp": 2, "tp": 2},
        {**HYBRID, "checkpointed_modules": ["*.mlp", "*.layers.1"]},
    ),
    "a first layer without the gradient of its input checkpointed": Case(
        partial(double, models.residuals), {"dp": 2, "tp": 2}, HYBRID
    ),
}
