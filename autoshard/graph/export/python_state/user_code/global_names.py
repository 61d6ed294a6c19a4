"""Globals, and what user code reads of Python modules and classes by their names."""

import sys
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any

from autoshard.graph.export.python_state.description.paths import Path, PythonPlace, find_place
from autoshard.graph.export.python_state.user_code.code import is_user_module
from autoshard.graph.export.python_state.user_code.executed_lines import IMPORT, Chain
from autoshard.graph.export.python_state.user_code.holders import class_path


def resolve(chain: Chain, namespace: dict[str, Any]) -> Iterator[tuple[Path, PythonPlace]]:
    """The places of a global and of the attributes that follow it.

    What follows an object is left to `Recorder`, which sees its reads.

    Args:
        chain: names, as of `names_by_line`.
        namespace: globals of the function.
    """
    if chain[0] == IMPORT:
        module = sys.modules.get(chain[1])
        holder: Any = None if module is None else vars(module)
        path: Path = (f"{chain[1]}:",)
        names = chain[2:]
    else:
        holder, path, names = namespace, (f"{namespace.get('__name__', '')}:",), chain
    for name in names:
        place = _place(holder, name)
        if place is None:
            return
        holder = place.value
        if isinstance(holder, ModuleType):
            path = (f"{holder.__name__}:",)
            continue
        path = (*class_path(place.owner), name) if place.owner else (*path, name)
        if _is_state(path, place.value):
            yield path, place
        if isinstance(holder, type):
            path = class_path(holder)
        elif not isinstance(holder, FunctionType):
            return


def namespaces(
    chain: Chain, namespace: dict[str, Any], mentioned: Collection[str]
) -> Iterator[tuple[Any, Path]]:
    """Python modules and classes of users among a global and what may be read of it.

    Args:
        chain: names, as of `names_by_line`.
        namespace: globals of the function.
        mentioned: names of attributes that the function reads of anything.
    """
    holder: Any = namespace
    names = chain
    if chain[0] == IMPORT:
        holder, names = sys.modules, chain[1:]
    for name in names:
        place = _place(holder, name)
        if place is None:
            return
        holder = place.value
        if isinstance(holder, type) and is_user_module(holder.__module__):
            yield holder, class_path(holder)
        elif isinstance(holder, ModuleType) and is_user_module(holder.__name__):
            yield holder, (f"{holder.__name__}:",)
            for inner in sorted(vars(holder).keys() & mentioned):
                kind = vars(holder)[inner]
                if isinstance(kind, type) and is_user_module(kind.__module__):
                    yield kind, class_path(kind)


def _place(holder: Any, name: str) -> PythonPlace | None:
    if isinstance(holder, dict):
        return PythonPlace(holder, name, holder[name]) if name in holder else None
    return None if holder is None else find_place(holder, name)


def _is_state(path: Path, value: object) -> bool:
    """True for globals and classes of users, and for functions of torch, but not of Python."""
    module = str(path[0]).partition(":")[0]
    if module.partition(".")[0] == "torch":
        return callable(value) and not isinstance(value, type)
    return is_user_module(module)
