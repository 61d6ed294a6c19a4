"""What one plan saved, another one and an unsharded model load."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support import models
from support.checkpoints import state_of
from support.comparison import device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from support.shared_folder import shared_folder
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import dcp_state_dict, parallelize

THIRDS = {"pins": {"parameters": {"*.c_attn.weight": "S(0),S(1)/1+1+1"}}}
REVERSED = {"pins": {"parameters": {"*.weight": "S(0),S(0);1>0"}}}
WHOLE = {"pins": {"parameters": {"*": "I,I"}}}


def gpt2() -> models.Case:
    torch.manual_seed(0)
    return models.gpt2(layers=1)


def trained(model: nn.Module, inputs: dict[str, Any]) -> torch.optim.Optimizer:
    """After one step, so that the optimizer has a state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Case:
    """A model that is saved under one plan and loaded under another.

    Args:
        saved: options of the one plan.
        loaded: options of the other.
    """

    def __init__(self, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
        self.options = saved, loaded
        self.plans: list[Plan] = []

    def prepare(self) -> None:
        graph = graph_of(gpt2())
        self.plans = [
            make_plan(graph, slow_devices(dp=2, tp=2), PlanOptions(**options))
            for options in self.options
        ]
        assert all(plan.found for plan in self.plans)

    def __call__(self) -> None:
        with shared_folder() as folder:
            self._check(folder)

    def _check(self, folder: str) -> None:
        saved, loaded = self.plans
        model, inputs = gpt2()
        parallelize(model, saved, device_mesh(saved))
        state = state_of(model, trained(model, inputs))
        dcp.save(dcp_state_dict(state), checkpoint_id=folder)

        plain = {"model": gpt2()[0].state_dict()}
        dcp.load(plain, checkpoint_id=folder)
        check_equal(plain["model"], state["model"])

        other, _ = gpt2()
        parallelize(other, loaded, device_mesh(loaded))
        optimizer = trained(other, inputs)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        dcp.load(dcp_state_dict(state_of(other, optimizer)), checkpoint_id=folder)
        check_equal(state_of(other, optimizer), state)


def check_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """All tensors of two state dicts are the same."""
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(whole(one), whole(other), rtol=0, atol=0)


CASES = {
    "thirds to whole": Case(THIRDS, WHOLE),
    "whole to thirds": Case(WHOLE, THIRDS),
    "thirds to reversed": Case(THIRDS, REVERSED),
    "reversed to thirds": Case(REVERSED, THIRDS),
}
LONG = ("whole to thirds", "reversed to thirds")
"""The layouts are in the others, in the other direction."""
