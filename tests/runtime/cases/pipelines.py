"""Training in pipeline stages: losses, gradients and communication."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import TOLERANCE, close, device_mesh, whole
from support.devices import DEVICE
from support.meshes import slow_devices
from support.models import Case, bert, gpt2, llama, resnet, small_graph, t5
from torch import nn

from autoshard.checker import check_plan
from autoshard.errors import PlanError
from autoshard.graph import MixedPrecision, export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, record_collectives, summarize
from autoshard.runtime.pipelining import Pipelined
from autoshard.runtime.recorder import CollectiveRecorder
from autoshard.schedules.transfers import messages


@dataclass
class Trained:
    """A step gives the loss and the gradients of the unsharded model, micro-batch by micro-batch.

    Attributes:
        build: a model with the arguments of a micro-batch.
        axes: of the mesh.
        options: of the plan.
    """

    build: Callable[[], Case]
    axes: Mapping[str, int]
    options: Mapping[str, Any]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        options = PlanOptions(**{"micro_batches": 4} | self.options)
        self.plan = make_plan(small_graph(self.build), slow_devices(**self.axes), options)
        assert self.plan.found, self.plan.reason

    def built(self) -> tuple[Case, list[dict[str, Any]]]:
        """The model, and the arguments of all micro-batches."""
        torch.manual_seed(0)
        model, inputs = self.build()
        return (model, inputs), [inputs, *(self.build()[1] for _ in range(3))]

    def __call__(self) -> None:
        (reference, _), parts = self.built()
        losses = torch.stack([loss_of(reference(**part)) for part in parts])
        losses.mean().backward()
        (model, _), _ = self.built()
        planned = parallelize(model, self.plan, device_mesh(self.plan))
        for _ in range(2):
            with record_collectives(planned[0].mesh) as recorder:
                loss = planned.step(**joined_batch(parts))
            close(loss, losses.detach().mean().double(), "loss")
            check_gradients(planned, reference)
            check_collectives(recorder, self.plan, planned)
            check_messages(recorder, self.plan)
            planned.zero_grad()


@dataclass
class Mixed(Trained):
    """As `Trained`, of parameters in float64 that are read in float32 and reduced in float64."""

    def prepare(self) -> None:
        model, inputs = self.build()
        policy = MixedPrecision("float32", "float64")
        archive = export_model(model.double(), (), inputs, mixed_precision=policy)
        options = PlanOptions(**{"micro_batches": 4} | self.options)
        self.plan = make_plan(load_graph(archive), slow_devices(**self.axes), options)
        assert self.plan.found, self.plan.reason
        assert not check_plan(self.plan)
        assert self.plan.graph.precision.startswith("float32 compute, float64 parameters")

    def __call__(self) -> None:
        (reference, _), parts = self.built()
        losses = torch.stack([loss_of(reference(**part)) for part in parts])
        losses.mean().backward()
        (model, _), _ = self.built()
        planned = parallelize(model.double(), self.plan, device_mesh(self.plan))
        with record_collectives(planned[0].mesh) as recorder:
            loss = planned.step(**joined_batch(parts))
        close(loss, losses.detach().mean().double(), "loss")
        check_gradients(planned, reference.double())
        assert all(p.grad.dtype is torch.float64 for p in planned.parameters())
        check_collectives(recorder, self.plan, planned)
        check_messages(recorder, self.plan)
        with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(PlanError, match="autocast"):
            planned.step(**joined_batch(parts))


def loss_of(result: Any) -> torch.Tensor:
    """The loss among the results of forward."""
    loss: torch.Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss


def joined_batch(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of the whole batch."""
    return {
        name: torch.cat([part[name] for part in parts]) if isinstance(x, torch.Tensor) else x
        for name, x in parts[0].items()
    }


def check_gradients(planned: nn.Module, reference: nn.Module) -> None:
    """Each rank has the gradients of its stages, and all ranks together have all."""
    expected = dict(reference.named_parameters(remove_duplicate=False))
    own = dict(planned.named_parameters(remove_duplicate=False))
    for name, parameter in own.items():
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        close(whole(parameter.detach()), expected[name].detach(), name, 0)
        close(whole(parameter.grad), gradient, f"gradient of {name}", TOLERANCE)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(own))
    assert {name for names in held for name in names} == expected.keys()


def check_collectives(recorder: CollectiveRecorder, plan: Plan, planned: Pipelined) -> None:
    """This rank runs the collectives of its stages."""
    assert plan.pipeline is not None
    counts: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for stage in planned:
        for one in plan.pipeline.stages[stage.stage_index].collectives:
            counts[one.kind, one.axis, one.direction] += one.count
            nbytes[one.kind, one.axis, one.direction] += one.nbytes
    found = summarize(recorder.records)
    assert {(c.kind, c.axis, c.direction): c.count for c in found} == counts
    assert {(c.kind, c.axis, c.direction): c.nbytes for c in found} == nbytes


