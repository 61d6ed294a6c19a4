"""Mixtures of experts on ranks: the whole model's numbers, and the collectives of the plan.

In double precision, so that nothing but the order of sums may differ. `_grouped_mm` takes no
double numbers, so the whole model multiplies each row with its expert's matrix by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from support.comparison import check_inference, check_training
from support.meshes import slow_devices
from support.recomputation import checkpointing
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from zoo.families_on_ranks import precision

from autoshard.checker import check_plan
from autoshard.graph import Graph, export_model, load_graph
from autoshard.graph.experts import COMBINE, DISPATCH
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

EXACT = 1e-10
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def mixtral(spelling: str, **sizes: Any) -> nn.Module:
    config = MixtralConfig(**SIZES | {"num_local_experts": 8} | sizes)
    config._experts_implementation = spelling
    return MixtralForCausalLM(config)


def gpt_oss(spelling: str) -> nn.Module:
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 4}
    config = GptOssConfig(**SIZES | more)
    config._experts_implementation = spelling
    model = GptOssForCausalLM(config)
    for parameter in model.parameters():  # biases are zero at first
        nn.init.normal_(parameter, std=0.2)
    return model


def odd(spelling: str) -> nn.Module:
    """Twelve experts, three of them a group: 12 does not divide 128 rows."""
    return mixtral(spelling, num_local_experts=12)


BUILD: dict[str, Callable[[str], nn.Module]] = {
    "mixtral": mixtral,
    "gpt-oss": gpt_oss,
    "odd": odd,
    "two layers": lambda spelling: mixtral(spelling, num_hidden_layers=2),
}


def built(name: str, spelling: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = BUILD[name](spelling).double()
    ids = torch.randint(0, 32, (8, 8))
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


@cache
def exported(name: str) -> Graph:
    with precision(torch.float64):
        model, inputs = built(name, "grouped_mm")
        return load_graph(export_model(model, (), inputs))


def names(graph: Graph, operator: str) -> Iterator[str]:
    return (node.name for node in graph.nodes if node.operator == operator)


@dataclass
class Case:
    """A model on a mesh, with what its mixtures of experts do.

    Attributes:
        model: its name.
        axes: of the mesh.
        dispatch: layouts in and out; empty where the planner is free.
        combine: layouts in and out, likewise.
        moves: all-to-alls that each mixture runs forward by axis, and as many backward.
        options: of the plan.
        redone: whether layers are checkpointed.
    """

    model: str
    axes: dict[str, int]
    dispatch: str = ""
    combine: str = ""
    moves: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    redone: bool = False
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = exported(self.model)
        pins = {
            name: layouts
            for operator, layouts in ((DISPATCH, self.dispatch), (COMBINE, self.combine))
            for name in names(graph, operator)
            if layouts
        }
        options = PlanOptions(**({"pins": {"nodes": pins}} | self.options))
        plan = make_plan(graph, slow_devices(**self.axes), options)
        assert plan.found, plan.reason
        assert check_plan(plan) == ()
        if self.redone:
            plan = checkpointing(plan, "model.layers.0", "model.layers.1")
        self._check_moves(plan, graph)
        self.plan = Plan.from_json(plan.to_json())

    def _check_moves(self, plan: Plan, graph: Graph) -> None:
        for operator in (DISPATCH, COMBINE):
            called = set(names(graph, operator))
            for node in plan.stages[0].nodes:
                if node.name in called:
                    ran = sorted((s.action, s.direction, s.axis) for s in node.inside)
                    directions = (
                        ["forward"] if plan.options.mode == "inference" else ["forward", "backward"]
                    )
                    assert ran == sorted(
                        ("all_to_all", direction, axis)
                        for direction in directions
                        for axis, count in self.moves.items()
                        for _ in range(count)
                    )

    def __call__(self) -> None:
        with precision(torch.float64):
            model, inputs = built(self.model, "batched_mm")
            other = {"kwargs": inputs, "ignore_state": ["*_experts_implementation_internal"]}
            if self.plan.options.mode == "inference":
                check_inference(model, self.plan, **other)
            else:
                check_training(model, self.plan, **other, tolerance=EXACT)


FOUR, SQUARE = {"a": 4}, {"a": 2, "b": 2}
TO_EXPERTS, FROM_EXPERTS = "S(0) R -> S(0)", "S(0) R S(0) -> S(0)"
CASES = {
    "free": Case("mixtral", FOUR, moves={"a": 1}),
    "experts": Case("mixtral", FOUR, TO_EXPERTS, FROM_EXPERTS, {"a": 1}),
    "experts with biases": Case("gpt-oss", FOUR, TO_EXPERTS, FROM_EXPERTS, {"a": 1}),
    "groups of experts": Case("odd", FOUR, TO_EXPERTS, FROM_EXPERTS, {"a": 1}),
    "tokens": Case("gpt-oss", FOUR, "S(0) S(0) -> S(1)", "S(1) S(0) S(0) -> S(0)"),
    "experts of whole tokens": Case("gpt-oss", FOUR, "R R -> S(0)", "S(0) R R -> P"),
    "inside experts": Case("gpt-oss", FOUR, "R R -> R", "P R R -> P"),
    "tokens and experts": Case(
        "gpt-oss",
        SQUARE,
        "S(0),S(0) S(0),R -> S(1),S(0)",
        "S(1),S(0) S(0),R S(0),S(0) -> S(0),S(0)",
        {"b": 1},
    ),
    "experts and tokens": Case(
        "mixtral",
        SQUARE,
        "S(0),S(0);1>0 R,S(0) -> S(0),S(1)",
        "S(0),S(1) R,S(0) S(0),S(0);1>0 -> S(0),S(0);1>0",
        {"a": 1},
    ),
    "experts twice": Case(
        "gpt-oss",
        SQUARE,
        "S(0),S(0) R,R -> S(0),S(0)",
        "S(0),S(0) R,R S(0),S(0) -> S(0),S(0)",
        {"a": 1, "b": 1},
    ),
    "experts twice, nested the other way": Case(
        "odd",
        SQUARE,
        "S(0),S(0);1>0 R,R -> S(0),S(0);1>0",
        "S(0),S(0);1>0 R,R S(0),S(0);1>0 -> S(0),S(0);1>0",
        {"a": 1, "b": 1},
    ),
    "experts and features": Case(
        "gpt-oss", SQUARE, "S(0),R R,R -> S(0),R", "S(0),P R,R S(0),R -> S(0),P", {"a": 1}
    ),
    "checkpointed": Case("two layers", FOUR, TO_EXPERTS, FROM_EXPERTS, {"a": 1}, redone=True),
    "inference": Case("mixtral", FOUR, TO_EXPERTS, FROM_EXPERTS, {"a": 1}, {"mode": "inference"}),
}
LONG = (
    *("experts", "groups of experts", "experts of whole tokens"),
    *("experts and tokens", "experts twice"),
)
"""Each model and each axis is in one of the others."""
