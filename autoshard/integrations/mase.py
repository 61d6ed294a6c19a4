"""MASE's pass: the same call, arguments and results, planned by this library.

    mg, outputs = autosharding_analysis_pass(mg, pass_args)

A pickle that is preloaded can run any code: see `autoshard.exports.mase.solution`.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autoshard.checker import check_plan
from autoshard.errors import OptionError, PlanError
from autoshard.exports.mase import (
    MaseSolution,
    extrapolated,
    map_of_solution,
    node_name,
    read_solution,
    sharding_map,
    solution_of_plan,
    spec_of_texts,
    write_solution,
)
from autoshard.graph import export_model, load_graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.plan.options import to_options
from autoshard.planner import make_plan

GraphT = TypeVar("GraphT")

_ALGORITHMS = {"alpa": "optimal", "megatron": "megatron"}
_BACKENDS = {"default": None, "nccl": "nccl", "gloo": "gloo"}
_REQUIRED = ("mesh_shape", "inter_node_bandwidth", "intra_node_bandwidth")
_OF_MASE = {
    "algo": "alpa",
    "communications_backend": "default",
    "skip_fully_replicated": False,
    "time_limit": 10_000,
    "mip_rel_gap": 0,
    "run_checks": False,
    "preload_solution": False,
    "ilp_solution_file": "ilp_solution.pkl",
    "skip_forward": False,
}
"""The arguments that MASE has, with its values where they are not given."""
_OF_OURS: dict[str, Any] = {"dummy_in": None, "options": None, "trust_pickle": False}
"""Further arguments."""


def autosharding_analysis_pass(
    mg: GraphT, pass_args: Mapping[str, Any] | None = None
) -> tuple[GraphT, dict[str, Any]]:
    """Plan a model as MASE's pass of this name does.

    Example:
        >>> links = {"inter_node_bandwidth": 10e9, "intra_node_bandwidth": 100e9}
        >>> mg, outputs = autosharding_analysis_pass(mg, {"mesh_shape": (2, 4), **links})
        >>> launcher.run(outputs["tensor_sharding_map"], inputs)

    Args:
        mg: MASE's graph, with `.model` and `.fx_graph`; or a module, one of torch.fx included.
            Metadata of MASE that its nodes have get the key `dtensor_spec`.
        pass_args: MASE's arguments. `mesh_shape`, `inter_node_bandwidth` and
            `intra_node_bandwidth` (bytes per second) are required. `algo` is "alpa" (default; the
            fastest plan of all) or "megatron". `communications_backend` is "nccl", "gloo" or
            "default". `mip_rel_gap` is in percent. `time_limit` is in seconds. `run_checks` checks
            the plan without the planner. `skip_forward` leaves the map out. In addition,
            `dummy_in` has example arguments of forward by name, which are otherwise those of the
            graph's metadata; `options` are `PlanOptions`, by default of inference, since MASE
            prices forward alone; and `trust_pickle` allows to read the file of
            `preload_solution`.

    Returns:
        The graph, and `autosharding_time` in seconds, `tensor_sharding_map` for MASE's launcher,
        `solution` (the optimum, seconds) and `plan`. A solution that was preloaded has neither of
        the last two.

    Raises:
        OptionError: an argument is missing, unknown or invalid.
        PlanError: there is no plan, a check failed, or a file has no solution for the model.
        GraphError: the model cannot be exported.
    """
    given = _arguments(pass_args or {})
    mesh, path = _mesh(given), Path(given["ilp_solution_file"])
    model = mg if isinstance(mg, nn.Module) else _of(mg, "model")
    start = perf_counter()
    outputs: dict[str, Any] = {"autosharding_time": 0}
    if given["preload_solution"]:
        solution: MaseSolution = read_solution(path, trust_pickle=given["trust_pickle"])
        placed = map_of_solution(solution, model, mesh.axis_sizes)
    else:
        plan = _plan(model, mg, mesh, given)
        outputs |= {"autosharding_time": perf_counter() - start}
        outputs |= {"solution": plan.certificate.objective, "plan": plan}
        solution, placed = solution_of_plan(plan), sharding_map(plan, model)
        write_solution(solution, path, mesh.axis_sizes)
    _annotate(mg, solution, mesh)
    return mg, outputs | ({} if given["skip_forward"] else {"tensor_sharding_map": placed})


def _arguments(pass_args: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments; those that are not given have their defaults."""
    known = {**_OF_MASE, **_OF_OURS}
    for name in pass_args:
        if name not in {*known, *_REQUIRED}:
            near = get_close_matches(name, [*known, *_REQUIRED], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"the pass has no argument {name!r}{hint}")
    for name in _REQUIRED:
        if name not in pass_args:
            raise OptionError(f"the pass needs {name!r} in pass_args")
    given = {**known, **pass_args}
    for name, values in (("algo", _ALGORITHMS), ("communications_backend", _BACKENDS)):
        if given[name] not in values:
            raise OptionError(f"{name} is {given[name]!r}; give one of {', '.join(values)}")
    return given


