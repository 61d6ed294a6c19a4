"""Finds the places of a record in a live model."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autoshard.graph.export.python_state.description.paths import (
    CHILDREN,
    FORWARD,
    HOOKS,
    Key,
    Path,
    PythonPlace,
    find_place,
    instance_dict,
    is_of_model,
    name_of,
    read_path,
)
from autoshard.graph.export.python_state.description.queries import query_at
from autoshard.graph.export.python_state.description.values import (
    MISSING,
    Value,
    children_of,
    describe,
    hooks_of,
)
from autoshard.graph.export.python_state.user_code.code import code_digest
from autoshard.graph.export.python_state.user_code.holders import identity

Record = Mapping[Path, Value]

_NOWHERE = object()


class Lookup:
    """Finds values by their paths.

    Classes and globals are found by the modules of the model: a record may come from a notebook,
    where the classes of the model are in the module `__main__`.

    Args:
        model: the model.
        kind: its class before a plan was applied.
        recorded: values of exports of the model, by path.
        own_forward: what the model had as `forward` in place of that of its class; None if nothing.

    Attributes:
        types: classes of modules and objects.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: type[nn.Module],
        recorded: Record,
        own_forward: Callable[..., Any] | None,
    ) -> None:
        self._own = {} if own_forward is None else {FORWARD: own_forward}
        self._holders: dict[Path, Any] = {(): model}
        self._model, self._kind = model, kind
        self._classes: dict[str, type] = {}
        self._modules: dict[str, str] = {}
        self.types: dict[type, None] = {}
        for module in model.modules():
            self._add_class(kind if module is model else type(module))
        for path, value in recorded.items():
            self._add_recorded(path, value)

    def _add_class(self, kind: type) -> None:
        if kind in self.types:
            return
        self.types[kind] = None
        for owner in kind.__mro__:
            self._classes.setdefault(name_of(owner), owner)
            self._classes.setdefault(f":{owner.__qualname__}", owner)

    def _add_recorded(self, path: Path, value: Value) -> None:
        """Note where the classes of recorded modules and objects are now."""
        recorded = _class_name(value)
        if not recorded:
            return
        holder = self._holder(path)
        if holder is _NOWHERE:
            return
        kind = self.class_of(holder)
        self._add_class(kind)
        module, _, qualified = recorded.partition(":")
        if kind.__qualname__ == qualified:
            self._modules.setdefault(module, kind.__module__)

    def class_of(self, holder: Any) -> type:
        """The class of an object; of the model, that before a plan was applied."""
        return self._kind if holder is self._model else type(holder)

    def own_attributes(self) -> Mapping[str, Any]:
        """The attributes of the model itself, as before a plan was applied."""
        own = {n: x for n, x in instance_dict(self._model).items() if n != FORWARD}
        return {**own, **self._own}

    def value(self, path: Path) -> Any:
        """The value at a path; None if there is none."""
        found = self._holder(path)
        return None if found is _NOWHERE else found

    def place(self, path: Path) -> PythonPlace | None:
        """The place at a path, with the value that is there."""
        if not path or path == (FORWARD,):
            return (
                PythonPlace(self._own, FORWARD, self._own[FORWARD]) if path and self._own else None
            )
        holder = self._holder(path[:-1])
        if isinstance(path[-1], Key) and path[-2] in HOOKS and isinstance(holder, dict):
            holder = list(holder.values())  # their keys differ between processes
        return None if holder is _NOWHERE else find_place(holder, path[-1])

    def _holder(self, path: Path) -> Any:
        if path not in self._holders:
            if len(path) == 1 and not is_of_model(path):
                self._holders[path] = self._root(str(path[0]))
            else:
                place = self.place(path)
                self._holders[path] = _NOWHERE if place is None else place.value
        return self._holders[path]

    def _root(self, root: str) -> Any:
        module, _, qualified = root.rstrip(":").partition(":")
        if qualified:
            found = self._classes.get(f"{module}:{qualified}")
            return found or self._classes.get(f":{qualified}") or self._named(module, qualified)
        return sys.modules.get(self._modules.get(module, module), _NOWHERE)

    def _named(self, module: str, qualified: str) -> Any:
        holder: Any = sys.modules.get(self._modules.get(module, module))
        for name in qualified.split("."):
            place = None if holder is None else find_place(holder, name)
            if place is None:
                return _NOWHERE
            holder = place.value
        return holder

    def is_comparable(self, path: Path) -> bool:
        """False for globals of Python modules that are not imported here."""
        is_known = is_of_model(path) or query_at(path) is not None
        return is_known or self._holder(path[:1]) is not _NOWHERE

    def describe(self, path: Path, recorded: Value) -> Value:
        """The description of what is at a path now.

        Args:
            path: the path.
            recorded: what was there in the export.
        """
        query = query_at(path)
        if query is not None:
            return describe(query())
        if not path:
            return {"module": name_of(self._kind)}
        place = self.place(path)
        if place is None:
            return MISSING
        return self.describe_value(path, place.value, recorded)

    def describe_value(self, path: Path, value: Any, recorded: Value) -> Value:
        """The description of a value that is at a path now."""
        if path[-1] == "__code__":
            return code_digest(value)
        if path[-1] in HOOKS and isinstance(value, dict):
            return hooks_of(value)
        if path[-1] == CHILDREN and isinstance(value, dict):
            return children_of(self.value(path[:-1]))
        if isinstance(recorded, dict) and "same" in recorded:
            first = self.value(read_path(str(recorded["same"])))
            return recorded if identity(value) == identity(first) else describe(value)
        return describe(value)


def _class_name(value: Value) -> str:
    """The class of a recorded module or object."""
    if not isinstance(value, dict):
        return ""
    return str(value.get("module") or value.get("object") or "")
