"""Gradient accumulation over micro-batches: reductions run once a step."""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from runtime.cases.habits import unreduced
from runtime.cases.timeline import PEAK, TURN
from runtime.cases.updated_buffers import MESHES
from support.comparison import check_collectives, close, device_mesh
from support.live_memory import LiveMemory
from support.meshes import slow_devices
from support.models import Case, gpt2, graph_of
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.checker import check_plan
from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.errors import PlanError
from autoshard.graph import graph_from_json
from autoshard.lowering.buckets import buckets_of
from autoshard.lowering.instructions import BeginBucket, lower
from autoshard.lowering.timeline import timeline
from autoshard.plan import CollectiveCount, Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, record_collectives, summarize
from autoshard.runtime.program.accumulation import PendingGradient

NUM = 4

HYBRID = {"parameters": {"*": "I,S(0)"}, "inputs": {"*": "S(0),S(0)"}}
"""Parameters are sharded on one axis and replicated on the other, and both shard the batch."""


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
                assert all(isinstance(p.grad, PendingGradient) for p in bucketed)
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
            for collective in instruction.collectives(1)
        )
        assert once > of_activations
        assert accumulated == once + (NUM - 1) * of_activations


def sized() -> Case:
    """A model whose ids are little beside its activations."""
    return gpt2(batch=16, sequence=16, hidden=64)


@dataclass
class PlannedMicroBatches:
    """A plan of 4 micro-batches: gradients are right, and its collectives are those executed.

    Attributes:
        axes: of the mesh.
        stored: layout of parameters.
        frequencies: how often the parameters' reshardings run; all of these occur.
        share: the memory budget as a share of the free peak.
        options: further planning options.
        fast_memory: True if summing full gradients costs next to nothing.
        tolerance: of the gradients.
    """

    axes: dict[str, int]
    stored: str
    frequencies: set[Frequency]
    share: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    fast_memory: bool = True
    tolerance: float = 1e-6
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = graph_of(sized())
        mesh = slow_devices(**self.axes)
        if self.fast_memory:
            device = replace(mesh.topology.device, memory_bandwidth=1e15)
            mesh = replace(mesh, topology=replace(mesh.topology, device=device))
        options = {
            "pins": {"parameters": {"*": self.stored}},
            "batch_axis": "a",
            "micro_batches": NUM,
            **self.options,
        }
        self.plan = make_plan(graph, mesh, PlanOptions(**options))
        if self.share < 1.0:
            assert self.plan.memory is not None
            options["memory_budget"] = int(self.share * self.plan.memory.peak)
            self.plan = make_plan(graph, mesh, PlanOptions(**options))
        assert self.plan.found, self.plan.reason
        assert not check_plan(self.plan)
        (stage,) = self.plan.stages
        stored = {placed.name for placed in stage.parameters}
        found = {r.frequency for r in stage.reshardings if r.value in stored and r.consumer}
        assert found >= self.frequencies, found

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference, _ = sized()
        batches = [sized()[1] for _ in range(NUM)]
        mesh = device_mesh(self.plan)
        planned = parallelize(deepcopy(reference), self.plan, mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (planned, reference)]
        for _ in range(2):
            with record_collectives(mesh) as recorder:
                self.step(planned, batches)
            check_collectives(summarize(recorder.records), self.plan)
            for batch in batches:
                reference(**batch).loss.backward()
            self.compare_gradients(reference, planned)
            if "accumulation_dtype" in self.options:
                narrow = getattr(torch, self.options["accumulation_dtype"])
                for name, parameter in planned.named_parameters():
                    local = parameter.grad.to_local()
                    assert torch.equal(local, local.to(narrow).to(local.dtype)), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.check_memory(planned, batches)
        if self.frequencies & GATHERED_ONCE:
            self.check_changed(reference, planned, batches)
            self.check_changed_shards(planned, batches)

    def compare_gradients(self, reference: nn.Module, planned: nn.Module) -> None:
        pairs = zip(planned.named_parameters(), reference.parameters(), strict=True)
        for (name, one), other in pairs:
            close(one.grad.full_tensor(), other.grad, f"gradient of {name}", self.tolerance)

    def step(self, planned: nn.Module, batches: Sequence[dict[str, Any]]) -> None:
        for batch in batches[:-1]:
            with planned.no_sync():
                planned(**batch)["loss"].backward()
        planned(**batches[-1])["loss"].backward()

    def check_memory(self, planned: nn.Module, batches: Sequence[dict[str, Any]]) -> None:
        """Memory is as predicted: at the turn of a micro-batch in the middle, and at its peak."""
        (stage,) = self.plan.stages
        time = timeline(stage, graph_from_json(stage.program), training=True)
        made = sum(time.nbytes[kind] for kind in ("activations", "gradients", "temporaries"))
        gc.collect()
        with LiveMemory(patient_above=made.max() / (1 - PEAK)) as memory:
            for number, batch in enumerate(batches):
                is_last = number == NUM - 1
                with nullcontext() if is_last else planned.no_sync():
                    outputs = planned(**batch)
                    if 0 < number < NUM - 1:
                        turn = memory.nbytes
                        torch.testing.assert_close(made[time.turn], turn, rtol=TURN, atol=0)
                    begin = torch.ones_like(outputs["loss"])
                    outputs["loss"].backward(begin)
                del outputs, begin
        assert made.max() == pytest.approx(memory.peak, rel=PEAK), (made.max(), memory.peak)
        planned.zero_grad()

    def check_changed(
        self, reference: nn.Module, planned: nn.Module, batches: Sequence[dict[str, Any]]
    ) -> None:
        """Parameters that change between micro-batches are gathered again."""
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, planned)]
        reference.zero_grad()
        for model, optimizer in zip((reference, planned), optimizers, strict=True):
            for batch in batches[:2]:
                with unreduced(model):
                    model(**batch)["loss"].backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
            with unreduced(model):
                model(**batches[2])["loss"].backward()
            optimizer.step()
            model(**batches[3])["loss"].backward()
        self.compare_gradients(reference, planned)
        planned.zero_grad()

    def check_changed_shards(self, planned: nn.Module, batches: Sequence[dict[str, Any]]) -> None:
        """Writes into shards, which other ranks do not see, are an error; the next call runs."""
        for shard in (DTensor.to_local, lambda p: DTensor.to_local(p).data):
            with planned.no_sync(), torch.no_grad():
                with torch.enable_grad():
                    planned(**batches[0])["loss"].backward()
                for parameter in planned.parameters():
                    shard(parameter).mul_(0.5)
                with (
                    torch.enable_grad(),
                    pytest.raises(PlanError, match="shards of parameters have changed since"),
                ):
                    planned(**batches[1])
            planned(**batches[1])["loss"].backward()
            planned.zero_grad()


