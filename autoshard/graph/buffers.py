"""Buffers that plain objects hold as well, such as the cache objects of transformers."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

_NOT_SEARCHED = (nn.Module, torch.Tensor, type, ModuleType)
_Holder = tuple[Any, str | int]
"""An object with an attribute, or a list or dict with an item."""


class HeldBuffers:
    """The buffers of a model that plain objects hold as well.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = {
            id(buffer): (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        tensors = _held_tensors(model) if owners else ()
        self._found = [
            (holder, owners[id(tensor)]) for holder, tensor in tensors if id(tensor) in owners
        ]

    @property
    def any(self) -> bool:
        """True if there is one."""
        return bool(self._found)

    def follow(self) -> None:
        """Give the objects the buffers that the modules have now."""
        for (holder, key), (owner, name) in self._found:
            items: Any = holder if isinstance(holder, (dict, list)) else vars(holder)
            items[key] = owner.get_buffer(name)


def follow_buffers(model: nn.Module) -> None:
    """Make plain objects hold the buffers that a module has while it is traced.

    Tracing replaces the buffers of modules by fake tensors, but not those in attributes of other
    objects; what forward writes there would be lost.

    Args:
        model: a copy that is only traced; it gets a hook.
    """
    held = HeldBuffers(model)
    if held.any:
        model.register_forward_pre_hook(lambda *_: held.follow())


def _held_tensors(model: nn.Module) -> Iterator[tuple[_Holder, torch.Tensor]]:
    """Tensors in objects that are reachable from attributes of modules, and where they are."""
    registered = ("_parameters", "_buffers", "_modules")
    waiting: list[Any] = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in registered
    ]
    seen: set[int] = set()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen or isinstance(holder, _NOT_SEARCHED):
            continue
        seen.add(id(holder))
        for key, value in _items(holder):
            if not isinstance(value, torch.Tensor):
                waiting.append(value)
            elif not isinstance(holder, tuple):
                yield (holder, key), value


def _items(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, (list, tuple)):
        return list(enumerate(holder))
    return list(getattr(holder, "__dict__", {}).items())