def _mesh(given: Mapping[str, Any]) -> Mesh:
    return make_mesh(
        given["mesh_shape"],
        inter_bandwidth=given["inter_node_bandwidth"],
        intra_bandwidth=given["intra_node_bandwidth"],
        backend=_BACKENDS[given["communications_backend"]],
    )


def _plan(model: nn.Module, mg: object, mesh: Mesh, given: Mapping[str, Any]) -> Plan:
    """The plan that the arguments ask for, checked if they ask for it."""
    asked = {
        "algo": _ALGORITHMS[given["algo"]],
        "skip_fully_replicated": given["skip_fully_replicated"],
        "time_limit": given["time_limit"] or _OF_MASE["time_limit"],
        "relative_gap": given["mip_rel_gap"] / 100,
    }
    options = to_options(given["options"] or PlanOptions(mode="inference"), asked)
    examples = given["dummy_in"]
    if examples is None:
        examples = dict(_examples(mg))
    graph = load_graph(export_model(model, (), dict(examples)))
    plan = make_plan(graph, mesh, options)
    if not plan.found:
        raise PlanError(f"there is no plan: {plan.reason}")
    if given["run_checks"] and (problems := check_plan(plan, graph)):
        raise PlanError(f"the plan is wrong: {problems[0]}")
    return plan


def _of(mg: object, name: str) -> Any:
    if not hasattr(mg, name):
        raise OptionError(
            f"the pass needs a module or a graph of MASE, with .model and .fx_graph; it was given "
            f"a {type(mg).__name__}"
        )
    return getattr(mg, name)


def _nodes(mg: object) -> Iterator[fx.Node]:
    """The nodes of a graph; a module that is not of torch.fx has none."""
    if isinstance(mg, fx.GraphModule):
        yield from mg.graph.nodes
    elif not isinstance(mg, nn.Module):
        yield from _of(mg, "fx_graph").nodes


def _examples(mg: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Example arguments by the metadata of MASE, of torch.export or of shape propagation.

    Raises:
        OptionError: an input has no metadata, or there is no graph.
    """
    inputs = [node for node in _nodes(mg) if node.op == "placeholder"]
    if not inputs:
        raise OptionError("the graph has no inputs: pass example arguments as dummy_in={name: x}")
    for node in inputs:
        common = node.meta["mase"]["common"] if "mase" in node.meta else {}
        found = common.get("results", {}).get("data_out_0", {})
        known = node.meta.get("val", node.meta.get("tensor_meta"))
        shape = found.get("shape", getattr(known, "shape", None))
        dtype = found.get("torch_dtype", getattr(known, "dtype", None))
        if shape is not None and dtype is not None:
            yield str(node.target), torch.zeros(tuple(shape), dtype=dtype)
        elif not node.args:  # it has no default
            raise OptionError(
                f"the input {node.target!r} has no shape in its metadata: pass example arguments "
                f"as dummy_in={{{str(node.target)!r}: x}}"
            )


def _annotate(mg: object, solution: MaseSolution, mesh: Mesh) -> None:
    """Add the placements of weights, inputs and modules to the metadata of nodes."""
    nodes = {
        node: node_name(str(node.target))
        for node in _nodes(mg)
        if "mase" in node.meta and node.op in ("get_attr", "placeholder", "call_module")
    }
    known = extrapolated(solution, nodes.values())
    for node, name in nodes.items():
        if name not in known:
            continue
        common = node.meta["mase"]["common"]
        sides = (("args", known[name].args), ("results", known[name].results))
        for side, placements in sides:
            for key, texts in placements.items():
                if isinstance(common[side].get(key), dict):
                    common[side][key]["dtensor_spec"] = spec_of_texts(texts, mesh.axis_sizes)
