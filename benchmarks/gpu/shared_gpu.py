"""Four ranks that share the device: plans beside DDP, FSDP2 and tensor parallel."""

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Plan
from autoshard.runtime import record_collectives, summarize
from benchmarks.frameworks import (
    CHOSEN,
    FRAMEWORKS,
    PLANNED,
    Step,
    check_losses,
    mean_over_ranks,
    plans_of,
    steps_of,
)
from benchmarks.gpu.child import Job
from benchmarks.gpu.devices import DEVICES, Device
from benchmarks.gpu.models import SHARED
from benchmarks.gpu.ranks import Found, on_ranks

_WARM_UP, _STEPS = 2, 5
_TOLERANCE = 0.02
"""Relative difference of losses: sums of numbers in bfloat16 have other orders."""

KINDS = (*FRAMEWORKS, *(f"{name}{PLANNED}" for name in FRAMEWORKS), CHOSEN)
"""What is measured of each model."""


def run(job: Job) -> None:
    """Measure the models of which something is missing."""
    for model in [name for name in SHARED if name in job.models]:
        if all(f"{model}: {kind}" in job.done for kind in KINDS):
            continue
        with job.failures_of(model):
            plans = plans_of(SHARED[model].on(job.device), job.topology)
            documents = {name: plan.to_json() for name, plan in plans.items()}
            for name, result in on_ranks(measured, (job.device, model, documents), 4, job.device):
                job.put(f"{model}: {name}", result)


def measured(device_type: str, model: str, documents: Mapping[str, str]) -> Iterator[Found]:
    """Steps of a model on this rank, one way to train after the other.

    Raises:
        RuntimeError: two of them compute different losses.
    """
    device = DEVICES[device_type]()
    dist.init_process_group("gloo" if device_type == "cpu" else "nccl")
    plans = {name: Plan.from_json(text) for name, text in documents.items()}
    losses = {}
    for name, mesh, build in steps_of(SHARED[model].on(device_type), plans, device.device):
        plan = None if name in FRAMEWORKS else plans[name.removesuffix(PLANNED)]
        result = _measured(device, mesh, build, plan)
        device.release()
        losses[name] = result["loss"]
        yield name, result
    check_losses(losses, _TOLERANCE)


def _measured(
    device: Device, mesh: DeviceMesh, build: Callable[[], Step], plan: Plan | None
) -> dict[str, Any]:
    """A step on all ranks: seconds of the slowest, memory of this one, and its collectives."""
    before = device.allocated()
    step = build()
    loss = mean_over_ranks(step())
    device.reset_peak()
    with record_collectives(mesh) as recorder:
        step()
    collectives = summarize(recorder.records)
    device.seconds(step, _WARM_UP)
    dist.barrier()
    seconds = torch.tensor(device.seconds(step, _STEPS), device=device.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {
        "seconds": median(seconds.tolist()),
        "peak": device.peak() - before,
        "loss": loss,
        "collectives": [count.model_dump(mode="json") for count in collectives],
        "as_planned": None if plan is None else collectives == plan.collectives,
    }
