"""Named tuples and dataclasses in arguments and results, registered as nodes of pytrees.

A program names them by module and class, and each process finds the classes among the modules that
it has imported: a plan may come from a server, and must not choose what is imported.
"""

import dataclasses
import sys
from typing import Any

from autoshard.errors import ExportError
from autoshard.torch_private import pytree, register_named_tuple


def register_types(value: Any) -> None:
    """Register the types of named tuples and dataclasses in a value.

    Raises:
        ExportError: it has a result type of torch, which archives cannot name.
    """
    kind = type(value)
    if kind.__module__ == "torch.return_types":
        raise ExportError(
            f"forward returns a {_name(kind)}: return its members, as in tuple(result)"
        )
    if _is_structured(kind):
        _register(kind)
    if dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        inside = list(value.values())
    else:
        inside = list(value) if isinstance(value, (list, tuple)) else []
    for item in inside:
        register_types(item)


def register_type(name: str) -> None:
    """Register the class of a name, if a module that is imported has it."""
    if name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        return
    module, path = name, list[str]()
    while module and module not in sys.modules:
        module, _, last = module.rpartition(".")
        path.insert(0, last)
    found: Any = sys.modules.get(module)
    for part in path:
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and _is_structured(found) and _name(found) == name:
        _register(found)


def _is_structured(kind: type) -> bool:
    if kind in pytree.SUPPORTED_NODES:
        return False
    if dataclasses.is_dataclass(kind):
        # Others would be lost: an object is made again of the fields that its class takes.
        return all(field.init for field in dataclasses.fields(kind))
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and "_make" in dir(kind)


def _register(kind: type) -> None:
    if dataclasses.is_dataclass(kind):
        pytree.register_dataclass(kind, serialized_type_name=_name(kind))
    else:
        register_named_tuple(kind, _name(kind))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
