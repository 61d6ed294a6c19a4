"""The objects that forward may read, each with its path: modules, objects, classes, functions."""

from collections.abc import Callable, Collection, Iterator
from enum import Enum
from functools import cache, cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autoshard.graph.export.python_state.description.paths import (
    Path,
    PythonPlace,
    elements,
    find_place,
    instance_dict,
    name_of,
)
from autoshard.graph.export.python_state.user_code.code import is_user_module
from autoshard.graph.export.python_state.user_code.executed_lines import FreeVariables

MODULE_FIELDS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of modules by which torch itself works."""

_MOST_ELEMENTS = 10_000
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range, Enum),
    *(torch.Tensor, torch.dtype, torch.device, torch.Size, BuiltinFunctionType, ModuleType),
)
_OF_PYTHON = frozenset({"_thread", "argparse", "collections", "configparser", "types"})
"""Modules of Python whose objects hold what users put there."""

_CACHED = type(cache(lambda: None))  # that of functools.lru_cache, too
_PARTS_OF = {
    property: ("fget",),
    cached_property: ("func",),
    partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
}


def class_path(kind: type) -> Path:
    """The path of a class."""
    return (f"{name_of(kind)}:",)


def identity(holder: Any) -> int:
    """A number of an object that its proxies share: torch traces modules through proxies."""
    own = instance_dict(holder)
    return id(own) if own or isinstance(holder, nn.Module) else id(holder)


class Holders:
    """Objects by identity, each with the path under which it was found first.

    Args:
        on_object: called for each new object that is no module, class or function.
        on_class: called for each new class of a user.
        on_cached: called for functions that keep results of their calls, as by `functools.cache`.
    """

    def __init__(
        self,
        on_object: Callable[[Any, Path], None],
        on_class: Callable[[type], None],
        on_cached: Callable[[Any], None],
    ) -> None:
        self._on_object, self._on_class, self._on_cached = on_object, on_class, on_cached
        self._known: dict[int, tuple[Any, Path]] = {}
        self._functions: dict[int, dict[int, tuple[FunctionType, Path]]] = {}  # by their code
        self._classes: dict[type, None] = {}

    def find(self, holder: Any) -> tuple[Any, Path] | None:
        """The object itself, and its path; None if it is unknown."""
        return self._known.get(identity(holder))

    def functions_of(
        self, code: CodeType, closures: Collection[FreeVariables]
    ) -> Collection[tuple[FunctionType, Path]]:
        """The functions that ran with this code, and their paths.

        A decorator makes many functions of one code, of other classes in this process too: those
        ran whose free variables had the values of a call.

        Args:
            code: the code.
            closures: values of the free variables in the calls.
        """
        alike = self._functions.get(id(code), {}).values()
        called = [known for known in alike if any(_is_of(known[0], c) for c in closures)]
        return called or alike  # a free variable may have been set since

    def has_function(self, function: FunctionType) -> bool:
        """True if a function is known, whose free variables are compared after forward."""
        return id(function) in self._functions.get(id(function.__code__), {})

    @property
    def classes(self) -> tuple[type, ...]:
        """Classes of users, whose functions are known."""
        return tuple(self._classes)

    def __iter__(self) -> Iterator[tuple[Any, Path]]:
        """All objects with their paths."""
        return iter(tuple(self._known.values()))

    def add(self, value: Any, path: Path) -> None:
        """Add what can be reached from a value."""
        if isinstance(value, _PLAIN):
            return
        if isinstance(value, nn.Module):
            self.add_module(value, path)
        elif isinstance(value, (dict, list, tuple)) and len(value) <= _MOST_ELEMENTS:
            for key, element in elements(value):
                self.add(element, (*path, key))
        elif type(value) is FunctionType:
            self._add_function(value, path)
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, tuple(_PARTS_OF)):
            self._add_parts(value, path)
        elif isinstance(value, _CACHED):
            self._on_cached(value)
            self.add(value.__wrapped__, (*path, "__wrapped__"))
        elif identity(value) not in self._known:
            self._add_object(value, path)

    def add_module(
        self, module: nn.Module, path: Path, kind: type[nn.Module] | None = None
    ) -> None:
        """Add a module and those inside.

        Args:
            module: the module.
            path: its path.
            kind: its class, if it is another one than that of a copy that is traced.
        """
        for name, inner in module.named_modules():
            if identity(inner) not in self._known:
                inner_path = (*path, *(name.split(".") if name else ()))
                self._known[identity(inner)] = inner, inner_path
                self.add_class(type(inner) if name or kind is None else kind)

    def add_class(self, kind: type) -> None:
        """Add the functions of a class and of its bases."""
        for owner in kind.__mro__:
            if owner not in self._classes and is_user_module(owner.__module__):
                self._classes[owner] = None
                self._on_class(owner)
                for name in tuple(vars(owner)):
                    place = find_place(owner, name)
                    if place and isinstance(place.value, (FunctionType, *_PARTS_OF)):
                        self.add(place.value, (*class_path(owner), name))

    def _add_function(self, function: FunctionType, path: Path) -> None:
        alike = self._functions.setdefault(id(function.__code__), {})
        if id(function) in alike:
            return
        alike[id(function)] = function, path
        for part, place in function_parts(function):
            self.add(place.value, (*path, *part))

    def _add_parts(self, value: Any, path: Path) -> None:
        for name in next(parts for kind, parts in _PARTS_OF.items() if isinstance(value, kind)):
            place = find_place(value, name)
            if place is not None:
                self.add(place.value, (*path, name))

    def _add_object(self, value: Any, path: Path) -> None:
        self._known[identity(value)] = value, path
        kind = type(value)
        if is_user_module(kind.__module__) or kind.__module__ in _OF_PYTHON:
            self.add_class(kind)
            self._on_object(value, path)


def _is_of(function: FunctionType, closure: FreeVariables) -> bool:
    """True if the free variables of a function have these values."""
    places = {part[-1]: place for part, place in function_parts(function) if len(part) > 1}
    return places.keys() == closure.keys() and all(
        places[name].value is value for name, value in closure.items()
    )


def function_parts(function: FunctionType) -> Iterator[tuple[tuple[str, ...], PythonPlace]]:
    """Defaults of arguments and free variables of a function, with the parts of their paths."""
    for name in ("__defaults__", "__kwdefaults__"):
        place = find_place(function, name)
        if place is not None and place.value:
            yield (name,), place
    closure = find_place(function, "__closure__")
    for name in function.__code__.co_freevars:
        place = closure and find_place(closure.value, name)
        if place:
            yield ("__closure__", name), place
