"""Automatic sharding of PyTorch models: a graph and a mesh in, a certified plan out.

    model = auto_parallelize(model, args, kwargs, mesh=device_mesh, memory="70GB")

or, step by step:

    graph = load_graph(export_model(model, args, kwargs))
    plan = make_plan(graph, make_mesh((2, 4)))
    model = parallelize(model, plan, device_mesh)

Public names are imported on first use: neither `import autoshard` nor
`from autoshard import Client` loads torch or the solver.
"""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.automatic import auto_parallelize
    from autoshard.base.outcome import SolveStatus
    from autoshard.checker import check_plan
    from autoshard.checkpoint import load_checkpoint, save_checkpoint
    from autoshard.client import AsyncClient, Client
    from autoshard.discovery import discover
    from autoshard.errors import AutoshardError
    from autoshard.exports import export_plan
    from autoshard.graph import Graph, MixedPrecision, OpaqueModule, export_model, load_graph
    from autoshard.launching import LaunchContext, get_context, launch
    from autoshard.mesh import Mesh, get_topology, list_topologies, make_mesh
    from autoshard.model_plans import plan_model
    from autoshard.plan import ForbiddenCollective, Pins, Plan, PlanOptions
    from autoshard.planner import (
        check_optimality,
        compare_baselines,
        explain,
        make_plan,
        make_plans,
        search_meshes,
    )
    from autoshard.pricing import simulate
    from autoshard.report import compare_plans, operator_coverage
    from autoshard.runtime import (
        dcp_state_dict,
        full_tensor,
        init_empty_weights,
        local,
        parallelize,
        pipeline,
        rng_step,
        shard_loader,
    )
    from autoshard.sizing import find_largest, fit_model, size_model
    from autoshard.splitting import split_model
    from autoshard.version import __version__
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "AsyncClient",
    "AutoshardError",
    "Client",
    "ForbiddenCollective",
    "Graph",
    "LaunchContext",
    "Mesh",
    "MixedPrecision",
    "OpaqueModule",
    "Pins",
    "Plan",
    "PlanOptions",
    "SolveStatus",
    "__version__",
    "auto_parallelize",
    "check_optimality",
    "check_plan",
    "compare_baselines",
    "compare_plans",
    "dcp_state_dict",
    "discover",
    "explain",
    "export_model",
    "export_plan",
    "find_largest",
    "fit_model",
    "full_tensor",
    "get_context",
    "get_topology",
    "init_empty_weights",
    "launch",
    "list_topologies",
    "load_checkpoint",
    "load_graph",
    "local",
    "make_mesh",
    "make_plan",
    "make_plans",
    "operator_coverage",
    "parallelize",
    "pipeline",
    "plan_model",
    "rng_step",
    "save_checkpoint",
    "search_meshes",
    "shard_loader",
    "simulate",
    "size_model",
    "split_model",
]
