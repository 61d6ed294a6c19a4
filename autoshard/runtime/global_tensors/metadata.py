"""Functions of torch about a tensor itself, which neither read nor write its elements."""

from collections.abc import Callable
from typing import Any

import torch

from autoshard.runtime.global_tensors.rules import attribute_of

_ATTRIBUTES_WITH_ELEMENTS = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
"""Attributes of tensors that are tensors made of their elements."""

_NAMES = (
    *("__deepcopy__", "__dlpack_device__", "__hash__", "__repr__", "_is_view", "backward"),
    *("data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous"),
    *("is_floating_point", "is_inference", "is_pinned", "is_shared", "is_signed", "ndimension"),
    *("nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("retain_grad", "size", "storage_offset", "stride", "__len__", "is_same_size", "detach_"),
    *("grad", "result_type", "can_cast", "dim_order"),
)

_HOLDERS: tuple[Any, ...] = (torch, torch.Tensor, torch.autograd)

_FUNCTIONS = frozenset(
    function
    for name in _NAMES
    for holder in _HOLDERS
    if callable(function := getattr(holder, name, None))
)

_SHAPED_ALIKE = frozenset(
    """
    empty_like new_empty new_full new_ones new_tensor new_zeros rand_like randint_like randn_like
    """.split()  # noqa: SIM905  a table of words
)


def is_metadata(function: Callable[..., Any]) -> bool:
    """True for functions that only look at, or set, what is known of a tensor."""
    attribute = attribute_of(function)
    if attribute:
        return attribute not in _ATTRIBUTES_WITH_ELEMENTS
    return function in _FUNCTIONS


def is_shaped_alike(function: Callable[..., Any]) -> bool:
    """True for functions that take nothing but the shape, type and device of a tensor."""
    return function.__name__ in _SHAPED_ALIKE