MICRO_BATCH, REDUCE_STEP, GATHER_STEP, STEP = Frequency

CASES: dict[str, Callable[[], None]] = {
    **{
        f"parameters {stored}, {mesh}": Accumulated(axes, stored)
        for mesh, axes in MESHES.items()
        for stored in ("I", "S(0)")
    },
    "once per step": PlannedMicroBatches({"a": 4}, "S(0)", {STEP}),
    "once per step, 2x2": PlannedMicroBatches({"a": 2, "b": 2}, "S(0),*", {STEP}),
    "gathered once": PlannedMicroBatches({"a": 4}, "S(0)", {GATHER_STEP}, fast_memory=False),
    "sums of another type": PlannedMicroBatches(
        {"a": 4},
        "S(0)",
        {GATHER_STEP},
        options={"accumulation_dtype": "bfloat16"},
        fast_memory=False,
        tolerance=0.02,
    ),
    "in every micro-batch": PlannedMicroBatches(
        {"a": 4}, "S(0)", {MICRO_BATCH}, options={"reshard_after_forward": "always"}
    ),
    "as memory allows": PlannedMicroBatches(
        {"a": 4}, "S(0)", {MICRO_BATCH, STEP}, share=0.95, options={"relative_gap": 1e-7}
    ),
    "hybrid shards": PlannedMicroBatches(
        {"a": 2, "b": 2},
        "I,S(0)",
        {REDUCE_STEP, GATHER_STEP},
        options={"batch_axis": None, "pins": HYBRID},
        fast_memory=False,
    ),
    "checkpoints": PlannedMicroBatches(
        {"a": 4}, "S(0)", {STEP}, options={"activation_checkpointing": "always"}
    ),
}
LONG = ("once per step", "gathered once", "as memory allows", "checkpoints")
"""Each frequency is in one of the others."""
