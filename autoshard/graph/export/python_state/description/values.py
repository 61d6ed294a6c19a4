"""Descriptions of Python values as JSON, equal where forward would compute the same with them.

Numbers, strings, flags and None describe themselves. Everything else is an object with one member,
whose name is the kind of the value.
"""

import hashlib
import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from io import IOBase
from math import isfinite
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import nn

from autoshard.graph.export.python_state.description.paths import CHILDREN, instance_dict, name_of
from autoshard.torch_private import OpOverload, OpOverloadPacket

Value = JsonValue

MISSING: Value = {"missing": True}
"""Description of an attribute that does not exist."""

_LONGEST_TEXT = 200
_MOST_ELEMENTS = 10_000
_LARGEST_INTEGER = 1 << 53
_DEVICE = re.compile(r"(cpu|cuda|meta|mps|xpu|hpu|npu)(:\d+)?")
_ITERATORS = ("builtins", "itertools")
_BY_QUALIFIED_NAME = ("module", "object", "class", "function", "method", "enum")
_NOT_OF_USERS = ("torch", "builtins", "math")


def describe(value: object) -> Value:
    """Describe a value.

    Tensors are described as such: parameters, buffers and constants are inputs of the program.
    Devices are, too, since ranks have others than the export. Of containers with very many
    elements, a digest is kept.
    """
    return _Describer().describe(value)


