"""The Python state of a model at one time: values by path, and a walk that notices changes."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn

from autoshard.graph.export.python_state.description.global_hooks import (
    GLOBAL_HOOKS,
    global_hooks,
    of_users,
)
from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    CHILDREN,
    FORWARD,
    HOOKS,
    Path,
    PythonPlace,
    instance_dict,
    is_of_model,
    path_text,
    read_path,
)
from autoshard.graph.export.python_state.description.queries import query_at
from autoshard.graph.export.python_state.description.values import Value, describe, hooks_of, same
from autoshard.runtime.python_state.lookup import Lookup, Record
from autoshard.runtime.python_state.walk import Walk

_TENSOR: Value = {"tensor": True}
_REGISTERED = ("_parameters", "_buffers", CHILDREN)


class Snapshot:
    """Values of all places that records name.

    Args:
        model: the model.
        kind: its class before a plan was applied.
        recorded: for each path, the value in one of the exports.
        stored: names of parameters and buffers that have checks of their own.
        own_forward: as for `Lookup`.
        with_own_hooks: True to compare the hooks of the model itself too.

    Attributes:
        values: descriptions of present values by path, with those of hooks.
        hidden: paths of attributes that hide what forward read of a class, with its path there.
        objects: by path, modules, objects of unknown contents, and tensors in containers.
        walk: notices changes.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: type[nn.Module],
        recorded: Record,
        stored: Collection[str],
        own_forward: Callable[..., Any] | None,
        *,
        with_own_hooks: bool = False,
    ) -> None:
        self._with_own_hooks = with_own_hooks
        self.values: dict[Path, Value] = {}
        self.hidden: dict[Path, Path] = {}
        self.objects: dict[Path, tuple[Any, ...]] = {}
        self.walk = Walk()
        self._recorded, self._stored = recorded, frozenset(stored)
        self._lookup = Lookup(model, kind, recorded, own_forward)
        self._of_classes = _reads_of_classes(self._lookup, recorded)
        self._parents: dict[int, tuple[nn.Module, bool]] = {}
        self._registered = {id(x) for x in (*model.parameters(), *model.buffers())}
        for path, value in recorded.items():
            if self._lookup.is_comparable(path):
                self._add(path, value)
        for parent, is_iterated in self._parents.values():
            self.walk.add_children(parent, is_iterated=is_iterated)
        for name, hooks in global_hooks().items():
            self.values[GLOBAL_HOOKS, name] = hooks_of(of_users(hooks))
            self.walk.add_hooks(hooks)

    def _add(self, path: Path, recorded: Value) -> None:
        query = query_at(path)
        if path[-1:] == (CALLED,):
            self._add_call(path[:-1])
        elif query is not None:
            self.values[path] = describe(query())
            self.walk.add_call(query, query())
        elif recorded != _TENSOR or path_text(path) not in self._stored:
            self.values[path] = self._lookup.describe(path, recorded)
            if path:
                self._add_place(path)
            if isinstance(recorded, dict) and "same" in recorded:
                self._add_alias(path, read_path(str(recorded["same"])))
            elif _has_attributes(recorded) and (*path, CALLED) not in self._recorded:
                self._add_hidden(path)

    def _add_call(self, path: Path) -> None:
        """Add a module that is called: its class, its hooks and what hides its methods."""
        module = self._lookup.value(path)
        if not isinstance(module, nn.Module):
            return
        self.walk.add_module(module)
        own = instance_dict(module)
        for name in HOOKS if path or self._with_own_hooks else ():
            self.values[*path, name] = hooks_of(own[name])
        self._add_hidden(path)

    def _add_hidden(self, path: Path) -> None:
        """Add attributes of an object that hide what forward read of its class."""
        holder = self._lookup.value(path)
        of_class = self._of_classes.get(self._lookup.class_of(holder), {})
        own = instance_dict(holder) if path else self._lookup.own_attributes()
        for name in of_class.keys() - own.keys():
            if path or name != FORWARD:
                self.walk.add_absent(instance_dict(holder), name)
        for name in of_class.keys() & own.keys():
            self.hidden[*path, name] = of_class[name]
            if (*path, name) not in self._recorded:
                self.values[*path, name] = describe(own[name])
                self.walk.add_item(own, name, own[name])

    def _add_alias(self, path: Path, first: Path) -> None:
        """Of another object than the one at an earlier path, compare all that is read."""
        if self.values[path] == self._recorded[path]:
            return
        alike = same(self._recorded.get(first), self.values[path])
        for other, recorded in self._recorded.items():
            if other[: len(first)] == first and other != first:
                inside = (*path, *other[len(first) :])
                self._add_place(inside)
                alike = alike and same(recorded, self._lookup.describe(inside, recorded))
        if alike:
            self.values[path] = self._recorded[path]

    def _add_place(self, path: Path) -> None:
        place = self._lookup.place(path)
        parent = self._lookup.value(path[:-1])
        if path[-1] == "requires_grad":
            owner = self._lookup.value(path[:-2])
            call = partial(_requires_grad, owner, str(path[-2]))
            self.walk.add_call(call, call())
        elif place is None:
            if parent is not None and is_of_model(path):
                self._add_missing(parent, str(path[-1]))
        elif isinstance(parent, nn.Module) and self._is_child(parent, place):
            known = self._parents.get(id(parent), (parent, False))
            self._parents[id(parent)] = parent, known[1] or path[-1] == CHILDREN
        elif place.owner is not None:
            self._add_class_attribute(place)
        elif not place.is_item:
            self.walk.add_attribute(place.holder, str(place.key), place.value)
        elif isinstance(place.holder, dict):
            self.walk.add_item(place.holder, place.key, place.value)
        if place is not None:
            objects = tuple(self._objects(place.value))
            if objects and not isinstance(place.value, (torch.Tensor, CodeType)):
                self.objects[path] = objects

    def _add_missing(self, holder: Any, name: str) -> None:
        """Add an attribute that is nowhere."""
        own = instance_dict(holder)
        self.walk.add_absent(own, name)
        for kind in _REGISTERED if isinstance(holder, nn.Module) else ():
            self.walk.add_absent(own[kind], name)
        in_class = partial(hasattr, type(holder), name)
        self.walk.add_call(in_class, in_class())

    @staticmethod
    def _is_child(parent: nn.Module, place: PythonPlace) -> bool:
        own = instance_dict(parent)
        return place.key == CHILDREN or place.holder is own[CHILDREN]

    def _add_class_attribute(self, place: PythonPlace) -> None:
        """Add an attribute of a class as all classes of modules and objects have it."""
        owner, name = place.owner, str(place.key)
        assert owner is not None
        for kind in [one for one in self._lookup.types if issubclass(one, owner)] or [owner]:
            value = getattr(kind, name, None)
            if value is getattr(kind, name, None):
                self.walk.add_attribute(kind, name, value)
            else:  # made anew by each look
                self.walk.add_item(vars(owner), name, vars(owner)[name])

    def _objects(self, value: Any) -> Iterator[Any]:
        """Values that only identity tells apart: modules, objects, unregistered tensors."""
        if isinstance(value, dict):
            for element in value.values():
                yield from self._objects(element)
        elif isinstance(value, (list, tuple)):
            for element in value:
                yield from self._objects(element)
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._registered:
                yield value
        elif isinstance(value, nn.Module) or _is_object(describe(value)):
            yield value


def _has_attributes(recorded: Value) -> bool:
    return isinstance(recorded, dict) and not recorded.keys().isdisjoint(("module", "object"))


def _is_object(described: Value) -> bool:
    return isinstance(described, dict) and "object" in described


def _reads_of_classes(lookup: Lookup, recorded: Record) -> dict[type, dict[str, Path]]:
    """The attributes that are read of classes, by the classes that have or inherit them."""
    found: dict[type, dict[str, Path]] = {kind: {} for kind in lookup.types}
    for path in recorded:
        root, name = path[:1], path[1:]
        owner = lookup.value(root) if len(name) == 1 and not is_of_model(path) else None
        if isinstance(owner, type):
            for kind in lookup.types:
                if issubclass(kind, owner):
                    found[kind][str(name[0])] = path
    return found


def _requires_grad(module: nn.Module, name: str) -> bool:
    return bool(getattr(getattr(module, name, None), "requires_grad", False))
