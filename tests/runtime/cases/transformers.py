"""Planned transformers on real ranks: the unsharded model's numbers, the plan's collectives.

Devices are slow and links fast, so that cutting pays even for models of this size.
"""

from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import torch
from support import models
from support.comparison import check_inference, check_training
from support.meshes import slow_devices

from autoshard.graph import Graph, export_model, load_graph
from autoshard.plan import Mode, Plan, PlanOptions
from autoshard.planner import make_plan

MODELS = {
    "mlp": models.mlp,
    "gpt2": models.gpt2,
    "bert": partial(models.bert, layers=1),
    "llama": partial(models.llama, layers=1),
}
SHAPES = {"4": {"a": 4}, "2x2": {"a": 2, "b": 2}, "1x4": {"a": 1, "b": 4}}
SLOW = 1e-3
"""Seconds of latency with which a plan communicates little, and holds much."""
TIGHT = 0.85
"""Share of the memory that the cheapest plan needs, as a budget."""


@dataclass
class Case:
    """One model on one mesh."""

    model: str
    shape: str
    mode: Mode
    tight: bool = False
    latency: float = 1e-6
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = exported(self.model)
        mesh = slow_devices(self.latency, **SHAPES[self.shape])
        options = PlanOptions(mode=self.mode)
        plan = make_plan(graph, mesh, options)
        assert plan.found, plan.reason
        if self.tight:
            budget = int(TIGHT * plan.memory.peak)
            plan = make_plan(graph, mesh, options.with_values(memory_budget=budget))
            assert plan.found, plan.reason
        # A plan that needs no other rank would show nothing.
        assert plan.collectives
        # What runs is what a file would hold.
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = MODELS[self.model]()
        check = check_training if self.mode == "training" else check_inference
        check(model, self.plan, kwargs=inputs)


@cache
def exported(name: str) -> Graph:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return load_graph(export_model(model, (), inputs))


MODES: tuple[Mode, ...] = ("training", "inference")
CASES: dict[str, Case] = {
    **{
        f"{model} {shape} {mode}": Case(model, shape, mode)
        for model, shape, mode in product(MODELS, SHAPES, MODES)
    },
    "gpt2 2x2 training, tight memory": Case("gpt2", "2x2", "training", tight=True, latency=SLOW),
    "gpt2 2x2 training, slow links": Case("gpt2", "2x2", "training", latency=SLOW),
    "bert 2x2 training, slow links": Case("bert", "2x2", "training", latency=SLOW),
}
USUAL = (
    *("mlp 2x2 inference", "gpt2 4 inference", "bert 1x4 training", "llama 2x2 training"),
    *("gpt2 2x2 training, tight memory", "bert 2x2 training, slow links"),
)
LONG = tuple(name for name in CASES if name not in USUAL)
"""Each model, each shape and each mode is in one of the others."""
