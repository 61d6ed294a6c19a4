"""Norms of the gradients of all pipeline stages, clipping by them, and optimizers that need all."""

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.errors import PlanError
from autoshard.runtime.global_tensors.dtensor_handlers import FURTHER_GROUPS
from autoshard.runtime.global_tensors.dtensors import local_tensor
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.recorder import not_recorded
from autoshard.torch_private import replace_total_norm, torch_total_norm

_GROUPS: WeakKeyDictionary[nn.Module, ProcessGroup] = WeakKeyDictionary()
"""The models of which a rank has a part of the gradients, with all their ranks."""


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    devices: StageDevices,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale gradients so that the norm over all stages is at most `max_norm`.

    Args:
        parameters: of this rank.
        counted: those whose gradients are part of the norm: not copies of other ranks' parameters.
        devices: of all stages.
        max_norm: the largest norm.
        norm_type: of the norm; may be infinite.

    Returns:
        The norm before, as a float64 tensor without dims; the same on all ranks.
    """
    gradients = [p.grad for p in counted if p.grad is not None]
    parts = [_part(gradient, norm_type) for gradient in gradients]
    total = torch.zeros((), dtype=torch.float64, device=devices.whole.device_type)
    if parts:
        stacked = torch.stack(parts).to(total)
        total = stacked.max() if norm_type == inf else stacked.sum()
    with not_recorded():
        operation = dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, devices.group)
    norm = total if norm_type == inf else total ** (1.0 / norm_type)
    # As torch.nn.utils.clip_grad_norm_ does.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            local.mul_(factor.to(local.dtype))
    return norm


def _part(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """This rank's part of a gradient in the norm of all; ranks with the same shard share it."""
    local = local_tensor(gradient)
    dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
    if not local.numel():
        return local.new_zeros((), dtype=torch.float64)
    norm: torch.Tensor = torch.linalg.vector_norm(local, norm_type, dtype=dtype)
    norm = norm.double()
    return norm if norm_type == inf else (norm**norm_type).div(_num_replicas(gradient))


def _num_replicas(gradient: torch.Tensor) -> int:
    number = 1
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            number *= size if placement.is_replicate() else 1
    return number


def join_stages(model: nn.Module, devices: StageDevices) -> None:
    """Make PyTorch treat the gradients of all stages as those of one model.

    `torch.nn.utils.clip_grad_norm_`, `get_total_norm` and LBFGS refuse those of one rank, and
    `torch.amp.GradScaler` skips a step on all ranks if any stage has infinite gradients.
    """
    _GROUPS[model] = devices.group
    replace_total_norm(_total_norm)
    _register_hook()
    if _groups_of not in FURTHER_GROUPS:
        FURTHER_GROUPS.append(_groups_of)


def _groups_of(gradients: Sequence[torch.Tensor]) -> list[ProcessGroup]:
    """All ranks of the models with stages that some gradients belong to."""
    given = {id(gradient) for gradient in gradients}
    return [
        group
        for model, group in _GROUPS.items()
        if any(id(parameter.grad) in given for parameter in model.parameters())
    ]


def _total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if _groups_of(tensors):
        raise PlanError(
            "this rank has only the gradients of its own pipeline stages, so their norm is not "
            "that of the model: call model.clip_grad_norm_(max_norm) on all ranks, which returns "
            "the norm; with max_norm=float('inf') it scales nothing"
        )
    return torch_total_norm(tensors, *args, **kwargs)


@cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(_refuse_lbfgs)


def _refuse_lbfgs(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse an optimizer that computes over all parameters, of which a rank has a part."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(p) in given for model in _GROUPS for p in model.parameters()):
        raise PlanError(
            "LBFGS computes a step from the gradients of all parameters together, and this rank "
            "has only those of its own pipeline stages: use an optimizer that computes parameter "
            "by parameter, such as AdamW, or LBFGS with a plan of one stage"
        )
