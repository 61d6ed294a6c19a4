"""Well-known ways to train a net of two linear layers in parallel, as plans written by hand."""

from collections.abc import Mapping

import torch
from support.hand_plans import HandPlan, cpu_mesh
from torch import nn


class Net(nn.Module):
    """Two linear layers and a loss: linear, relu, linear, pow, mean."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.relu(self.up(x)))
        return y.pow(2).mean(), y


UP, RELU, DOWN, POW, MEAN = range(5)

Given = tuple[nn.Module, torch.Tensor]
"""A net, and a batch of shape [B, L, F]."""


def megatron(given: Given, *, down: str = "I,S(1)") -> HandPlan:
    """Column- then row-parallel over tp; biases enter once; batch over dp.

    Args:
        given: the net and its input.
        down: the second weight at rest.
    """
    model, x = given
    return HandPlan(
        model,
        (x,),
        cpu_mesh(dp=2, tp=2),
        at_rest={"x": "S(0),R", "up.weight": "I,S(0)", "up.bias": "I,S(0)", "down.weight": down},
        nodes={
            UP: (["S(0),R", "R,S(0)", "R,S(0)"], ["S(0),S(2)"]),
            RELU: (["S(0),S(2)"], ["S(0),S(2)"]),
            DOWN: (["S(0),S(2)", "R,S(1)", "R,P"], ["S(0),P"]),
            POW: (["S(0),I"], ["S(0),I"]),
            MEAN: (["S(0),I"], ["P,I"]),
        },
        shared={"linear_1": "S(0),I"},
        outputs={1: "S(0),I"},
    )


def sequence_parallel(given: Given) -> HandPlan:
    """As Megatron, but around the two linear layers the sequence is cut over tp."""
    model, x = given
    return HandPlan(
        model,
        (x,),
        cpu_mesh(tp=4),
        at_rest={"x": "S(1)", "up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
        nodes={
            UP: (["R", "S(0)", "S(0)"], ["S(2)"]),
            RELU: (["S(2)"], ["S(2)"]),
            DOWN: (["S(2)", "S(1)", "P"], ["P"]),
            POW: (["S(1)"], ["S(1)"]),
            MEAN: (["S(1)"], ["P"]),
        },
        shared={"linear_1": "S(1)"},
        outputs={1: "S(1)"},
    )


def batch_cut(given: Given, at_rest: Mapping[str, str], **axes: int) -> HandPlan:
    """Batch over all axes, parameters whole where they are used."""
    model, x = given
    cut, whole, summed = (",".join([t] * len(axes)) for t in ("S(0)", "R", "P"))
    return HandPlan(
        model,
        (x,),
        cpu_mesh(**axes),
        at_rest={"x": cut, **at_rest},
        nodes={
            UP: ([cut, whole, whole], [cut]),
            RELU: ([cut], [cut]),
            DOWN: ([cut, whole, whole], [cut]),
            POW: ([cut], [cut]),
            MEAN: ([cut], [summed]),
        },
        outputs={1: cut},
    )


def moved_shards(given: Given, at_rest: Mapping[str, str]) -> HandPlan:
    """All-to-all: the batch is cut in the linear layers, the sequence between them."""
    plan = batch_cut(given, at_rest, dp=4)
    plan.nodes = {**plan.nodes, RELU: (["S(1)"], ["S(1)"])}
    return plan
