"""The tensors of a model that checkpoints hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.parameters import Holder
from autoshard.runtime.signature import from_local


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or a buffer, which may have several names.

    Attributes:
        names: in the state dict; several where tensors are tied.
        tensor: as it is now.
        holders: where the model keeps it, one for each name.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    holders: tuple[Holder, ...]

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory yet."""
        return local_of(self.tensor).is_meta

    def with_memory(self, device: torch.device) -> torch.Tensor:
        """The tensor, or one like it with memory of its own where it has none."""
        if not self.is_meta:
            return self.tensor.detach()
        return empty_like(self.tensor, device)

    def put(self, tensor: torch.Tensor) -> None:
        """Make the model keep another tensor, under all names."""
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        for holder in self.holders:
            setattr(holder.module, holder.name, tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that lies like another one, with memory of its own."""
    local = torch.empty_like(local_of(tensor), device=device)
    if not isinstance(tensor, DTensor):
        return local
    return from_local(local, tensor.device_mesh, tensor.placements, tensor.shape)


def slots_of(model: nn.Module) -> list[Slot]:
    """The tensors of a model's state dict, in its order."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _persistent(model).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [
        Slot(tuple(names[key]), tensor, tuple(Holder.of(model, name) for name in names[key]))
        for key, tensor in tensors.items()
    ]


def _persistent(model: nn.Module) -> Mapping[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in _named_tensors(model).items() if name in state}


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return dict(chain(parameters, model.named_buffers(remove_duplicate=False)))


def unkept_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict does not hold, by name."""
    kept = _persistent(model)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in kept}


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's mesh; torch's default one where nothing is distributed."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    return torch.get_default_device()