class _Describer:
    """Describes nested values, from a number of elements on by digests."""

    def __init__(self) -> None:
        self._left = _MOST_ELEMENTS
        self._outer: set[int] = set()

    def describe(self, value: Any) -> Value:
        """Describe a value, or an element of one."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, _METHODS) and isinstance(value.__self__, _RANDOM):
            return {"random": _random_state(self, value.__self__)}  # its generator may be a copy
        for kind, name, detail in _KINDS:
            if isinstance(value, kind):
                found: Value = detail(self, value)
                return {name: found} if name else found
        return {"object": name_of(type(value))}

    def describe_each(self, container: Any) -> Value:
        """Describe elements; of a container inside itself, their number."""
        return self._contents(container, lambda: [self.describe(x) for x in container])

    def describe_set(self, container: Any) -> Value:
        """Describe elements in an order that does not depend on the process."""
        return self._contents(
            container, lambda: sorted((self.describe(x) for x in container), key=json.dumps)
        )

    def describe_items(self, container: Any) -> Value:
        """Describe the items of a dict."""
        items = container.items
        return self._contents(
            container, lambda: [[self.describe(k), self.describe(v)] for k, v in items()]
        )

    def _contents(self, container: Any, describe: Callable[[], Value]) -> Value:
        if id(container) in self._outer:
            return len(container)
        self._left -= len(container)
        self._outer.add(id(container))
        try:
            found = describe()
        finally:
            self._outer.discard(id(container))
        return found if self._left >= 0 else _digest(json.dumps(found).encode())


def _integer(_: _Describer, value: int) -> Value:
    return int(value) if abs(value) < _LARGEST_INTEGER else {"integer": str(value)}


def _float(_: _Describer, value: float) -> Value:
    return float(value) if isfinite(value) else {"float": str(float(value))}


def _text(_: _Describer, value: str) -> Value:
    if _DEVICE.fullmatch(value):
        return {"device": True}
    return str(value) if len(value) <= _LONGEST_TEXT else {"text": _digest(value.encode())}


def _array(_: _Describer, value: Any) -> Value:
    header = f"{value.dtype} {value.shape} ".encode()
    return _digest(header + np.ascontiguousarray(value).tobytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _random_state(_: _Describer, generator: Any) -> Value:
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    else:
        state = generator.get_state()
    return _digest(repr(_plain_state(state)).encode())


def same_random_state(one: Any, other: Any) -> bool:
    """True if two states of generators of random numbers are equal."""
    return bool(_plain_state(one) == _plain_state(other))


def _plain_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain_state(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_plain_state, state))
    return state.tobytes() if isinstance(state, np.ndarray) else state


_Detail = Callable[[_Describer, Any], Value]
_TORCH_TYPES = (
    *(torch.dtype, torch.layout, torch.memory_format),
    *(OpOverload, OpOverloadPacket),
)
_METHODS = (BuiltinFunctionType, MethodType)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)

# The first one that fits counts. Those without a name describe themselves.
_KINDS: tuple[tuple[Any, str, _Detail], ...] = (
    (Enum, "enum", lambda _, x: f"{name_of(type(x))}.{x.name}"),
    (np.generic, "", lambda describer, x: describer.describe(x.item())),
    (int, "", _integer),
    (float, "", _float),
    (complex, "complex", lambda describer, x: [_float(describer, y) for y in (x.real, x.imag)]),
    (str, "", _text),
    (torch.Tensor, "tensor", lambda *_: True),
    (nn.Module, "module", lambda _, x: name_of(type(x))),
    (dict, "dict", _Describer.describe_items),
    (list, "list", _Describer.describe_each),
    (tuple, "tuple", _Describer.describe_each),
    (deque, "deque", _Describer.describe_each),
    ((set, frozenset), "set", _Describer.describe_set),
    (range, "range", lambda _, x: [x.start, x.stop, x.step]),
    (slice, "slice", lambda describer, x: describer.describe_each((x.start, x.stop, x.step))),
    ((bytes, bytearray), "bytes", lambda _, x: _digest(bytes(x))),
    ((FunctionType, BuiltinFunctionType), "function", lambda _, x: name_of(x)),
    (MethodType, "method", lambda _, x: name_of(x.__func__)),
    (
        partial,
        "partial",
        lambda describer, x: describer.describe_each((x.func, x.args, x.keywords)),
    ),
    (type, "class", lambda _, x: name_of(x)),
    (ModuleType, "namespace", lambda _, x: str(x.__name__)),
    (_TORCH_TYPES, "torch", lambda _, x: str(x)),
    (torch.device, "device", lambda *_: True),
    (type(...), "ellipsis", lambda *_: True),
    (np.ndarray, "array", _array),
    (_RANDOM, "random", _random_state),
    (ContextVar, "context", lambda describer, x: describer.describe(value_in_context(x))),
)


def value_in_context(variable: ContextVar[Any]) -> object:
    """The value of a context variable, or its default; None if it has neither."""
    try:
        return variable.get()
    except LookupError:
        return None


def hooks_of(hooks: Mapping[int, object]) -> Value:
    """A description of hooks, in the order in which they run."""
    return {"hooks": [describe(hook) for hook in hooks.values()]}


def children_of(module: nn.Module) -> Value:
    """A description of the children of a module: their names, or their number if that is all."""
    names = list(instance_dict(module)[CHILDREN])
    counted = names == list(map(str, range(len(names))))
    return {"children": len(names) if counted else list[Value](names)}


def is_advancing(value: object) -> bool:
    """True for an iterator, of which each use takes elements."""
    return (
        isinstance(value, Iterator)
        and not isinstance(value, IOBase)
        and type(value).__module__ in _ITERATORS
    )


def same(one: Value, other: Value) -> bool:
    """True if two descriptions are of values with which forward computes the same.

    Classes of modules and objects may come from other Python modules, as from a notebook and from a
    file; digests of code of different versions of Python cannot be compared.
    """
    if isinstance(one, dict) and isinstance(alternatives := one.get("either"), list):
        return any(same(x, other) for x in alternatives)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if not isinstance(one, dict) or not isinstance(other, dict) or len(one) != 1 or len(other) != 1:
        return one == other
    kind, detail = next(iter(one.items()))
    other_kind, other_detail = next(iter(other.items()))
    return kind == other_kind and _is_same_detail(kind, detail, other_detail)


def _is_same_detail(kind: str, one: Value, other: Value) -> bool:
    if kind in _BY_QUALIFIED_NAME:
        return _qualified(one) == _qualified(other)
    if kind == "code":
        versions = {str(x).partition(" ")[0] for x in (one, other)}
        return len(versions) > 1 or one == other
    return same(one, other)


def _qualified(name: Value) -> str:
    """The qualified name, with the Python module only for what is not a user's."""
    module, _, qualified = str(name).partition(":")
    return str(name) if module.partition(".")[0] in _NOT_OF_USERS else qualified
