"""Mixed precision: planned models compute what FSDP2 computes on one device under the policy."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.timeline import PEAK
from runtime.cases.updated_buffers import MESHES
from support.comparison import check_collectives, close, device_mesh
from support.devices import DEVICE
from support.live_memory import LiveMemory
from support.meshes import slow_devices
from support.models import Case, gpt2, llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autoshard.checker import check_plan
from autoshard.errors import ExportError, PlanError
from autoshard.graph import MixedPrecision, export_model, graph_from_json, load_graph
from autoshard.lowering.timeline import timeline
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, record_collectives, summarize

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

BFLOAT16 = 0.04
"""Tolerance of results that ranks round to bfloat16 in another order than one device. An element
has an error of 2^-9; gradients are sums of products that passed about ten such roundings."""

ROUNDINGS = 3.0
"""Difference of two gradients, relative to the error of one, up to which they differ by roundings
alone: both err, and the largest errors of few elements vary."""


def fsdp2(model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    """The model as FSDP2 runs it on one device."""
    mesh = DeviceMesh(
        DEVICE, torch.arange(dist.get_world_size())[:, None], mesh_dim_names=("n", "one")
    )
    return fully_shard(model, mesh=mesh["one"], mp_policy=policy)


def exact_gradients(
    exact: nn.Module, reference: nn.Module, batches: list[dict[str, Any]]
) -> list[torch.Tensor]:
    """Gradients in float64 of the parameters that another model has.

    Args:
        exact: the same model in float64; it gets the parameters.
        reference: the other model.
        batches: of all micro-batches, whose gradients are added.
    """
    exact.zero_grad()
    with torch.no_grad():
        for one, other in zip(exact.parameters(), reference.parameters(), strict=True):
            assert isinstance(other, DTensor)
            one.copy_(other.full_tensor())
    for batch in batches:
        exact(**batch).loss.backward()
    return [parameter.grad for parameter in exact.parameters()]


@dataclass
class Mixed:
    """Losses, gradients, collectives and memory of training steps.

    Attributes:
        axes: of the mesh.
        policy: as FSDP2 takes it.
        build: the model and its batch.
        double: True if parameters are stored in float64.
        options: of planning.
        tolerance: of losses and gradients, relative to the largest element.
    """

    axes: dict[str, int]
    policy: MixedPrecisionPolicy
    build: Callable[[], Case] = gpt2
    double: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = BFLOAT16
    plan: Plan = field(init=False)

    def case(self) -> Case:
        model, batch = self.build()
        return (model.double() if self.double else model.float()), batch

    def prepare(self) -> None:
        model, batch = self.case()
        archive = export_model(model, (), batch, mixed_precision=self.policy)
        options = {"batch_axis": "a", **self.options}
        self.plan = make_plan(
            load_graph(archive), slow_devices(**self.axes), PlanOptions(**options)
        )
        assert self.plan.found, self.plan.reason
        assert not check_plan(self.plan)
        assert self.plan.graph.mixed_precision == MixedPrecision.of(self.policy)

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, _ = self.case()
        reference = fsdp2(deepcopy(model), self.policy)
        exact = deepcopy(model).double()
        batches = [self.case()[1] for _ in range(self.plan.options.training.micro_batches)]
        mesh = device_mesh(self.plan)
        planned = parallelize(model, self.plan, mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (planned, reference)]
        for _ in range(2):
            with record_collectives(mesh) as recorder:
                losses = self.step(planned, batches)
            check_collectives(summarize(recorder.records), self.plan)
            expected = [reference(**batch).loss for batch in batches]
            for one, other in zip(losses, expected, strict=True):
                close(one.detach(), other.detach(), "loss", self.tolerance)
                other.backward()
            self.compare(planned, reference, exact_gradients(exact, reference, batches))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.check_memory(planned, batches)

    def step(self, planned: nn.Module, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else planned.no_sync():
                losses.append(planned(**batch)["loss"])
                losses[-1].backward()
        return losses

    def compare(self, planned: nn.Module, reference: nn.Module, exact: list[torch.Tensor]) -> None:
        """Gradients are FSDP2's, in the element type of the parameter.

        Where sums cancel, roundings of FSDP2 itself err by more than the tolerance.
        """
        pairs = zip(planned.named_parameters(), reference.parameters(), exact, strict=True)
        for (name, one), other, true in pairs:
            found = one.grad.full_tensor()
            assert isinstance(other.grad, DTensor)
            wanted = other.grad.full_tensor()
            assert found.dtype is one.dtype is other.dtype is wanted.dtype, name
            # Elements near zero are differences of large ones.
            scale = wanted.abs().max()
            rounding = float((wanted - true).abs().max() / scale)
            tolerance = max(self.tolerance, ROUNDINGS * rounding)
            close(found / scale, wanted / scale, f"gradient of {name}", tolerance)

    def check_memory(self, planned: nn.Module, batches: list[dict[str, Any]]) -> None:
        """The peak is as predicted."""
        (stage,) = self.plan.stages
        time = timeline(stage, graph_from_json(stage.program), training=True)
        made = sum(time.nbytes[kind] for kind in ("activations", "gradients", "temporaries"))
        gc.collect()
        with LiveMemory(patient_above=made.max() / (1 - PEAK)) as memory:
            for number, batch in enumerate(batches, start=1):
                with nullcontext() if number == len(batches) else planned.no_sync():
                    outputs = planned(**batch)
                    begin = torch.ones_like(outputs["loss"])
                    outputs["loss"].backward(begin)
                del outputs, begin
        assert made.max() == pytest.approx(memory.peak, rel=PEAK), (made.max(), memory.peak)


@dataclass
class Rounded:
    """Gradients are reduced in the element type of the policy, and stay so.

    Attributes:
        axes: of the mesh.
        reduce_dtype: of the policy.
    """

    axes: dict[str, int]
    reduce_dtype: torch.dtype
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        mixed = Mixed(self.axes, MixedPrecisionPolicy(BF16, self.reduce_dtype), self.uneven)
        mixed.prepare()
        self.plan = mixed.plan

    @staticmethod
    def uneven() -> Case:
        """A model of which most parameters are sharded unevenly."""
        return gpt2(batch=8, hidden=36, vocabulary=65)

    def __call__(self) -> None:
        model, batch = self.uneven()
        planned = parallelize(model, self.plan, device_mesh(self.plan))
        planned(**batch)["loss"].backward()
        narrow = [
            torch.equal(p.grad.to_local(), p.grad.to_local().to(BF16).float())
            for p in planned.parameters()
        ]
        assert all(narrow) if self.reduce_dtype is BF16 else sum(narrow) < len(narrow) / 2


@dataclass
class Autocast:
    """Calls under `torch.autocast` run as planned, or are an error.

    Attributes:
        axes: of the mesh.
    """

    axes: dict[str, int]
    plans: dict[str, Plan] = field(init=False)

    def prepare(self) -> None:
        self.plans = {}
        model, batch = gpt2(batch=8)
        for name, policy in (("none", None), ("bf16", "bfloat16")):
            graph = load_graph(export_model(model, (), batch, mixed_precision=policy))
            self.plans[name] = make_plan(graph, slow_devices(**self.axes))

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, batch = gpt2(batch=8)
        mesh = device_mesh(self.plans["bf16"])
        planned = parallelize(deepcopy(model), self.plans["bf16"], mesh)
        smaller = {name: batch[name][:3] for name in ("input_ids", "labels")}
        smaller["use_cache"] = False
        for given in (batch, smaller):
            with pytest.warns(match="run the unsharded") if given is smaller else nullcontext():
                outside = planned(**given)["loss"]
            with torch.autocast(DEVICE, BF16):
                inside = planned(**given)["loss"]
                assert torch.is_autocast_enabled(DEVICE)
            assert torch.equal(outside, inside)
            inside.backward()
        with torch.autocast(DEVICE, torch.float16), pytest.raises(PlanError, match="float16"):
            planned(**batch)
        plain = parallelize(deepcopy(model), self.plans["none"], mesh)
        with (
            torch.autocast(DEVICE, BF16),
            pytest.raises(PlanError, match="mixed_precision='bfloat16'"),
        ):
            plain(**batch)
        plain(**batch)["loss"].backward()
        with torch.autocast(DEVICE, BF16), pytest.raises(ExportError, match="mixed_precision="):
            export_model(model, (), batch)


def sized() -> Case:
    return gpt2(batch=16, sequence=16, hidden=64)


MICRO = {"micro_batches": 4, "pins": {"parameters": {"*": "S(0)"}}}

CASES: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {mesh}": Mixed(axes, policy, build, double, tolerance=tolerance)
        for mesh, axes in MESHES.items()
        for name, policy, build, double, tolerance in (
            ("bfloat16", MixedPrecisionPolicy(BF16), sized, False, BFLOAT16),
            ("reduced in float32", MixedPrecisionPolicy(BF16, F32, F32), sized, False, BFLOAT16),
            ("llama", MixedPrecisionPolicy(BF16, F32), llama, False, BFLOAT16),
            ("float32 of float64", MixedPrecisionPolicy(F32, F64), sized, True, 2e-5),
            ("only reductions", MixedPrecisionPolicy(None, BF16), sized, False, BFLOAT16),
        )
    },
    "once per step": Mixed({"a": 4}, MixedPrecisionPolicy(F32, F64), sized, True, MICRO, 2e-5),
    "once per step in bfloat16": Mixed(
        {"a": 4}, MixedPrecisionPolicy(BF16, F32), sized, options=MICRO
    ),
    "replicated": Mixed(
        {"a": 4},
        MixedPrecisionPolicy(BF16, F32),
        sized,
        options={"pins": {"parameters": {"*": "I"}}},
    ),
    "checkpoints": Mixed(
        {"a": 2, "b": 2},
        MixedPrecisionPolicy(F32, F64),
        sized,
        True,
        {"activation_checkpointing": "always"},
        2e-5,
    ),
    "re-gathered": Mixed(
        {"a": 4},
        MixedPrecisionPolicy(F32, F64),
        sized,
        True,
        {"reshard_after_forward": "always", "pins": {"parameters": {"*": "S(0)"}}},
        2e-5,
    ),
    "rounded to bfloat16": Rounded({"a": 4}, BF16),
    "not rounded": Rounded({"a": 4}, F32),
    "autocast": Autocast({"a": 4}),
}
LONG = (
    *(f"{name}, {mesh}" for name in ("llama", "float32 of float64") for mesh in MESHES),
    *("once per step", "replicated", "re-gathered", "not rounded"),
)
"""Each pair of element types, and of micro-batches and checkpoints, is in one of the others."""