def check_messages(recorder: CollectiveRecorder, plan: Plan) -> None:
    """All ranks together send the planned messages, and receive what was sent."""
    assert plan.pipeline is not None
    own = [(m.content, m.sent, m.nbytes) for m in recorder.messages]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    planned = {"value": Counter[int](), "gradient": Counter[int]()}
    for number, transfers in enumerate(plan.pipeline.transfers):
        for transfer in transfers:
            ends = [
                (layout, tuple(size for _, size in plan.stages[number + place].axes))
                for place, layout in enumerate((transfer.source, transfer.target))
            ]
            for content, (source, target), planned_number in (
                ("value", ends, transfer.messages),
                ("gradient", ends[::-1], transfer.gradient_messages),
            ):
                sent = messages(transfer.shape, *source, *target) if planned_number else ()
                assert len(sent) == planned_number
                itemsize = getattr(torch, transfer.dtype).itemsize
                planned[content].update(prod(m.shape) * itemsize for m in sent)
    for content, sizes in planned.items():
        expected = {size: 4 * number for size, number in sizes.items()}
        for is_sent in (True, False):
            found = [n for one in every for c, s, n in one if (c, s) == (content, is_sent)]
            assert Counter(found) == expected, content


MODELS: Mapping[str, Callable[[], Case]] = {
    "gpt2": partial(gpt2, batch=4),
    "llama": partial(llama, batch=4),
    "bert": partial(bert, batch=4),
    "t5": partial(t5, batch=4),
    "resnet": partial(resnet, batch=4),
}

TENSOR_PARALLEL: Mapping[str, dict[str, str]] = {
    "gpt2": {
        "*.c_attn.weight": "S(1)/1+1+1",
        "*.attn.c_proj.weight": "S(0)",
        "*.mlp.c_fc.weight": "S(1)",
        "*.mlp.c_proj.weight": "S(0)",
    },
    "llama": {"*.[qkv]_proj.weight": "S(0)", "*.up_proj.weight": "S(0)"},
    "bert": {"*.attention.self.*.weight": "S(0)", "*.intermediate.*.weight": "S(0)"},
    "t5": {"*.[qkv].weight": "S(0)", "*.wi.weight": "S(0)"},
    "resnet": {"*.convolution.weight": "S(0)"},
}
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "bert": ("input_ids", "attention_mask", "labels"),
    "resnet": ("pixels", "labels"),
}
SCHEDULES = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def in_stages(name: str, axis: str, schedule: str, stages: int) -> Trained:
    """A model in stages on 4 ranks, or on 2 without another axis; the other axis has 2."""
    arguments = ARGUMENTS.get(name, ("input_ids", "labels"))
    layout = {"dp": "S(0)", "tp": "I"}.get(axis, "I")
    pins: dict[str, Any] = {"inputs": dict.fromkeys(arguments, layout)}
    if axis == "tp":
        pins["parameters"] = TENSOR_PARALLEL[name]
    ranks = stages if schedule in SCHEDULES else stages // 2
    axes = {"pp": ranks} | ({axis: 2} if axis else {})
    return Trained(MODELS[name], axes, {"stages": stages, "schedule": schedule, "pins": pins})


CASES = {
    **{
        f"{name}, pp4, {schedule}": in_stages(name, "", schedule, 4)
        for name, schedule in zip(MODELS, ("GPipe", "1F1B") * 3, strict=False)
    },
    **{
        f"{name}, pp2 {axis}2, {schedule}": in_stages(name, axis, schedule, 2)
        for name in MODELS
        for axis, schedule in (("dp", "1F1B"), ("tp", "GPipe"))
    },
    **{
        f"gpt2, pp2 {axis}2, {schedule}": in_stages("gpt2", axis, schedule, 4)
        for schedule, axis in zip(LOOPED, ("dp", "tp") * 3, strict=False)
    },
}
ON_2 = {
    **{
        f"{name}, {schedule}, mixed precision": Mixed(one.build, one.axes, one.options)
        for name, schedule, stages in (("gpt2", "1F1B", 2), ("t5", "ZBVZeroBubble", 4))
        for one in [in_stages(name, "", schedule, stages)]
    },
    **{
        f"{name}, {schedule}": in_stages(name, "", schedule, 2)
        for name, schedule in zip(MODELS, ("1F1B", "GPipe") * 3, strict=False)
    },
    **{f"t5, {schedule}": in_stages("t5", "", schedule, 4) for schedule in LOOPED},
    **{
        f"{name}, {schedule}": in_stages(name, "", schedule, 4)
        for name, schedule in zip(("gpt2", "llama", "bert", "resnet"), LOOPED[1:], strict=True)
    },
}
LONG = (
    "llama, pp4, 1F1B",
    "bert, pp4, GPipe",
    "t5, pp2 dp2, 1F1B",
    "resnet, pp2 tp2, GPipe",
    "llama, pp2 dp2, 1F1B",
    "bert, pp2 tp2, GPipe",
    "gpt2, pp4, GPipe",
    "resnet, pp4, GPipe",
    "gpt2, pp2 tp2, GPipe",
    "bert, pp2 dp2, 1F1B",
    "t5, pp2 tp2, GPipe",
    "gpt2, pp2 dp2, Interleaved1F1B",
    "gpt2, pp2 tp2, LoopedBFS",
    "gpt2, pp2 dp2, DualPipeV",
)
"""Each model, schedule and axis is in one of the others, or in those on 2 ranks."""
