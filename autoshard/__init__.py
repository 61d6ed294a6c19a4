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
from autoshard.mesh import Mesh, get_topology, list_topologies, make_mesh
from autoshard.outcome import SolveStatus
from autoshard.plan import (
    ForbiddenCollective,
    Pins,
    Plan,
    PlanOptions,
    check_plan,
    compare_plans,
    export_plan,
    operator_coverage,
    simulate,
)
from autoshard.planner import explain, make_plan, search_meshes

if TYPE_CHECKING:
    from autoshard.discovery import discover
    from autoshard.graph import export_model
    from autoshard.runtime import (
        dcp_state_dict,
        full_tensor,
        init_empty_weights,
        load_checkpoint,
        parallelize,
        rng_step,
        save_checkpoint,
        shard_loader,
    )
    from autoshard.runtime.launch import LaunchContext, get_context, launch

__all__ = [
    "AsyncClient",
    "AutoshardError",
    "Client",
    "ForbiddenCollective",
    "Graph",
    "LaunchContext",
    "Mesh",
    "Pins",
    "Plan",
    "PlanOptions",
    "SolveStatus",
    "check_plan",
    "compare_plans",
    "dcp_state_dict",
    "discover",
    "explain",
    "export_model",
    "export_plan",
    "full_tensor",
    "get_context",
    "get_topology",
    "init_empty_weights",
    "launch",
    "list_topologies",
    "load_checkpoint",
    "load_graph",
    "make_mesh",
    "make_plan",
    "operator_coverage",
    "parallelize",
    "rng_step",
    "save_checkpoint",
    "search_meshes",
    "shard_loader",
    "simulate",
]

_NEEDS_TORCH = {
    "discover": "autoshard.discovery",
    "export_model": "autoshard.graph",
    "dcp_state_dict": "autoshard.runtime",
    "LaunchContext": "autoshard.runtime.launch",
    "launch": "autoshard.runtime.launch",
    "get_context": "autoshard.runtime.launch",
    "parallelize": "autoshard.runtime",
    "full_tensor": "autoshard.runtime",
    "shard_loader": "autoshard.runtime",
    "rng_step": "autoshard.runtime",
    "load_checkpoint": "autoshard.runtime",
    "init_empty_weights": "autoshard.runtime",
    "save_checkpoint": "autoshard.runtime",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
