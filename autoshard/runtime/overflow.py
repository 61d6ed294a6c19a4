"""Gradients that overflow, where `torch.amp.GradScaler` looks for them.

The scaler asks in one call whether any gradient is infinite, and all ranks must hear the same, or
some of them leave a step out and others do not. DTensor's own answer is put together over the
axes that cut the first gradient. A plan cuts some parameters and leaves others whole, so here it is
put together over all axes that cut any.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def agree_on_overflow() -> None:
    """Let all ranks of this process's DTensors hear of an infinite gradient on any of them."""
    # As torch's own `loss_parallel` does; there is no public way.
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001
    handlers[_UNSCALE] = _unscale


_UNSCALE: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _unscale(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
    gradients, found, scale = args
    _UNSCALE([_local(gradient) for gradient in gradients], _local(found), _local(scale))
    # In the order in which they come, which all ranks share.
    groups = dict.fromkeys(
        gradient.device_mesh.get_group(axis)
        for gradient in gradients
        if isinstance(gradient, DTensor)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )
    for group in groups:
        dist.all_reduce(_local(found), dist.ReduceOp.MAX, group)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
