"""Profiles of small plans on real gloo ranks: all that is predicted is found and measured."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import custom_operators
from support.comparison import device_mesh
from support.devices import DEVICE
from support.meshes import slow_devices
from support.models import gpt2, graph_of, small_graph

from autoshard.discovery import discover
from autoshard.errors import PlanError
from autoshard.launching import LaunchContext
from autoshard.measure.profiling import profile
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.pricing import Event, chrome_trace

PINS = {"inputs": {"*": "S(0),R"}, "parameters": {"*mlp*weight": "S(0),S(1)"}}


def keys(events: tuple[Event, ...]) -> set[tuple[str, str, str | None, str]]:
    """What runs, but for collectives that are measured with their operator."""
    return {(e.name, e.subject, e.axis, e.phase) for e in events if not e.inside}


@dataclass
class Profiled:
    """A plan is profiled, and what was measured is what was predicted."""

    options: dict[str, Any]
    custom: tuple[str, ...] = ()
    plan: Plan | None = None

    def prepare(self) -> None:
        mesh = slow_devices(dp=2, tp=2)
        own = discover(graph_of(custom_operators.mixer())).graph if self.custom else None
        self.plan = make_plan(own or small_graph(gpt2), mesh, PlanOptions(**self.options))

    def __call__(self) -> None:
        made = self.plan
        assert made is not None
        mesh = device_mesh(made)
        launched = LaunchContext(made, mesh, torch.device(DEVICE))
        if self.custom:
            with pytest.raises(PlanError, match="custom_operators"):
                profile(launched, num_steps=1)
        found = profile(launched, num_steps=1, custom_operators=self.custom)
        predicted, measured = keys(found.simulation.events), keys(found.events)
        # Writing inputs to memory is the caller's.
        assert predicted - measured <= {("inputs", "inputs", None, "forward")}
        unpriced = {key for key in measured - predicted if key[2] is not None}
        assert {name for name, *_ in unpriced} <= {"slice"}
        assert all(event.seconds > 0 for event in found.events)
        assert found.seconds > 0
        rows = found.rows()
        assert sum(row.measured for row in rows) == pytest.approx(
            sum(event.seconds for event in found.events)
        )
        assert sum(row.predicted for row in rows) == pytest.approx(found.predicted)
        trace = json.loads(chrome_trace(found.simulation, found.events))
        assert {record["pid"] for record in trace["traceEvents"]} == {0, 1}


CASES: dict[str, Profiled] = {
    "training": Profiled({"pins": PINS}),
    "inference": Profiled({"mode": "inference"}),
    "checkpoints": Profiled({"activation_checkpointing": "always", "optimizer": "sgd"}),
    "operators of its own": Profiled({"optimizer": "sgd"}, (custom_operators.NAMESPACE,)),
    "resharded again": Profiled(
        {"reshard_after_forward": "always", "pins": PINS, "optimizer": "none"}
    ),
}
