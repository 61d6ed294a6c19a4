"""A walk over the places that forward reads, which notices that one has another value.

It runs before every call of a planned model. Values may be written past every hook of Python, as in
`vars(module)["tau"] = 2`, so only looking at all of them is sure. All places are therefore in flat
lists, which a few functions of C go through: a dict lookup takes some 20 ns.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.graph.export.python_state.description.paths import CHILDREN, HOOKS, instance_dict
from autoshard.graph.export.python_state.description.values import value_in_context

_COMPARED = (
    *(bool, int, float, complex, str, bytes, type(None), type),
    *(FunctionType, BuiltinFunctionType, torch.dtype, property),
)
"""Types whose values are compared by value; others by identity."""

_CONTAINERS = (dict, list, set, tuple, deque)
_CHILDREN = itemgetter(CHILDREN)
Get = Callable[[Any], Any]


class _ValueGroup:
    """Values that are found in the same way in several holders."""

    def __init__(self, get: Get) -> None:
        self._get = get
        self._holders: list[Any] = []
        self._values: list[Any] = []

    def add(self, holder: Any, value: Any) -> None:
        """Add a value."""
        self._holders.append(holder)
        self._values.append(value)

    def is_equal(self) -> bool:
        """True if the holders have equal values."""
        return list(map(self._get, self._holders)) == self._values

    def is_same(self) -> bool:
        """True if the holders have the same objects."""
        return all(map(is_, map(self._get, self._holders), self._values))


class _Groups:
    """Groups by the name of what is looked up."""

    def __init__(self, get: Callable[[Any], Get]) -> None:
        self._get = get
        self._compared: dict[Any, _ValueGroup] = {}
        self._identical: dict[Any, _ValueGroup] = {}

    def add(self, holder: Any, name: Any, value: Any) -> None:
        """Add a value; one that might not be comparable is compared by identity."""
        groups = self._compared if isinstance(value, _COMPARED) else self._identical
        groups.setdefault(name, _ValueGroup(self._get(name))).add(holder, value)

    def is_unchanged(self) -> bool:
        """True if all values are as they were."""
        return all(map(_ValueGroup.is_equal, self._compared.values())) and all(
            map(_ValueGroup.is_same, self._identical.values())
        )


class Walk:
    """Values of places when they were added, compared with present ones."""

    def __init__(self) -> None:
        self._items = _Groups(itemgetter)
        self._attributes = _Groups(attrgetter)
        self._calls = _ValueGroup(lambda call: call())
        self._classes = _ValueGroup(type)
        self._absent: dict[str, dict[int, Mapping[str, Any]]] = {}
        self._hooks: list[Mapping[int, Any]] = []
        self._children = _ValueGroup(_CHILDREN)
        self._iterated: list[dict[str, Any]] = []
        self._iterated_children: list[Any] = []
        self._containers: dict[int, Any] = {}
        self._elements: list[tuple[Any, list[Any]]] = []

    def add_item(self, holder: Mapping[Any, Any], key: Any, value: Any) -> None:
        """Add a value of a dict."""
        self._items.add(holder, key, value)
        self._add_container(value)

    def add_attribute(self, holder: Any, name: str, value: Any) -> None:
        """Add a value of an attribute that is in no dict."""
        self._attributes.add(holder, name, value)
        self._add_container(value)

    def add_call(self, call: Callable[[], Any], value: Any) -> None:
        """Add the result of a function."""
        self._calls.add(call, value)

    def _add_container(self, value: Any) -> None:
        """Add the elements of a container, nested."""
        if isinstance(value, partial):
            self._add_container([value.args, value.keywords])
        elif isinstance(value, np.ndarray):
            self.add_call(value.tobytes, value.tobytes())
        elif isinstance(value, bytearray):
            self.add_call(partial(bytes, value), bytes(value))
        elif isinstance(value, ContextVar):
            get = partial(value_in_context, value)
            self.add_call(get, get())
        if not isinstance(value, _CONTAINERS) or id(value) in self._containers:
            return
        compared, elements = _elements(value)
        if not isinstance(value, tuple):  # a tuple is another object if its elements are others
            self._containers[id(value)] = value
            self._elements.append((compared, elements))
        for element in elements:
            self._add_container(element)

    def add_absent(self, holder: Mapping[str, Any], name: str) -> None:
        """Add a name that a dict has not."""
        self._absent.setdefault(name, {})[id(holder)] = holder

    def add_module(self, module: nn.Module) -> None:
        """Add the class and the hooks of a module."""
        own = instance_dict(module)
        self._classes.add(module, type(module))
        for name in HOOKS:
            if own[name]:
                self.add_item(own, name, own[name])
            else:
                self.add_hooks(own[name])

    def add_hooks(self, hooks: dict[int, Any]) -> None:
        """Add hooks of one kind."""
        if hooks:
            self._add_container(hooks)
        else:
            self._hooks.append(hooks)

    def add_children(self, module: nn.Module, *, is_iterated: bool) -> None:
        """Add the children of a module; their order too, if forward iterates over them."""
        own = instance_dict(module)
        if is_iterated:
            self._iterated.append(own)
            self._iterated_children += own[CHILDREN].values()
        else:
            self._children.add(own, dict(own[CHILDREN]))

    def is_unchanged(self) -> bool:
        """True if all places have the values that they had."""
        try:
            return (
                not any(self._hooks)
                and self._classes.is_equal()
                and not any(self._present())
                and self._children.is_equal()
                and list(chain.from_iterable(self._present_children())) == self._iterated_children
                and self._items.is_unchanged()
                and self._attributes.is_unchanged()
                and self._calls.is_equal()
                and all(map(_is_same, map(_elements, self._containers.values()), self._elements))
            )
        except Exception:  # noqa: BLE001  a value is missing, or cannot be compared
            return False

    def _present(self) -> Iterable[bool]:
        """For each name that was absent, True if one of its dicts has it now."""
        for name, holders in self._absent.items():
            yield any(map(contains, holders.values(), repeat(name)))

    def _present_children(self) -> Iterable[Iterable[Any]]:
        return map(dict.values, map(_CHILDREN, self._iterated))


def _elements(container: Any) -> tuple[Any, list[Any]]:
    """The parts of a container that are compared by value, and those by identity."""
    if isinstance(container, dict):
        return list(container), list(container.values())
    return (set(container), []) if isinstance(container, set) else (len(container), list(container))


def _is_same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    return one[0] == other[0] and all(map(is_, one[1], other[1]))
