"""Full state dicts of models with pipeline stages, of which each rank has a part.

`full_state_dict` of `torch.distributed.checkpoint.state_dict` gathers the shards of each tensor,
and a rank has those of its own stages only.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import CheckpointError
from autoshard.runtime.global_tensors.dtensors import full_tensor
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.torch_private import (
    replace_state_dicts,
    torch_model_state_dict,
    torch_optimizer_state_dict,
)


@runtime_checkable
class HasStages(Protocol):
    """A model with pipeline stages.

    Attributes:
        devices: of all stages.
        saved_tensors: the tensors that each pipeline rank saves, by name, on the meta device.
        saved_names: for each name in the state dict of the whole model, the one that is saved.
    """

    devices: StageDevices
    saved_tensors: tuple[dict[str, torch.Tensor], ...]
    saved_names: Mapping[str, str]


def support_full_states() -> None:
    """Let `full_state_dict` give the tensors of all stages."""
    replace_state_dicts(_model_state_dict, _optimizer_state_dict)


def _model_state_dict(model: nn.Module, info: Any) -> Any:
    """The state dict of a model as torch makes it, or of all of its stages.

    Raises:
        CheckpointError: a part of the full state dict is asked for.
    """
    if not (isinstance(model, HasStages) and info.full_state_dict and info.handle_model):
        return torch_model_state_dict(model, info)
    if info.ignore_frozen_params or info.submodule_prefixes:
        raise CheckpointError(
            "full_state_dict=True of a model with pipeline stages gives all tensors: leave out "
            "ignore_frozen_params and submodules, and choose from what is returned"
        )
    offloads = info.cpu_offload
    info.full_state_dict = info.cpu_offload = False
    try:
        own = torch_model_state_dict(model, info)
    finally:
        info.full_state_dict, info.cpu_offload = True, offloads
    return _joined(model, own, offloads=offloads)


def _optimizer_state_dict(model: nn.Module, optimizers: Any, info: Any) -> Any:
    """The state dict of optimizers as torch makes it.

    Raises:
        CheckpointError: a full one is asked for, and the ranks have optimizers of their stages.
    """
    if isinstance(model, HasStages) and info.full_state_dict and info.handle_optim:
        raise CheckpointError(
            "full_state_dict=True would give the optimizer state of this rank's pipeline stages "
            "only: save get_optimizer_state_dict(model, optimizer, options=StateDictOptions("
            "flatten_optimizer_state_dict=True)) with torch.distributed.checkpoint.save and "
            "dcp_state_dict(state, model); dcp_to_torch_save makes one file of it"
        )
    return torch_optimizer_state_dict(model, optimizers, info)


def _joined(model: HasStages, own: Mapping[str, Any], *, offloads: bool) -> dict[str, torch.Tensor]:
    """The full tensors of all stages; with offloading on the first rank only, on its CPU."""
    devices = model.devices
    first = int(devices.whole.mesh.flatten()[0])
    keeps = not offloads or dist.get_rank() == first
    found: dict[str, torch.Tensor] = {}
    for position, saved in enumerate(model.saved_tensors):
        source = devices.ranks[devices.positions[position][0]][0]
        for name, like in saved.items():
            if devices.position == position:
                full = full_tensor(own[name].detach())
            else:
                full = torch.empty_like(like, device=devices.whole.device_type)
            # As bytes, a type that all backends send.
            data = full.contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(data, source, devices.group)
            if keeps:
                whole = data.view(full.dtype).view(full.shape)
                found[name] = whole.cpu() if offloads else whole
    return {name: found[saved] for name, saved in model.saved_names.items()} if keeps else {}
