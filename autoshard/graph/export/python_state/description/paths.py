"""Places that hold Python values, such as `layers.0.drop.p` or `package.module:TAU`.

A path begins at the model, at a Python module (`package.module:`) or at a class
(`package.module:Class:`). Its parts are names of attributes and keys of containers. Looking one up
runs no code of the objects: no properties, no `__getattr__`.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import local
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Key:
    """A key or an index of a container, as a part of a path."""

    key: str | int


Path = tuple[str | Key, ...]
CALLED = "()"
"""Part after the path of a module that forward calls as a module, so that its hooks run."""
CHILDREN = "_modules"
"""Part after the path of a module over all of whose children forward iterates."""
FORWARD = "forward"
"""Part after the path of a module whose own `forward` runs."""
MODE = "training"
"""Part after the path of a module that reads its mode."""
HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")

_ROOT = re.compile(r"[\w.]+:(?:[^:\[\"]+:)?")
_PART = re.compile(
    r'\.?(?:\[(?P<key>-?\d+|"(?:[^"\\]|\\.)*")\]|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<name>[^.\["]+))'
)
_PLAIN = re.compile(r'[^.\[":]+')


def path_text(path: Path) -> str:
    """A path as text, the inverse of `read_path`."""
    text = ""
    for number, part in enumerate(path):
        if isinstance(part, Key):
            text += f"[{json.dumps(part.key)}]"
        elif number == 0 and part.endswith(":"):
            text = part
        else:
            name = part if _PLAIN.fullmatch(part) else json.dumps(part)
            text += f".{name}" if text and not text.endswith(":") else name
    return text


def read_path(text: str) -> Path:
    """Read a path that `path_text` wrote.

    Raises:
        ValueError: the text is no path.
    """
    root = _ROOT.match(text)
    parts: list[str | Key] = [root[0]] if root else []
    position = root.end() if root else 0
    while position < len(text):
        found = _PART.match(text, position)
        if found is None:
            raise ValueError(f"{text!r} is no path")
        position = found.end()
        if found["key"] is not None:
            parts.append(Key(json.loads(found["key"])))
        else:
            parts.append(found["name"] or json.loads(found["quoted"]))
    return tuple(parts)


def is_of_model(path: Path) -> bool:
    """True if a path begins at the model."""
    return not (path and isinstance(path[0], str) and path[0].endswith(":"))


def name_of(named: Any) -> str:
    """Module and qualified name of a class or a function, as in `package.module:Class.method`."""
    name = getattr(named, "__qualname__", None) or getattr(named, "__name__", repr(type(named)))
    return f"{getattr(named, '__module__', None) or 'builtins'}:{name}"


@dataclass(frozen=True, slots=True)
class PythonPlace:
    """Where a value is.

    Attributes:
        holder: a dict or a container with the item `key`, or an object with the attribute `key`.
        key: an item or an attribute.
        value: what is there now.
        is_item: True for an item.
        owner: the class in whose namespace an attribute was found; None elsewhere.
    """

    holder: Any
    key: Any
    value: Any
    is_item: bool = True
    owner: type | None = None

    def now(self) -> "PythonPlace | None":
        """The place with what is there now; None if nothing is."""
        if self.is_item:
            return _element(self.holder, self.key)
        if self.owner is not None:
            return _class_attribute(self.owner, self.key)
        return _attribute(self.holder, self.key)

    def remove(self) -> None:
        """Remove an item of a dict."""
        if isinstance(self.holder, dict):
            self.holder.pop(self.key, None)

    def put(self) -> None:
        """Put the value there again; not into tuples, which keep what they have."""
        if not self.is_item:
            setattr(self.holder, self.key, self.value)
        elif not isinstance(self.holder, tuple):
            self.holder[self.key] = self.value


@dataclass(frozen=True, slots=True)
class _Closure:
    """The free variables of a function."""

    function: FunctionType


def find_place(holder: Any, part: str | Key) -> PythonPlace | None:
    """The place of a part of a holder; None if it has none."""
    if isinstance(part, Key):
        return _element(holder, part.key)
    for kind, find in _FINDERS.items():
        if isinstance(holder, kind):
            return find(holder, part)
    if type(holder).__module__ in _TRANSPARENT:
        return _attribute(holder, part)
    return _object_attribute(holder, part)


_TRANSPARENT = ("builtins", "functools")
"""Modules of types such as functions, properties and partials, whose attributes are plain."""


def _item(holder: Mapping[Any, Any], key: Any) -> PythonPlace | None:
    return PythonPlace(holder, key, holder[key]) if key in holder else None


def _attribute(holder: Any, name: str) -> PythonPlace | None:
    try:
        return PythonPlace(holder, name, getattr(holder, name), is_item=False)
    except (AttributeError, ValueError):
        return None


def _element(holder: Any, key: Any) -> PythonPlace | None:
    if isinstance(holder, dict):
        return _item(holder, key)
    if isinstance(holder, (list, tuple, deque)) and isinstance(key, int) and key < len(holder):
        return PythonPlace(holder, key, holder[key])
    return None


def _python_module_attribute(module: ModuleType, name: str) -> PythonPlace | None:
    return _item(vars(module), name)


def _function_attribute(function: FunctionType, name: str) -> PythonPlace | None:
    if name == "__closure__":
        return PythonPlace(function, name, _Closure(function), is_item=False)
    return _attribute(function, name)


def _tensor_attribute(tensor: torch.Tensor, name: str) -> PythonPlace | None:
    return _attribute(tensor, name) if name == "requires_grad" else None


def _free_variable(closure: _Closure, name: str) -> PythonPlace | None:
    function = closure.function
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return _attribute(cells[name], "cell_contents") if name in cells else None


def _class_attribute(kind: type, name: str) -> PythonPlace | None:
    for owner in kind.__mro__:
        if name in vars(owner):
            raw = vars(owner)[name]
            value = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
            return PythonPlace(owner, name, value, is_item=False, owner=owner)
    return None


def _module_attribute(module: nn.Module, name: str) -> PythonPlace | None:
    own = instance_dict(module)
    in_class = _class_attribute(type(module), name)
    if in_class is not None and isinstance(in_class.value, property):
        return in_class
    registered = (own.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules"))
    for holder in (own, *registered):
        if name in holder:
            return PythonPlace(holder, name, holder[name])
    return in_class


def _object_attribute(holder: Any, name: str) -> PythonPlace | None:
    own = instance_dict(holder)
    # Configs of transformers read some attributes under other names.
    name = (getattr(type(holder), "attribute_map", None) or {}).get(name, name)
    in_class = _class_attribute(type(holder), name)
    if in_class is not None and isinstance(in_class.value, MemberDescriptorType):
        return _attribute(holder, name)
    if in_class is not None and isinstance(in_class.value, property):
        return in_class
    return _item(own, name) or in_class


_FINDERS: Mapping[type, Callable[[Any, str], PythonPlace | None]] = {
    ModuleType: _python_module_attribute,
    type: _class_attribute,
    FunctionType: _function_attribute,
    _Closure: _free_variable,
    nn.Module: _module_attribute,
    torch.Tensor: _tensor_attribute,
}


def instance_dict(holder: Any) -> dict[str, Any]:
    """The attributes of an instance; empty if it has no dict of them."""
    if isinstance(holder, local):
        return vars(holder)  # of this thread
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def elements(container: Any) -> Iterator[tuple[Key, Any]]:
    """The elements of a list, a tuple, a deque, or a dict by strings and integers."""
    if isinstance(container, dict):
        for key, value in container.items():
            if type(key) in (str, int):
                yield Key(key), value
    elif isinstance(container, (list, tuple, deque)):
        for index, value in enumerate(container):
            yield Key(index), value
