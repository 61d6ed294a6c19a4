"""Conversion of parameters, arguments and results of a model under a mixed-precision policy."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from autoshard.graph.dtype import DType
from autoshard.graph.mixed_precision import MixedPrecision
from autoshard.torch_private import pytree


def cast_parameters(model: nn.Module, policy: MixedPrecision) -> dict[str, DType]:
    """Convert the floating-point parameters of a model in place.

    Args:
        model: a copy that is only traced.
        policy: the policy.

    Returns:
        The former element type of each parameter that was converted, by all its names.
    """
    if policy.param_dtype is None:
        return {}
    dtype = torch_dtype(policy.param_dtype)
    named = list(model.named_parameters(remove_duplicate=False))
    stored = {
        name: DType(str(parameter.dtype).removeprefix("torch."))
        for name, parameter in named
        if parameter.is_floating_point() and parameter.dtype is not dtype
    }
    for name, parameter in named:
        if name in stored:
            parameter.data = parameter.data.to(dtype)
    return stored


def cast_parameter(parameter: torch.Tensor, policy: MixedPrecision) -> torch.Tensor:
    """A parameter as operators read it."""
    if policy.param_dtype is None or not parameter.is_floating_point():
        return parameter
    return parameter.to(torch_dtype(policy.param_dtype))


def with_casts(forward: Callable[..., Any], policy: MixedPrecision) -> Callable[..., Any]:
    """A forward that converts its arguments and its result.

    Args:
        forward: takes a model, which is left alone, and the arguments of its forward.
        policy: the policy.
    """

    @wraps(forward)
    def cast(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        if policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        return _cast(forward(model, *args, **kwargs), policy.output_dtype)

    return cast


def torch_dtype(dtype: DType) -> torch.dtype:
    """The element type as torch's object."""
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _cast(tree: Any, dtype: DType | None) -> Any:
    if dtype is None:
        return tree
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(torch_dtype(dtype)) if x.is_floating_point() else x, tree
    )
