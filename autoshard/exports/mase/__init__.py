"""Import and export of the files and maps of MASE's auto-sharding (DeepWok/mase).

MASE stores a solution (the placements of each node of its graph) in a pickle, and passes a map from
modules to placements to its launcher. Untrusted pickles are dangerous: see
`autoshard.exports.mase.solution`. Only the command line and MASE's pass in
`autoshard.integrations.mase` import this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.exports.mase.solution import (
    MaseNode,
    MaseSolution,
    extrapolated,
    node_name,
    pins_of_solution,
    read_solution,
    solution_of_plan,
    write_solution,
)

if TYPE_CHECKING:
    from autoshard.exports.mase.maps import (
        map_of_solution,
        sharding_map,
        solution_of_map,
        spec_of_texts,
    )

__all__ = [
    "MaseNode",
    "MaseSolution",
    "extrapolated",
    "map_of_solution",
    "node_name",
    "pins_of_solution",
    "read_solution",
    "sharding_map",
    "solution_of_map",
    "solution_of_plan",
    "spec_of_texts",
    "write_solution",
]


def __getattr__(name: str) -> Any:
    """Import functions that need torch on first access (PEP 562)."""
    if name in {"map_of_solution", "sharding_map", "solution_of_map", "spec_of_texts"}:
        module = import_module("autoshard.exports.mase.maps")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
