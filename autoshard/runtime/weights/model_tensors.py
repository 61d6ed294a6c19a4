"""The tensors of a model that checkpoints contain, and models without allocated parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from autoshard.runtime.dtensors import from_local, local_tensor


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """A context in which models are created with parameters on the meta device and real buffers.

    Non-persistent buffers, such as rotary tables, are computed by the model's constructor; on the
    meta device their values would be lost. Applies to models created in any thread.

    Example:
        >>> with init_empty_weights():
        ...     layer = torch.nn.Linear(4, 2)
        >>> layer.weight.is_meta
        True
    """
    # torch documents that the hook may return a parameter; its annotation says otherwise.
    hook: Any = _on_meta
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None  # keeps the object, so that tied parameters stay tied
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer in the state dict of a model.

    Attributes:
        model: the model.
        names: its names in the state dict; several if it is tied.
        tensor: its current value.
    """

    model: nn.Module
    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def is_meta(self) -> bool:
        """True if it is on the meta device."""
        return local_tensor(self.tensor).is_meta

    def set(self, tensor: torch.Tensor) -> None:
        """Replace it in the model, under all names."""
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        for name in self.names:
            owner, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, tensor)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """The parameters, then the buffers of a model's state dict; tied ones once."""
    state = model.state_dict(keep_vars=True)
    parameters = model.named_parameters(remove_duplicate=False)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        if name in state:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    return [ModelTensor(model, tuple(names[key]), tensor) for key, tensor in tensors.items()]


def non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not in the state dict, by name."""
    state = model.state_dict(keep_vars=True)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in state}


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor on a device, with the shape, dtype and placements of another."""
    local = torch.empty_like(local_tensor(tensor), device=device)
    if not isinstance(tensor, DTensor):
        return local
    return from_local(local, tensor.device_mesh, tensor.placements, tensor.shape)


def mesh_device(model: nn.Module) -> torch.device:
    """The device of a model's mesh; torch's default device if no parameter is a DTensor."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    return torch.get_default_device()
