"""Clocks, and random numbers of the system: another result on each call, without state to compare.

Forward that uses one is run twice, and refused if it does not do the same.
"""

import os
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from autoshard.graph.export.python_state.description.paths import Path, find_place
from autoshard.graph.export.python_state.user_code.executed_lines import IMPORT, Chain

_MODULES = ("datetime", "numpy.random", "random", "secrets", "time", "uuid")


def sources_of(chains: Collection[Chain], namespace: dict[str, Any]) -> Iterator[Path]:
    """The paths of functions of clocks and of random numbers, as of `("time", "time")`.

    Args:
        chains: globals, and the attributes that are read of them.
        namespace: globals of the function that reads them.
    """
    shorter = {chain[:end] for chain in chains for end in range(len(chain))}
    for chain in chains:
        found = None if chain in shorter else _source(chain, namespace)
        if found is not None and is_source(found):
            yield found


def _source(chain: Chain, namespace: dict[str, Any]) -> Path | None:
    names = chain[1:] if chain[0] == IMPORT else chain
    holder: Any = sys.modules if chain[0] == IMPORT else namespace
    for number, name in enumerate(names):
        if isinstance(holder, dict):
            holder = holder.get(name)
        else:
            place = find_place(holder, name)
            holder = None if place is None else place.value
        if holder is os.urandom:
            return ("os:", "urandom")
        is_module = isinstance(holder, ModuleType)
        module = holder.__name__ if is_module else getattr(holder, "__module__", None)
        if module in _MODULES:
            own = () if is_module else (str(getattr(holder, "__qualname__", name)),)
            return (f"{module}:", *own, *names[number + 1 :])
        if not is_module:
            return None
    return None


def is_source(path: Path) -> bool:
    """True for paths of `sources_of`."""
    return path[:1] == ("os:",) or (len(path) > 1 and str(path[0]).removesuffix(":") in _MODULES)
