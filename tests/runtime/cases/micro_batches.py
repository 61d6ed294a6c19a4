"""Gradient accumulation over micro-batches: reductions run once a step."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from runtime.cases.updated_buffers import MESHES
from support.comparison import close, device_mesh
from support.meshes import slow_devices
from support.models import gpt2, graph_of
from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import graph_from_json
from autoshard.plan import CollectiveCount, Plan, PlanOptions
from autoshard.plan.buckets import buckets_of
from autoshard.plan.lowering import BeginBucket, lower
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, record_collectives, summarize

NUM = 4


@dataclass
class Accumulated:
    """Gradients over 4 micro-batches are those of the model on one device.

    Attributes:
        axes: of the mesh.
        stored: layout of parameters along the first axis.
    """

    axes: dict[str, int]
    stored: str
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        rest = ["*"] * (len(self.axes) - 1)
        pins = {"parameters": {"*": ",".join([self.stored, *rest])}}
        options = {"pins": pins, "batch_axis": "a"}
        graph = graph_of(gpt2(batch=8))
        self.plan = make_plan(graph, slow_devices(**self.axes), PlanOptions(**options))
        assert self.plan.found

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference, _ = gpt2(batch=8)
        batches = [gpt2(batch=8)[1] for _ in range(NUM)]
        mesh = device_mesh(self.plan)
        planned = parallelize(deepcopy(reference), self.plan, mesh)
        for _ in range(2):
            with record_collectives(mesh) as recorder:
                for batch in batches[:-1]:
                    with planned.no_sync():
                        planned(**batch)["loss"].backward()
                bucketed = [planned.get_parameter(name) for name in self.bucketed()]
                assert all(parameter.grad is None for parameter in bucketed)
                planned(**batches[-1])["loss"].backward()
            for batch in batches:
                reference(**batch).loss.backward()
            for (name, one), other in zip(
                planned.named_parameters(), reference.parameters(), strict=True
            ):
                close(one.grad.full_tensor(), other.grad, f"gradient of {name}", 1e-6)
            self.check_collectives(summarize(recorder.records))
            planned.zero_grad()
            reference.zero_grad()
        self.check_left_over(planned, batches[0])

    def bucketed(self) -> set[str]:
        """Names of the parameters that are resharded in buckets; most are."""
        (stage,) = self.plan.stages
        buckets = buckets_of(stage, graph_from_json(stage.program))
        values = {resharding.value for bucket in buckets for resharding in bucket.reshardings}
        names = {p.target for p in stage.parameters if p.name in values}
        assert names
        return names

    def check_collectives(self, found: Sequence[CollectiveCount]) -> None:
        """Reductions of parameters run as often as in a step of one micro-batch."""
        kind = "all_reduce" if self.stored == "I" else "reduce_scatter"
        wanted = (kind, "a", "backward")
        once, accumulated = (
            sum(c.count for c in counts if (c.kind, c.axis, c.direction) == wanted)
            for counts in (self.plan.collectives, found)
        )
        (stage,) = self.plan.stages
        instructions = lower(stage, graph_from_json(stage.program)).instructions
        of_activations = sum(
            collective[:3] == wanted
            for instruction in instructions
            if not isinstance(instruction, BeginBucket)
            for collective in instruction.collectives()
        )
        assert once > of_activations
        assert accumulated == once + (NUM - 1) * of_activations

    def check_left_over(self, planned: nn.Module, batch: dict[str, Any]) -> None:
        """Gradients that no pass has reduced are an error at the next step."""
        with planned.no_sync():
            planned(**batch)["loss"].backward()
        planned(**batch)
        with planned.no_sync(), pytest.raises(PlanError, match="never reduced"):
            planned(**batch)


CASES: dict[str, Callable[[], None]] = {
    f"parameters {stored}, {mesh}": Accumulated(axes, stored)
    for mesh, axes in MESHES.items()
    for stored in ("I", "S(0)")
}
