"""The tensors of a model that checkpoints contain, and models without allocated parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from autoshard.runtime.global_tensors.dtensors import from_local, local_tensor

EXTRA_STATE = "_extra_state"
"""Name in a state dict of what `get_extra_state` of a module returns."""
_LARGE_BYTES = 1 << 30
"""Size from which on a tensor is taken for a parameter, as a buffer with values is smaller."""


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
        # Parameters of experts may be larger than the memory before they are registered.
        with _LargeOnMeta():
            yield
    finally:
        handle.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors of `torch.empty`, which have no values yet, on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept a torch function."""
        given = kwargs or {}
        if func is torch.empty and not {"out", "pin_memory"} & given.keys():
            made = func(*args, **{**given, "device": "meta"})
            if made.nbytes >= _LARGE_BYTES:
                return made
        return func(*args, **given)


def _on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None  # keeps the object, so that tied parameters stay tied
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor in the state dict of a model.

    Attributes:
        model: the model.
        names: its names in the state dict; several if it is tied.
        tensor: its current value.
        attributes: paths of the parameter or buffer in the model, which hooks may rename; none for
            the extra state of a module, and for what hooks compute.
    """

    model: nn.Module
    names: tuple[str, ...]
    tensor: torch.Tensor
    attributes: tuple[str, ...]

    @property
    def is_meta(self) -> bool:
        """True if it is on the meta device."""
        return local_tensor(self.tensor).is_meta

    @property
    def extra_state_of(self) -> nn.Module | None:
        """The module whose `get_extra_state` returns it; None for other tensors."""
        return _owner_of_extra_state(self.model, self.names[0], self.tensor)

    @property
    def is_computed(self) -> bool:
        """True if a hook computes it, so that it cannot be filled."""
        return not self.attributes and self.extra_state_of is None

    def set(self, tensor: torch.Tensor) -> None:
        """Replace it in the model, in all places."""
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        for path in self.attributes:
            owner, _, attribute = path.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, tensor)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """The tensors of a model's state dict: parameters, then buffers, then others; tied ones once.

    They are known by identity, since hooks may rename what is in a state dict.
    """
    state = model.state_dict(keep_vars=True)
    attributes: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for path, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        attributes.setdefault(id(tensor), []).append(path)
        tensors[id(tensor)] = tensor
    names: dict[int, list[str]] = {key: [] for key in tensors}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            known = value if id(value) in tensors else _same_memory(value, tensors.values())
            tensors.setdefault(id(known), known)
            names.setdefault(id(known), []).append(name)
    return [
        ModelTensor(model, tuple(names[key]), tensor, tuple(attributes.get(key, ())))
        for key, tensor in tensors.items()
        if names[key]
    ]


def other_state(model: nn.Module) -> dict[str, object]:
    """Entries of a model's state dict that are no tensors, by name: extra state of modules."""
    state = model.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) and value is not None
    }


def _same_memory(tensor: torch.Tensor, known: Iterable[torch.Tensor]) -> torch.Tensor:
    """The parameter or buffer of which a hook has made another view; else the tensor itself."""
    own = _place(tensor)
    return next((one for one in known if own is not None and _place(one) == own), tensor)


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Where a tensor is in memory; None if it has none."""
    local = local_tensor(tensor)
    if local.is_meta or not local.numel():
        return None
    return local.data_ptr(), local.shape, local.stride(), local.dtype, tensor.shape


def _owner_of_extra_state(model: nn.Module, name: str, tensor: torch.Tensor) -> nn.Module | None:
    path, _, attribute = name.rpartition(".")
    if attribute != EXTRA_STATE or isinstance(tensor, nn.Parameter):
        return None
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def non_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not in the state dict, by name."""
    saved = {path for one in model_tensors(model) for path in one.attributes}
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in saved}


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
