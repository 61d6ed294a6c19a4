"""Calls of modules with other parameters and buffers, also in what backward recomputes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from autoshard.torch_private import checkpointed

Function = Callable[..., Any]


class _Calling(nn.Module):
    """Calls a function that reads the tensors of a module."""

    _function: Function

    def __init__(self, module: nn.Module, function: Function) -> None:
        super().__init__()
        self.module = module
        vars(self)["_function"] = function  # no child, though it may be a module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._function(*args, **kwargs)


def call_with_tensors(
    module: nn.Module,
    function: Function,
    tensors: dict[str, torch.Tensor],
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    stored: Callable[[], None] = lambda: None,
) -> Any:
    """Call a function that reads the tensors of a module, with others in their place.

    What `torch.utils.checkpoint` recomputes in backward reads the same ones, although the module
    has its own again by then.

    Args:
        module: the module.
        function: it, or a function that calls it.
        tensors: parameters and buffers by name; buffers that are assigned are replaced in it.
        arguments: those by position, and those by name.
        stored: called after each call, when `tensors` has the new buffers.
    """

    def with_tensors(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            return call_with_tensors(module, function, tensors, (args, kwargs), stored)

        return call

    replaced = {f"module.{name}": tensor for name, tensor in tensors.items()}
    args, kwargs = arguments
    try:
        with checkpointed(with_tensors):
            return functional_call(_Calling(module, function), replaced, tuple(args), dict(kwargs))
    finally:  # a recomputation ends with an exception when it has what is needed
        tensors.update({name: replaced[f"module.{name}"] for name in tensors})
        stored()
