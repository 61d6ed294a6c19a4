"""How small transformers are planned on four ranks, so that they hold things in many ways."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from support.meshes import slow_devices
from support.models import Case, graph_of
from support.recomputation import checkpointing, resharding_again

from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

GPT2_LAYERS = ("transformer.h.0", "transformer.h.1")
LLAMA_LAYERS = ("model.layers.0", "model.layers.1")

MESHES = {"4": {"dp": 4}, "tp=4": {"tp": 4}, "2x2": {"dp": 2, "tp": 2}}


def _sequence_parallel(norms: str) -> dict[str, Any]:
    """Weights are cut over both axes; the batch over dp, and what leaves norms over tp too."""
    return {
        "pins": {
            "parameters": {"*": "S(0),*"},
            "inputs": {"*": "S(0),R"},
            "nodes": {norms: "S(0),S(1)"},
        }
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "free": {},
    "fsdp": {"pins": {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}},
    "fsdp of residuals": {
        "pins": {
            "parameters": {"*": "S(0)"},
            "inputs": {"*": "S(0)"},
            "nodes": dict.fromkeys(("layer_norm*", "linear*", "relu*", "add*"), "S(0)"),
        }
    },
    "hsdp": {"pins": {"parameters": {"*": "*,S(0)"}, "inputs": {"*": "S(0),S(0)"}}},
    "megatron": {"algo": "megatron"},
    "sequence": _sequence_parallel("*layernorm"),
    "sequence, gathered again": {
        **_sequence_parallel("*layernorm"),
        "regather_activations": True,
    },
    "sequence of gpt2": _sequence_parallel("*.ln_?"),
    "inference": {"mode": "inference"},
}


@cache
def planned(build: Callable[[], Case], mesh: str, options: str) -> Plan:
    """A plan of a model with named options."""
    torch.manual_seed(0)
    plan = make_plan(
        graph_of(build()),
        slow_devices(**MESHES[mesh]),
        PlanOptions(**OPTIONS[options]),
    )
    assert plan.found, plan.reason
    return plan


def everything_again(plan: Plan, _layers: tuple[str, ...]) -> Plan:
    """The plan with every resharding again that can be."""
    return resharding_again(plan, lambda _: True)


def checkpoints(plan: Plan, layers: tuple[str, ...]) -> Plan:
    """The plan with a checkpoint over each layer."""
    return checkpointing(plan, *layers)
