"""`plan_model`: from a config or another model, and a number of devices, to a plan."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from autoshard.base.arguments import Count, check_arguments
from autoshard.client import Client
from autoshard.client.variables import SERVER_VARIABLE
from autoshard.errors import OptionError
from autoshard.graph import is_graph_file
from autoshard.mesh import Mesh, Topology, make_mesh, resolve_topology
from autoshard.plan import Plan, PlanOptions
from autoshard.plan.options import to_options
from autoshard.requests.model_configs import BatchShape, ElementType, check_named_config
from autoshard.requests.results import OnProgress

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from autoshard.requests.running import ProgressListener
    from autoshard.requests.steps import DividedStep
    from autoshard.solve import CancelToken

    ModelLike: TypeAlias = str | Path | bytes | ExportedProgram | nn.Module


@check_arguments
def plan_model(
    model: "ModelLike",
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gpus: Count | None = None,
    mesh: Mesh | str | int | Sequence[int] | None = None,
    topology: str | Topology | None = None,
    nodes: Count | None = None,
    gpus_per_node: Count | None = None,
    batch_size: Count | None = None,
    seq_length: Count | None = None,
    dtype: ElementType | None = None,
    options: PlanOptions | None = None,
    server: str | Literal[False] | None = None,
    cache: bool | str | Path = True,
    on_progress: OnProgress | None = None,
    **single_options: Any,
) -> Plan:
    """Plan a model on a number of devices, and compare the plan with the usual layouts.

    The same as `autoshard plan MODEL`. The plan has the option `comparisons`, unless it is given:
    `plan.summary()` prints a verdict and tables, and `autoshard.report.answer_of(plan)` has them.

    Args:
        model: the `config.json` of a model of transformers, its folder, or its name in the Hugging
            Face cache of this machine; a `.pt2` archive; `FILE.py:FUNCTION`, which returns a module
            and a batch, and is run; or a module, or an exported program.
        args: example arguments of a module.
        kwargs: example keyword arguments of a module.
        gpus: number of devices; the mesh is the one with the fastest plan of a search.
        mesh: the devices, in place of `gpus`: a mesh, `"dp=2,tp=4"`, `(2, 4)` or 8.
        topology: name of a preset, or a topology; h100-sxm if None.
        nodes: number of nodes.
        gpus_per_node: number of devices of a node, instead of `nodes`.
        batch_size: samples of a step of a config, of all devices together (the global batch); 8 if
            None. With `gpus`, their number of micro-batches is chosen unless it is given.
        seq_length: tokens of each sample of a config; 4,096, or as many as the model has, if None.
        dtype: element type of a config's weights; if None, the config's own, or bfloat16.
        options: of planning.
        server: URL of a planning service; by default that of the environment variable
            AUTOSHARD_SERVER. Without one, or if False, the plan is made in this process.
        cache: as in `Client`.
        on_progress: called with the progress of the search and of planning.
        **single_options: members of `PlanOptions`, which replace those of `options`.

    Returns:
        A plan; or a document without stages, whose `reason` says why there is none.

    Raises:
        OptionError: there is no such model, both or none of `gpus` and `mesh` are given, or an
            option is invalid.
        MeshError: there is no such mesh.
        GraphError: the model cannot be exported.
        ServiceError: the service failed.

    Example:
        >>> plan = plan_model("llama/config.json", gpus=8, topology="h100-sxm", seq_length=4096)
        >>> print(plan.summary())
    """
    if (gpus is None) == (mesh is None):
        raise OptionError("give one of gpus and mesh; with gpus=8 the mesh is chosen")
    merged = to_options(options, {"comparisons": True, **single_options})
    devices: dict[str, Any] = {"topology": topology, "nodes": nodes, "gpus_per_node": gpus_per_node}
    batch: dict[str, Any] = {"batch_size": batch_size, "seq_length": seq_length, "dtype": dtype}
    url = os.environ.get(SERVER_VARIABLE) if server is None else server
    graph: ModelLike
    one_stage = None
    if gpus is not None and divides_step(model, merged):
        step = divided_step(str(model), merged, gpus, **batch, **devices, pipelines=not url)
        graph, merged, mesh, one_stage = step.graph, step.options, step.mesh, step.one_stage
    else:
        graph = model_graph(model, args, kwargs, options=merged, **batch)
    with Client(url, cache=cache) if url else Client.local(cache=cache) as client:
        if mesh is None:
            assert gpus is not None, "one of them is given"
            found = client.search(
                graph,
                num_devices=gpus,
                options=merged.with_values(comparisons=False),
                total_time_limit=merged.solver.time_limit / 2,
                on_progress=on_progress,
                **devices,
            )
            mesh = found.meshes[0].mesh
        elif not isinstance(mesh, Mesh):
            sizes = (mesh,) if isinstance(mesh, int) else mesh
            mesh = make_mesh(sizes, **devices)
        request: dict[str, Any] = {"mesh": mesh, "options": merged, "on_progress": on_progress}
        planned = client.plan(graph, **request, one_stage=one_stage)
    if one_stage is None or planned.found:
        return planned
    # The pipeline has no plan in the time limit.
    archive, alone = one_stage
    request = {"gpus": gpus, **devices, "options": alone, "server": server, "cache": cache}
    return plan_model(archive, **request, on_progress=on_progress)


def divides_step(model: "ModelLike", options: PlanOptions) -> bool:
    """True for the config of a model whose number of micro-batches is to be chosen."""
    is_open = options.mode == "training" and "micro_batches" not in options.given
    return is_open and isinstance(model, str | Path) and _is_config(model)


def divided_step(
    model: str,
    options: PlanOptions,
    num_devices: int,
    *,
    batch_size: int | None = None,
    seq_length: int | None = None,
    dtype: ElementType | None = None,
    topology: str | Topology | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    pipelines: bool = True,
    on_progress: "ProgressListener | None" = None,
    cancel: "CancelToken | None" = None,
) -> "DividedStep":
    """The step of a config's model in micro-batches, and in stages if that is faster.

    Args:
        model: a config, as in `plan_model`.
        options: of planning.
        num_devices: number of devices.
        batch_size: as in `plan_model`.
        seq_length: as in `plan_model`.
        dtype: as in `plan_model`.
        topology: as in `plan_model`.
        nodes: as in `plan_model`.
        gpus_per_node: as in `plan_model`.
        pipelines: False to compare no pipelines.
        on_progress: called with what is exported or estimated.
        cancel: set it to end with what is known.

    Raises:
        OptionError: there is no such model, or no number of micro-batches fits the memory.
        GraphError: it cannot be exported.
        MeshError: the topology has fewer devices.
    """
    given = {} if batch_size is None else {"batch_size": batch_size}
    batch = BatchShape(**given, seq_length=seq_length)
    check_named_config(model, batch)
    # torch and the planner are imported only where a model is exported.
    from autoshard.requests.model_files import export_named  # noqa: PLC0415
    from autoshard.requests.steps import StepDivider  # noqa: PLC0415

    return StepDivider(
        partial(export_named, model, dtype=dtype),
        batch,
        options,
        num_devices,
        resolve_topology(topology, num_devices, nodes, gpus_per_node),
        pipelines=pipelines,
        on_progress=on_progress,
        cancel=cancel,
    ).divided()


def _is_config(model: str | Path) -> bool:
    """True for a name that is neither the file of a graph nor a function."""
    return not is_graph_file(str(model)) and ".py:" not in str(model)


def model_graph(
    model: "ModelLike",
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: PlanOptions,
    batch_size: int | None = None,
    seq_length: int | None = None,
    dtype: ElementType | None = None,
) -> "ModelLike":
    """The graph of a model, as requests take it: a file, or a model that is exported here.

    Args:
        model: as in `plan_model`.
        args: as in `plan_model`.
        kwargs: as in `plan_model`.
        options: of planning: their mode, and the number of micro-batches of a config's batch.
        batch_size: as in `plan_model`.
        seq_length: as in `plan_model`.
        dtype: as in `plan_model`.

    Raises:
        OptionError: there is no such model, or a size is given that is not for it.
        GraphError: it cannot be exported.
    """
    sizes = {"batch_size": batch_size, "seq_length": seq_length}
    given = {name: value for name, value in sizes.items() if value is not None}
    if isinstance(model, str | Path) and not is_graph_file(str(model)):
        batch = BatchShape(**given)
        if _is_config(model):
            batch = batch.of_micro_batch(options.training.micro_batches)
        check_named_config(str(model), batch)
        # torch is imported only for a model that is exported here.
        from autoshard.requests.model_files import export_named  # noqa: PLC0415

        shape = batch if given or _is_config(model) else None
        return export_named(str(model), shape, mode=options.mode, dtype=dtype)
    if given or dtype:
        name = model if isinstance(model, str | Path) else "the model"
        raise OptionError(
            f"{name} has the batch that it was exported with: batch_size, seq_length and `dtype` "
            "are for a config.json"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from autoshard.graph import export_model  # noqa: PLC0415  torch is slow to import

        return export_model(model, args, dict(kwargs or {}))
    return Path(model) if isinstance(model, str) else model
