"""Models that call operators of their own run as planned by rules that were found."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support import custom_operators
from support.comparison import check_inference, check_training
from support.meshes import slow_devices
from support.models import Case as ModelCase
from support.models import graph_of

from autoshard.checker import check_plan
from autoshard.discovery import discover
from autoshard.graph import Graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan


@dataclass
class Case:
    """A model on a mesh of 2 x 2, with what its own operators must be cut by."""

    make: Callable[[], ModelCase]
    options: PlanOptions
    cuts: dict[str, str]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = discover(graph_of(self.make())).graph
        self.plan = make_plan(graph, slow_devices(dp=2, tp=2), self.options)
        assert self.plan.found, self.plan.reason
        assert check_plan(self.plan, graph) == ()
        assert {name: layouts(self.plan, graph, name) for name in self.cuts} == self.cuts

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.make()
        training = self.plan.options.mode == "training"
        check = check_training if training else check_inference
        check(model, self.plan, kwargs=inputs, custom_operators=["shardtest"])


def layouts(plan: Plan, graph: Graph, packet: str) -> str:
    """Layout of the first output of the only call of an operator."""
    (name,) = (n.name for n in graph.nodes if n.operator == f"shardtest.{packet}.default")
    (layout,) = (n.outputs[0] for n in plan.stages[0].nodes if n.name == name)
    return layout


MEGATRON = PlanOptions(batch_axis="dp", skip_fully_replicated=True)
CASES = {
    "mixer": Case(custom_operators.mixer, MEGATRON, {}),
    "clamp": Case(custom_operators.clamp, PlanOptions(mode="inference"), {}),
}
