"""The tensor sharding map of MASE's launcher: placements of weights by module.

    {module: {"node": name, "sharding": {attribute: spec}}}

The keys are modules, so the map cannot be stored; a spec is a `DTensorSpec`.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.exports.mase.solution import (
    RESULT,
    MaseNode,
    MaseSolution,
    Placements,
    extrapolated,
    node_name,
)
from autoshard.layouts import Layout, layout_of_texts, to_placements
from autoshard.plan import Plan, only_stage
from autoshard.torch_private import DTensorSpec


def sharding_map(
    plan: Plan, model: nn.Module, mesh: DeviceMesh | None = None
) -> dict[nn.Module, dict[str, Any]]:
    """Convert a plan to a map for a model.

    Args:
        plan: plan of the model.
        model: model whose modules are the keys.
        mesh: the devices; not needed by the launcher.

    Raises:
        PlanError: the document has no plan, the plan is a pipeline, or the model lacks a parameter
            of the plan.
    """
    stage = only_stage(plan, "a map of MASE")
    found: dict[nn.Module, dict[str, Any]] = {}
    names = ((n, p) for p in stage.parameters for n in (p.target, *p.aliases))
    for name, placed in names:
        path, _, attribute = name.rpartition(".")
        try:
            module = model.get_submodule(path)
            module.get_parameter(attribute)
        except AttributeError:
            raise PlanError(f"the model has no parameter {name!r}, which is in the plan") from None
        placements = to_placements(Layout.parse(placed.layout), plan.mesh.axis_sizes)
        entry = found.setdefault(module, {"node": node_name(name), "sharding": {}})
        entry["sharding"][attribute] = DTensorSpec(mesh, placements)  # type: ignore[arg-type]
    return found


def map_of_solution(
    solution: MaseSolution, model: nn.Module, axis_sizes: tuple[int, ...]
) -> dict[nn.Module, dict[str, Any]]:
    """Convert a solution to a map for a model, whose later layers may be missing.

    Args:
        solution: at least the weights of the first layer.
        model: model whose modules are the keys.
        axis_sizes: sizes of the axes of the solution's mesh.

    Raises:
        PlanError: the solution lacks a weight of the model.
    """
    names = {name: node_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    nodes = extrapolated(solution, names.values())
    found: dict[nn.Module, dict[str, Any]] = {}
    for name, node in names.items():
        if node not in nodes or RESULT not in nodes[node].results:
            raise PlanError(f"the solution has no weight {node!r}, which is in the model")
        path, _, attribute = name.rpartition(".")
        entry = found.setdefault(model.get_submodule(path), {"node": node, "sharding": {}})
        entry["sharding"][attribute] = spec_of_texts(nodes[node].results[RESULT], axis_sizes)
    return found


def spec_of_texts(texts: Placements, axis_sizes: tuple[int, ...]) -> DTensorSpec:
    """The specification of a tensor for the launcher, which needs no mesh in it."""
    placements = to_placements(layout_of_texts(texts, axis_sizes), axis_sizes)
    return DTensorSpec(None, placements)  # type: ignore[arg-type]


def solution_of_map(
    placed: Mapping[nn.Module, Mapping[str, Any]], model: nn.Module
) -> dict[str, MaseNode]:
    """Convert a map of MASE to a solution for the weights.

    Args:
        placed: the map.
        model: model whose modules are the keys.

    Raises:
        PlanError: a key is not a module of the model.
    """
    paths = {module: path for path, module in model.named_modules()}
    solution = {}
    for module, entry in placed.items():
        if module not in paths:
            raise PlanError(f"{entry.get('node')!r} of the map is not a module of the model")
        for attribute, spec in entry["sharding"].items():
            name = f"{paths[module]}.{attribute}" if paths[module] else attribute
            texts = tuple(map(repr, spec.placements))
            solution[node_name(name)] = MaseNode(results={RESULT: texts})
    return solution
