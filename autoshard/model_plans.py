"""`plan_model`: from a config or another model, and a number of devices, to a plan."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from autoshard.base.arguments import Count, check_arguments
from autoshard.client import Client
from autoshard.client.variables import SERVER_VARIABLE
from autoshard.errors import OptionError
from autoshard.graph import is_graph_file
from autoshard.mesh import Mesh, Topology, make_mesh
from autoshard.plan import Mode, Plan, PlanOptions
from autoshard.plan.options import to_options
from autoshard.requests.model_configs import BatchShape, ElementType, check_named_config
from autoshard.requests.results import OnProgress

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

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
            None.
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
    graph = model_graph(
        model,
        args,
        kwargs,
        mode=merged.mode,
        batch_size=batch_size,
        seq_length=seq_length,
        dtype=dtype,
    )
    devices: dict[str, Any] = {"topology": topology, "nodes": nodes, "gpus_per_node": gpus_per_node}
    url = os.environ.get(SERVER_VARIABLE) if server is None else server
    with Client(url, cache=cache) if url else Client.local(cache=cache) as client:
        if gpus is not None:
            alone = merged.with_values(comparisons=False)
            found = client.search(
                graph, num_devices=gpus, options=alone, on_progress=on_progress, **devices
            )
            mesh = found.meshes[0].mesh
        elif not isinstance(mesh, Mesh):
            sizes = (mesh,) if isinstance(mesh, int) else mesh
            assert sizes is not None, "checked above"
            mesh = make_mesh(sizes, **devices)
        assert mesh is not None, "given or found"
        return client.plan(graph, mesh=mesh, options=merged, on_progress=on_progress)


def model_graph(
    model: "ModelLike",
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Mode,
    batch_size: int | None = None,
    seq_length: int | None = None,
    dtype: ElementType | None = None,
) -> "ModelLike":
    """The graph of a model, as requests take it: a file, or a model that is exported here.

    Args:
        model: as in `plan_model`.
        args: as in `plan_model`.
        kwargs: as in `plan_model`.
        mode: for a config, whether its graph is of training.
        batch_size: as in `plan_model`.
        seq_length: as in `plan_model`.
        dtype: as in `plan_model`.

    Raises:
        OptionError: there is no such model, or a size is given that is not for it.
        GraphError: it cannot be exported.
    """
    sizes = {"batch_size": batch_size, "seq_length": seq_length}
    given = {name: value for name, value in sizes.items() if value is not None}
    is_named = isinstance(model, str | Path) and not is_graph_file(str(model))
    if is_named:
        batch = BatchShape(**given)
        check_named_config(str(model), batch)
        # torch is imported only for a model that is exported here.
        from autoshard.requests.model_files import export_named  # noqa: PLC0415

        return export_named(str(model), batch if given else None, mode=mode, dtype=dtype)
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
