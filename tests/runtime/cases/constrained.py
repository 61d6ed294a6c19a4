"""Plans that were steered run like any other: the same numbers, the plan's collectives."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support import models
from support.comparison import check_training
from support.meshes import slow_devices
from support.models import graph_of

from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

MODELS = {
    "gpt2": partial(models.gpt2, layers=1),
    "bert": partial(models.bert, layers=1),
    "llama": partial(models.llama, layers=1),
}


@dataclass
class Case:
    """One model with constraints on a mesh of 2 x 2."""

    model: str
    options: dict[str, Any]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = graph_of(MODELS[self.model]())
        options = PlanOptions(**self.options)
        self.plan = make_plan(graph, slow_devices(dp=2, tp=2), options)
        assert self.plan.found, self.plan.reason
        assert self.plan.collectives
        if self.options.get("regather_activations"):
            parameters = {p.name for p in self.plan.stages[0].parameters}
            again = [c.value for c in self.plan.stages[0].reshardings if c.regather]
            assert again
            assert parameters.isdisjoint(again)

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = MODELS[self.model]()
        check_training(model, self.plan, kwargs=inputs)


CASES = {
    "megatron gpt2": Case("gpt2", {"algo": "megatron"}),
    "megatron bert": Case("bert", {"algo": "megatron"}),
    "megatron llama": Case("llama", {"algo": "megatron"}),
    "megatron llama, activations gathered again": Case(
        "llama", {"algo": "megatron-sp", "regather_activations": True}
    ),
    "pinned gpt2": Case(
        "gpt2",
        {
            "pins": {
                "parameters": {"*.weight": "S(0),*", "transformer.ln_f.bias": "S(0),S(0);1>0"},
                "inputs": {"*": "*,S(0)"},
                "nodes": {"transformer.h.*.ln_2": "S(1),S(0)"},
            },
            "forbid": [{"kind": "all_to_all", "axis": "dp"}],
        },
    ),
    "interleaved gpt2": Case(
        "gpt2",
        {
            "pins": {
                "parameters": {"*": "S(*),*", "*.mlp.c_fc.weight": "*,S(1)/1+1+1+1"},
                "nodes": {"addmm_3": "*,S(1)/1+3", "addmm_2": "S(0),S(1)/1+1+1+1"},
            },
            "forbid": [{"kind": "all_gather", "of": "activations", "axis": "dp"}],
        },
    ),
    "batch axis llama": Case("llama", {"batch_axis": "tp", "skip_fully_replicated": ["tp", "dp"]}),
}
