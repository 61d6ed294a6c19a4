"""Functions whose gradient is not that of their operators, which an export forgets."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.utils import _pytree as pytree

_SAME_GRADIENT = "torch."
"""Functions of torch itself (activation checkpointing, say) compute what their forward says."""


@contextmanager
def own_gradients_watched() -> Iterator[set[str]]:
    """A context that collects the names of a model's own `autograd.Function`s.

    An exported graph keeps the operators of their forward and nothing of their backward.
    Only those that are called where a gradient passes are collected.
    """
    plain = Function.__dict__["apply"]
    found: set[str] = set()

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        passes = any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for leaf in pytree.tree_leaves((args, kwargs))
        )
        if passes and torch.is_grad_enabled() and not cls.__module__.startswith(_SAME_GRADIENT):
            found.add(f"{cls.__module__}.{cls.__qualname__}")
        return plain.__func__(cls, *args, **kwargs)

    # Assigned here and put back below.
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        Function.apply = plain  # type: ignore[method-assign]
