"""Python state that forward changes, and random numbers that it draws, while it is traced."""

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.errors import ExportError
from autoshard.graph.export.python_state.description.paths import (
    HOOKS,
    Path,
    PythonPlace,
    instance_dict,
    is_of_model,
    path_text,
)
from autoshard.graph.export.python_state.description.values import (
    MISSING,
    Value,
    describe,
    hooks_of,
    is_advancing,
    same_random_state,
)
from autoshard.graph.export.python_state.description.wording import is_ignored, shown, shown_path
from autoshard.graph.export.python_state.user_code.code import is_installed_module
from autoshard.graph.export.python_state.user_code.holders import MODULE_FIELDS
from autoshard.graph.export.python_state.user_code.sources import is_source

_RANDOM: dict[Path, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    ("random:",): (random.getstate, random.setstate),
    ("numpy.random:",): (np.random.get_state, np.random.set_state),
}
_TENSOR = describe(torch.empty(0))
_MOST = 5


@dataclass(frozen=True, slots=True)
class StateChange:
    """A value that is another one after forward.

    Attributes:
        path: where it is.
        before: before forward.
        after: after forward.
        is_lazy: True for an object of an installed package, which may complete itself when it is
            used first.
    """

    path: Path
    before: Value
    after: Value
    is_lazy: bool = False

    def __str__(self) -> str:
        name = shown_path(self.path)
        if self.path in _RANDOM or "random" in _kinds(self.before):
            return f"{name} (numbers are drawn)"
        if is_source(self.path):
            return f"{name} (another result in each call)"
        if "iterator" in _kinds(self.before):
            return f"{name} (an iterator, which advances)"
        if self.before == self.after == _TENSOR:
            return f"{name} (read, then replaced by another tensor)"
        return f"{name} (from {shown(self.before)} to {shown(self.after)})"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value, with the elements of containers.

    Attributes:
        place: where it is.
        described: the value.
        contents: elements of a container.
        owner: class of the object that has it; None for globals and classes.
    """

    place: PythonPlace
    described: Value
    contents: Any
    owner: type | None = None

    @classmethod
    def of(cls, place: PythonPlace, described: Value, owner: type | None = None) -> "_Kept":
        """Keep the value at a place."""
        return cls(place, described, _copied(place.value), owner)

    def put_back(self) -> None:
        """Restore the value, and the elements of containers."""
        _refill(self.place.value, self.contents)
        self.place.put()


class Changes:
    """Compares values before and after forward.

    Attributes:
        found: the changes.
        written_first: attributes of modules that forward writes before it reads them.
    """

    def __init__(self) -> None:
        self.found: list[StateChange] = []
        self.written_first: set[Path] = set()
        self._kept: dict[Path, _Kept] = {}
        self._registered: dict[Path, _Kept] = {}
        self._watched: list[tuple[Any, Path, frozenset[str]]] = []
        self._after: list[_Kept] = []

    def renewed(self) -> "Changes":
        """An object that keeps present values of globals, classes and functions."""
        renewed = Changes()
        for path, kept in self._kept.items():
            place = None if is_of_model(path) else kept.place.now()
            if place is not None:
                renewed.keep(path, place)
        return renewed

    def keep(self, path: Path, place: PythonPlace, owner: type | None = None) -> None:
        """Keep a value, to be compared afterwards."""
        if path in self._kept or path in self._registered:
            return
        self._kept[path] = _Kept.of(place, describe(place.value), owner)
        if is_advancing(place.value):
            self.found.append(StateChange(path, {"iterator": True}, None))

    def had(self, path: Path, value: object) -> bool:
        """True if a value was at a path before."""
        kept = self._kept.get(path)
        return kept is not None and kept.place.value is value

    def kept_outside(self) -> Iterator[PythonPlace]:
        """The places of kept values that are no attributes of modules and their objects."""
        for path, kept in self._kept.items():
            if not (is_of_model(path) and kept.place.is_item):
                yield kept.place

    def is_other(self, path: Path, place: PythonPlace) -> bool:
        """True if the value at a path is not the kept one."""
        kept = self._kept.get(path)
        return (
            kept is not None
            and kept.place.value is not place.value
            and kept.described != describe(place.value)
        )

    def watch(self, holder: Any, path: Path) -> None:
        """Keep the values of all attributes of an object."""
        own = instance_dict(holder)
        names = frozenset(_names(holder))
        self._watched.append((holder, path, names))
        for name in names:
            if not is_advancing(own[name]):
                self.keep((*path, name), PythonPlace(own, name, own[name]), type(holder))
        if isinstance(holder, nn.Module):
            for registered in (own.get("_buffers", {}), own.get("_modules", {})):
                for name, value in registered.items():
                    place = PythonPlace(registered, name, value)
                    self._registered[*path, name] = _Kept.of(place, describe(value), type(holder))
            for name in HOOKS if path else ():
                place = PythonPlace(own, name, own[name])
                self._registered[*path, name] = _Kept.of(place, hooks_of(own[name]))

    @contextmanager
    def comparing(
        self, holders: Iterable[tuple[Any, Path]], reads: Collection[Path]
    ) -> Iterator[None]:
        """A context around forward, at whose end everything is as before.

        Args:
            holders: whose attributes are compared.
            reads: paths that forward reads, filled while it runs.
        """
        for holder, path in holders:
            self.watch(holder, path)
        states = {path: get() for path, (get, _) in _RANDOM.items()}
        try:
            yield
        finally:
            for path, (get, put) in _RANDOM.items():
                if not same_random_state(get(), states[path]):
                    self.found.append(StateChange(path, None, None))
                    put(states[path])
            self._compare_names()
            self._compare_values(reads)
            self._compare_registered()

    def _compare_names(self) -> None:
        for holder, path, names in self._watched:
            own = instance_dict(holder)
            for name in set(_names(holder)) - names:
                value = own[name]
                if not isinstance(getattr(type(holder), name, None), cached_property):
                    after = _Kept.of(PythonPlace(own, name, value), describe(value), type(holder))
                    self._add((*path, name), MISSING, after)
                del own[name]

    def _compare_values(self, reads: Collection[Path]) -> None:
        for path, kept in self._kept.items():
            if not is_of_model(path) and is_installed_module(str(path[0]).partition(":")[0]):
                continue  # packages count and cache in their globals and classes
            now = kept.place.now()
            described = MISSING if now is None else describe(now.value)
            is_other = now is None or now.value is not kept.place.value
            was_read = path in reads and path not in self.written_first
            is_carried = is_other and described == _TENSOR and was_read
            if described != kept.described or is_carried:
                place = kept.place if now is None else now
                self._add(path, kept.described, _Kept.of(place, described, kept.owner))
            if is_other or described != kept.described:
                kept.put_back()

    def _compare_registered(self) -> None:
        """Compare buffers and modules, which are not put back: tracing looks for new buffers."""
        for path, kept in self._registered.items():
            now = kept.place.now()
            is_hook = path[-1] in HOOKS
            value: Any = None if now is None else now.value
            described = MISSING if now is None else hooks_of(value) if is_hook else describe(value)
            if described != kept.described:
                place = kept.place if now is None else now
                self._add(path, kept.described, _Kept.of(place, described, kept.owner))
                if is_hook:
                    kept.put_back()

    def _add(self, path: Path, before: Value, after: _Kept) -> None:
        is_hook = path[-1] in HOOKS
        is_installed = after.owner is not None and is_installed_module(after.owner.__module__)
        is_lazy = is_hook or (is_installed and _TENSOR not in (before, after.described))
        if is_installed and after.owner is not None:
            is_lazy = is_lazy and not after.owner.__module__.startswith("torch.")
        self.found.append(StateChange(path, before, after.described, is_lazy))
        self._after.append(after)

    @property
    def is_lazy(self) -> bool:
        """True if only objects of installed packages have changed, which may be the last time."""
        return bool(self.found) and all(change.is_lazy for change in self.found)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which everything is as after forward."""
        before = [now for kept in self._after if (now := kept.place.now()) is not None]
        kept_before = [_Kept.of(place, None) for place in before]
        try:
            for kept in self._after:
                kept.put_back()
            yield
        finally:
            for kept in self._after:
                kept.place.remove()
            for kept in kept_before:
                kept.put_back()

    def check(self, what: str, ignored: Collection[str]) -> None:
        """Check that forward changes nothing.

        Args:
            what: name of the model.
            ignored: patterns of what may change.

        Raises:
            ExportError: it changes something; the message has the ways out.
        """
        found = {
            path_text(one.path): one for one in self.found if not is_ignored(one.path, ignored)
        }
        if not found:
            return
        paths = [one.path for one in found.values()]
        shown_changes = ", ".join(map(str, list(found.values())[:_MOST]))
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        owner = _common_module(paths)
        whole = f"keep the module whole with opaque=[{owner!r}], " if owner else ""
        raise ExportError(
            f"forward of {what} changes Python state, which the exported program would not: "
            f"{shown_changes}{more}. Make it a buffer, which programs update, pass what depends on "
            f"it as an argument, {whole}or, where no result depends on it, export with "
            f"ignore_state={[shown_path(path) for path in paths[:_MOST]]}",
            owner,
        )


