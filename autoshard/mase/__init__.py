"""Files and maps of MASE's auto-sharding (DeepWok/mase), for people who come from it or go there.

MASE keeps a solution, which says how each node of its graph is placed, in a pickle, and hands
its launcher a map from modules to placements. Pickles from others are a danger: see
`autoshard.mase.solution`. Nothing of autoshard but its command line imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.mase.solution import (
    MaseNode,
    MaseSolution,
    extrapolated,
    pins_of_solution,
    read_solution,
    solution_of_plan,
    write_solution,
)

if TYPE_CHECKING:
    from autoshard.mase.maps import sharding_map, solution_of_map

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
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name in {"sharding_map", "solution_of_map"}:
        module = import_module("autoshard.mase.maps")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
