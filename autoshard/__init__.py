"""Automatic sharding of PyTorch models: a graph and a mesh in, a certified plan out.

    graph = load_graph(export_model(model, args, kwargs))
    plan = make_plan(graph, make_mesh((2, 4)))
    model = parallelize(model, plan, device_mesh)

What needs torch is imported when it is first used, so that planning and talking to the
service start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.client import AsyncClient, Client
from autoshard.errors import AutoshardError
from autoshard.graph import Graph, load_graph
from autoshard.mesh import Mesh, get_topology, make_mesh, topology_names
from autoshard.plan import (
    ForbiddenCollective,
    Pins,
    Plan,
    PlanOptions,
    check_plan,
    compare_plans,
    explain,
    export_plan,
    make_plan,
    operator_coverage,
    search_meshes,
    simulate,
)
from autoshard.solve import Status

if TYPE_CHECKING:
    from autoshard.discovery import discover
    from autoshard.graph import export_model
    from autoshard.runtime import (
        checkpointable,
        gathered,
        load_checkpoint,
        parallelize,
        parameters_on_meta,
        save_checkpoint,
        shard_loader,
        step_counter,
    )
    from autoshard.runtime.launch import Launched, launch, launched

__all__ = [
    "AsyncClient",
    "AutoshardError",
    "Client",
    "ForbiddenCollective",
    "Graph",
    "Launched",
    "Mesh",
    "Pins",
    "Plan",
    "PlanOptions",
    "Status",
    "check_plan",
    "checkpointable",
    "compare_plans",
    "discover",
    "explain",
    "export_model",
    "export_plan",
    "gathered",
    "get_topology",
    "launch",
    "launched",
    "load_checkpoint",
    "load_graph",
    "make_mesh",
    "make_plan",
    "operator_coverage",
    "parallelize",
    "parameters_on_meta",
    "save_checkpoint",
    "search_meshes",
    "shard_loader",
    "simulate",
    "step_counter",
    "topology_names",
]

_NEEDS_TORCH = {
    "discover": "autoshard.discovery",
    "export_model": "autoshard.graph",
    "checkpointable": "autoshard.runtime",
    "Launched": "autoshard.runtime.launch",
    "launch": "autoshard.runtime.launch",
    "launched": "autoshard.runtime.launch",
    "parallelize": "autoshard.runtime",
    "gathered": "autoshard.runtime",
    "shard_loader": "autoshard.runtime",
    "step_counter": "autoshard.runtime",
    "load_checkpoint": "autoshard.runtime",
    "parameters_on_meta": "autoshard.runtime",
    "save_checkpoint": "autoshard.runtime",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
