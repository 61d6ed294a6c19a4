"""Comparison of two modules, part by part: where one has what the other has."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.graph.export.python_state.description.paths import instance_dict
from autoshard.graph.export.python_state.user_code.holders import MODULE_FIELDS, identity

Part = tuple[int, str]
"""An attribute: the identity of the object that has it, and its name."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, Enum, type(...))
CONTAINERS = (list, tuple, deque, set, frozenset, dict, np.ndarray)
"""Types of values that may change where they are, or that are compared element by element."""


class NotAlikeError(Exception):
    """Two modules have another structure."""


def is_plain(value: object) -> bool:
    """True for a number, a text, a flag, None, or a constant of torch."""
    return type(value) in _PLAIN or isinstance(value, _ATOMS)


def same_plain(one: Any, other: Any) -> bool:
    """True if two plain values are the same; 1, 1.0 and True are not."""
    return type(one) is type(other) and (one is other or repr(one) == repr(other))


class Correspondence:
    """The objects inside of a module, each with that at the same place of another module.

    Args:
        one: the first module.
        other: the second module.
        watched: classes of objects whose attributes are recorded when they are read.

    Attributes:
        different: attributes of which the other module has not what the first one has.
        tensors: pairs of parameters and buffers.

    Raises:
        NotAlikeError: they have other classes, children or tensors, share a module, or have hooks.
    """

    def __init__(self, one: nn.Module, other: nn.Module, watched: Mapping[type, Any]) -> None:
        self.different: set[Part] = set()
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._watched = watched
        self._objects: dict[int, tuple[Any, Any]] = {}
        self._tensor_of: dict[int, torch.Tensor] = {}
        pairs: list[tuple[nn.Module, nn.Module]] = []
        self._add_modules(one, other, pairs)
        if not {identity(x) for x, _ in pairs}.isdisjoint(identity(y) for _, y in pairs):
            raise NotAlikeError("they share a module")
        for first, second in pairs:
            self._add_tensors(first, second)
        for first, second in pairs:
            self._compare(first, second, MODULE_FIELDS)

    def _add_modules(
        self, one: nn.Module, other: nn.Module, pairs: list[tuple[nn.Module, nn.Module]]
    ) -> None:
        known = self._objects.get(identity(one))
        if known is not None:
            if identity(known[1]) != identity(other):
                raise NotAlikeError("they have other children")
            return
        if type(one) is not type(other):
            raise NotAlikeError("they have other classes")
        self._objects[identity(one)] = one, other
        pairs.append((one, other))
        mine, theirs = instance_dict(one), instance_dict(other)
        if _has_hooks(mine) or _has_hooks(theirs):
            raise NotAlikeError("they have hooks")
        if list(mine["_modules"]) != list(theirs["_modules"]):
            raise NotAlikeError("they have other children")
        for name, child in mine["_modules"].items():
            counterpart = theirs["_modules"][name]
            if (child is None) is not (counterpart is None):
                raise NotAlikeError("they have other children")
            if child is not None:
                self._add_modules(child, counterpart, pairs)

    def _add_tensors(self, one: nn.Module, other: nn.Module) -> None:
        mine, theirs = instance_dict(one), instance_dict(other)
        for kind in ("_parameters", "_buffers"):
            if list(mine[kind]) != list(theirs[kind]):
                raise NotAlikeError("they have other parameters or buffers")
            for name, tensor in mine[kind].items():
                counterpart = theirs[kind][name]
                if (tensor is None) is not (counterpart is None):
                    raise NotAlikeError("they have other parameters or buffers")
                if tensor is not None:
                    self.tensors.append((tensor, counterpart))
                    known = self._tensor_of.setdefault(id(tensor), counterpart)
                    if known is not counterpart:
                        raise NotAlikeError("they tie other parameters")

    def _compare(self, one: Any, other: Any, left_out: frozenset[str] = frozenset()) -> None:
        mine, theirs = instance_dict(one), instance_dict(other)
        for name in mine.keys() | theirs.keys():
            if name in left_out:
                continue
            is_in_both = name in mine and name in theirs
            if not is_in_both or not self._alike(mine[name], theirs[name]):
                self.different.add((identity(one), name))

    def _alike(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if is_plain(one):
            return same_plain(one, other)
        if isinstance(one, torch.Tensor):
            return self._tensor_of.get(id(one)) is other
        if isinstance(one, (set, frozenset)):
            return bool(one == other) and all(map(is_plain, one))
        mine, theirs = parts_of(one), parts_of(other)
        if mine is None or theirs is None:
            return self._same_object(one, other)
        return len(mine) == len(theirs) and all(map(self._alike, mine, theirs))

    def _same_object(self, one: Any, other: Any) -> bool:
        known = self._objects.get(identity(one))
        if known is not None:
            return identity(known[1]) == identity(other)
        if one is other:
            return True
        if type(one) not in self._watched:
            return False
        self._objects[identity(one)] = one, other
        self._compare(one, other)
        return True


def _has_hooks(own: Mapping[str, Any]) -> bool:
    return any(own[name] for name in own if name.endswith("_hooks") and isinstance(own[name], dict))


def is_fixed(value: Any) -> bool:
    """True for functions, classes and other values that hold nothing that changes unseen."""
    if isinstance(value, (type, ModuleType, torch.Tensor)):
        return True
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, FunctionType):
        return not value.__closure__
    return is_plain(value) or type(value).__module__.startswith(("torch._C", "torch._ops"))


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """The elements of a container, or the parts of a method or a partial; None for others."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return tuple(value)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    return None