def _kinds(value: Value) -> Collection[str]:
    return value.keys() if isinstance(value, dict) else ()


def _names(holder: Any) -> Iterator[str]:
    """Names of attributes; those of installed packages' objects that are private may be caches."""
    is_module = isinstance(holder, nn.Module)
    skips = not is_module and is_installed_module(type(holder).__module__)
    for name in tuple(instance_dict(holder)):
        if not (is_module and name in MODULE_FIELDS) and not (skips and name.startswith("_")):
            yield name


def _common_module(paths: Collection[Path]) -> str:
    """The inner module that holds all paths; empty if there is none."""
    owners = {path_text(path[:-1]) for path in paths if is_of_model(path)}
    same = len(owners) == 1 and all(map(is_of_model, paths))
    return owners.pop() if same else ""


def _copied(value: Any) -> Any:
    """The elements of containers, nested; what is in them is not copied."""
    if isinstance(value, dict):
        return [(key, element, _copied(element)) for key, element in value.items()]
    if isinstance(value, (list, deque)):
        return [(element, _copied(element)) for element in value]
    return set(value) if isinstance(value, set) else None


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, dict):
        container.clear()
        for key, element, inner in contents:
            _refill(element, inner)
            container[key] = element
    elif isinstance(container, (list, deque)):
        container.clear()
        for element, inner in contents:
            _refill(element, inner)
            container.append(element)
    elif isinstance(container, set):
        container.clear()
        container.update(contents)
