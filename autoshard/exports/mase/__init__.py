"""Import and export of the files and maps of MASE's auto-sharding (DeepWok/mase).

MASE stores a solution (the placements of each node of its graph) in a pickle, and passes a map from
modules to placements to its launcher. Untrusted pickles are dangerous: see
`autoshard.exports.mase.solution`. Only the command line imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.exports.mase.solution import (
    MaseNode,
    MaseSolution,
    extrapolated,
    pins_of_solution,
    read_solution,
    solution_of_plan,
    write_solution,
)

if TYPE_CHECKING:
    from autoshard.exports.mase.maps import sharding_map, solution_of_map

__all__ = [
    "MaseNode",
    "MaseSolution",
    "extrapolated",
    "pins_of_solution",
    "read_solution",
    "sharding_map",
    "solution_of_map",
    "solution_of_plan",
    "write_solution",
]


def __getattr__(name: str) -> Any:
    """Import functions that need torch on first access (PEP 562)."""
    if name in {"sharding_map", "solution_of_map"}:
        module = import_module("autoshard.exports.mase.maps")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
