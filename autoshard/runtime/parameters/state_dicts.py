"""State dicts that PyTorch itself loads: full tensors are sharded as the model stores them.

`torch.nn.Module.load_state_dict` and optimizers know nothing of shards, and `torch.save` writes
the shard of one rank.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.errors import CheckpointError
from autoshard.layouts import from_placements
from autoshard.runtime.checks.agreement import first_failed
from autoshard.runtime.global_tensors.dtensors import from_local, full_tensor, local_tensor
from autoshard.runtime.shards import dtensor_slices, local_shard
from autoshard.torch_private import (
    own_buffers,
    own_parameters,
    replace_distribute_tensors,
    torch_distribute_tensors,
)


def support_state_dicts(model: nn.Module) -> None:
    """Make the functions of PyTorch that load a state dict accept full tensors.

    Args:
        model: has DTensors as parameters and buffers.
    """
    for module in model.modules():
        tensors = chain(own_parameters(module).values(), own_buffers(module).values())
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            register: Any = module.register_load_state_dict_pre_hook  # torch does not type it
            register(_place_loaded_tensors)
    register_at_root: Any = model.register_load_state_dict_pre_hook
    register_at_root(_keep_ties)
    _support_all_optimizers()
    replace_distribute_tensors(_distribute_tensors)


def placed_like(value: Any, stored: torch.Tensor, name: str) -> Any:
    """A loaded value as a DTensor on the mesh of a stored one, with its placements.

    Args:
        value: from a state dict; anything but a DTensor or a tensor of the global shape is returned
            unchanged.
        stored: a parameter, a buffer, or a tensor of an optimizer's state.
        name: of the value, for messages.

    Raises:
        CheckpointError: it is a DTensor of another rank, or of a mesh of another shape.
    """
    if not isinstance(stored, DTensor) or not isinstance(value, torch.Tensor):
        return value
    mesh, placements = stored.device_mesh, stored.placements
    if isinstance(value, DTensor):
        # Operators of DTensor exchange the mesh for an equal one, so none may run before.
        if value.device_mesh is not mesh:
            value = _on_mesh(value, mesh, name)
        if value.placements == placements:
            return value
        value = full_tensor(value)
    coordinate = mesh.get_coordinate()
    if value.shape != stored.shape or coordinate is None:
        return value
    sizes = tuple(mesh.shape)
    shard = local_shard(value.detach(), from_placements(placements, sizes), sizes, coordinate)
    # Fused optimizers read memory, not strides; a view would also keep the full tensor.
    shard = shard.clone(memory_format=torch.contiguous_format).to(mesh.device_type)
    return from_local(shard, mesh, placements, stored.shape)


def _on_mesh(value: DTensor, mesh: DeviceMesh, name: str) -> DTensor:
    """A DTensor that was written by a process with another mesh object, on this mesh."""
    saved = value.device_mesh
    if tuple(saved.shape) != tuple(mesh.shape) or saved.get_coordinate() != mesh.get_coordinate():
        raise CheckpointError(
            f"{name!r} of the state dict is the shard of the rank at {saved.get_coordinate()} of a "
            f"mesh of shape {tuple(saved.shape)}, and this rank is at {mesh.get_coordinate()} of "
            f"one of shape {tuple(mesh.shape)}: torch.save writes only the shards of the rank that "
            f"calls it. Save with autoshard.save_checkpoint, with torch.distributed.checkpoint, or "
            f"the full tensors of get_model_state_dict(..., StateDictOptions(full_state_dict=True))"
        )
    local: torch.Tensor = DTensor.to_local(value)
    return from_local(local.detach(), mesh, value.placements, value.shape)


def _place_loaded_tensors(
    module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any
) -> None:
    """Shard what `load_state_dict` is about to copy into a module's own parameters and buffers."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    for name, stored in chain(parameters, module.named_buffers(recurse=False)):
        key = f"{prefix}{name}"
        if key in state:
            state[key] = placed_like(state[key], stored, key)


def _keep_ties(
    model: nn.Module,
    state: MutableMapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_: Any,
) -> None:
    """Let tied parameters stay one, if `load_state_dict` assigns equal values to all their names.

    It would make a parameter for each name, and the program reads one of them.
    """
    if not metadata.get("assign_to_params_buffers"):
        return
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and f"{prefix}{name}" in state:
            names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        stored = parameters[tied[0]]
        if len(tied) == 1 or not isinstance(stored, DTensor):
            continue
        values = [placed_like(state[f"{prefix}{name}"], stored, name) for name in tied]
        if all(isinstance(value, DTensor) for value in values) and _are_equal(values):
            one = nn.Parameter(values[0].detach(), requires_grad=stored.requires_grad)
            state.update({f"{prefix}{name}": one for name in tied})


def _are_equal(values: Sequence[DTensor]) -> bool:
    """True if DTensors that are placed alike have the same bytes on all ranks."""
    local = [local_tensor(value).detach() for value in values]
    if any(one.is_meta for one in local):
        return True
    first, *others = (one.contiguous().reshape(-1).view(torch.uint8) for one in local)
    differs = any(not torch.equal(first, other) for other in others)
    return first_failed(values[0].device_mesh, failed=differs) is None


_checked: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
"""The state of each optimizer when it was last checked; loading replaces the object."""


def _support_all_optimizers() -> None:
    global _hook  # noqa: PLW0603  one hook per process
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_place_loaded_state)


_hook: Any = None


def _place_loaded_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Shard the state of an optimizer in the first step after it was loaded."""
    if _checked.get(optimizer) is optimizer.state:
        return
    _checked[optimizer] = optimizer.state
    numbers = _NUMBERS | {
        name
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if parameter.ndim and isinstance(value, torch.Tensor) and not value.ndim
    }
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for name, value in state.items():
                if parameter.ndim or name not in numbers:
                    state[name] = placed_like(value, parameter, name)


_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch's optimizers that are one number for a parameter, not one for each element.

Those of other optimizers are known by the parameters that have dims.
"""


def _distribute_tensors(state: dict[str, Any], keys: list[str], *args: Any) -> None:
    """Fill DTensors from full tensors, also those of which a rank has several slices.

    For these, torch would copy one contiguous slice.

    Args:
        state: pairs of a DTensor and the full tensor; replaced by the filled DTensors.
        keys: of the pairs.
        *args: device and process group.
    """
    for key in keys:
        match state.get(key):
            case (DTensor() as stored, torch.Tensor() as full) if _has_several_slices(stored):
                placed = placed_like(full, stored, key)
                if not stored.is_meta:
                    local_tensor(stored).copy_(local_tensor(placed))
                state[key] = placed if stored.is_meta else stored
    torch_distribute_tensors(state, keys, *args)


def _has_several_slices(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return any(len(slices) > 1 for slices in dtensor_slices(tensor, coordinate))
