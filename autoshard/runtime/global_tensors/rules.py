"""The functions of torch that run on shards, each with its rule; all others gather."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from autoshard.runtime.global_tensors.elementwise import CASTS, ELEMENTWISE, cast, elementwise
from autoshard.runtime.global_tensors.losses import LOSSES
from autoshard.runtime.global_tensors.on_shards import Rule
from autoshard.runtime.global_tensors.products import PRODUCTS
from autoshard.runtime.global_tensors.reductions import ALONG, SUMS
from autoshard.runtime.global_tensors.views import VIEWS

RULES_BY_NAME: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(CASTS, cast),
    **ALONG,
    **SUMS,
    **PRODUCTS,
    **VIEWS,
    **LOSSES,
    "cuda": cast,
    "data": cast,
}
"""Rules by name of function, method or attribute."""

_HOLDERS: tuple[Any, ...] = (torch, torch.Tensor, functional, torch.special, torch.linalg)


def _rules() -> dict[Callable[..., Any], Rule]:
    """Rules by function: the same name may be one of torch, of tensors and of modules."""
    found: dict[Callable[..., Any], Rule] = {}
    for name, rule in RULES_BY_NAME.items():
        for holder in _HOLDERS:
            function = getattr(holder, name, None)
            if callable(function):
                found[function] = rule
    return found


_RULES = _rules()


def rule_of(function: Callable[..., Any]) -> Rule | None:
    """The rule of a function of torch; None if it runs on gathered tensors."""
    if function.__name__ == "__get__":
        return RULES_BY_NAME.get(attribute_of(function))
    return _RULES.get(function)


def operator_rule(operator: Any) -> Rule | None:
    """The rule of an operator of `torch.ops.aten`; None if it runs on gathered tensors."""
    return RULES_BY_NAME.get(operator.overloadpacket.__name__)


def is_elementwise_write(function: Callable[..., Any]) -> bool:
    """True for functions that write, in place, what a function of elements would return."""
    name = function.__name__
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    return plain in ELEMENTWISE or name in {"copy_", "fill_", "zero_"}


def attribute_of(function: Callable[..., Any]) -> str:
    """The name of the attribute that a function gets, sets or deletes; empty for others."""
    if getattr(function, "__name__", "") not in {"__get__", "__set__", "__delete__"}:
        return ""
    return getattr(getattr(function, "__self__", None), "__name__", "")
