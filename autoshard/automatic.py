"""`auto_parallelize`: exports a model, plans it, and applies the plan on every rank."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import errors
from autoshard.base.arguments import Seed, check_arguments
from autoshard.client import Client
from autoshard.client.variables import SERVER_VARIABLE
from autoshard.errors import AutoshardError, MeshError
from autoshard.graph import MixedPrecision, OpaqueModule, export_model
from autoshard.launching.context import PLAN_VARIABLE, get_context
from autoshard.mesh import (
    Topology,
    default_axis_names,
    mesh_sizes,
    mesh_text,
    parse_shape,
    to_mesh,
)
from autoshard.plan import Plan, PlanOptions
from autoshard.plan.options import to_options
from autoshard.report.answer import headline
from autoshard.runtime import parallelize
from autoshard.runtime.checks.agreement import broadcast_text, raised_on_all_ranks

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

_SHOWN_DIGITS = 12
"""Digits of a plan's id that a person gets; `autoshard show` takes them for a plan that is kept."""

_PLAN, _ERROR = "plan ", "error "
"""First words of what the planning rank tells the others."""


@check_arguments
def auto_parallelize(
    model: ModelT,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: DeviceMesh | str | int | Sequence[int] | None = None,
    device_type: str | None = None,
    memory: str | int | None = None,
    topology: str | Topology | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    opaque: Iterable[str | type | OpaqueModule] | Literal["auto"] = (),
    dynamic_shapes: Any = None,
    mixed_precision: MixedPrecision | str | Any = None,
    options: PlanOptions | None = None,
    server: str | Literal[False] | None = None,
    cache: bool | str | Path = True,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    seed: Seed = 0,
    other_shapes: Literal["replicate", "error"] = "replicate",
    ignore_state: Collection[str] = (),
    **single_options: Any,
) -> ModelT:
    """Export a model, plan it for a mesh, and apply the plan; on every rank of the mesh.

    The first rank of the mesh exports and plans, and the others receive the plan. If it fails, all
    ranks raise its error. In a program that `autoshard launch --plan` has started, that plan is
    used, with its mesh and its options, and nothing is exported. The model is changed in place, as
    by `parallelize`. The first rank then writes a line to stderr: mesh, parallelism, predicted step
    and memory, and the plan's id.

    Args:
        model: a model with the full weights on every rank, or on the meta device if
            `load_checkpoint` loads them afterwards.
        args: example arguments of forward, the whole batch; of a pipeline, one micro-batch.
        kwargs: example keyword arguments of forward.
        mesh: the devices: a `DeviceMesh`, or the size of each axis, `"dp=2,tp=4"`, `(2, 4)` or 8,
            for which the process group is initialised if it is not yet. By default one axis of all
            ranks, or the mesh of the plan that was launched.
        device_type: of a mesh that is given by sizes: "cuda" or "cpu"; "cuda" by default if it is
            available.
        memory: limit of the memory per device, such as "70GB"; the device's memory by default.
        topology: name of a preset, or a topology; by default the preset of the devices.
        loss: as in `export_model`.
        targets: as in `export_model`.
        opaque: as in `export_model`.
        dynamic_shapes: as in `export_model`.
        mixed_precision: as in `export_model`.
        options: of planning.
        server: URL of a planning service; by default that of the environment variable
            AUTOSHARD_SERVER. Without one, or if False, the plan is made in this process.
        cache: as in `Client`.
        constants: as in `parallelize`.
        custom_operators: as in `parallelize`.
        seed: as in `parallelize`.
        other_shapes: as in `parallelize`.
        ignore_state: as in `export_model` and `parallelize`.
        **single_options: members of `PlanOptions`, such as `micro_batches`, which replace those of
            `options`.

    Returns:
        The same object, which runs as planned; a pipeline if the options ask for stages.

    Raises:
        AutoshardError: the model cannot be exported, there is no plan, the service failed, or an
            argument is invalid.

    Example:
        >>> model = auto_parallelize(model, (), {"input_ids": ids, "labels": ids}, memory="70GB")
    """
    if memory is not None:
        single_options["memory_budget"] = memory
    merged = to_options(options, single_options)
    launched = _launched_plan()
    device_mesh = _device_mesh(mesh, device_type, launched)

    def make_plan() -> Plan:
        archive = export_model(
            model,
            args,
            kwargs,
            loss=loss,
            targets=targets,
            opaque=opaque,
            dynamic_shapes=dynamic_shapes,
            mixed_precision=mixed_precision,
            ignore_state=ignore_state,
        )
        with _client(server, cache) as client:
            return client.plan(
                archive, mesh=to_mesh(device_mesh, topology=topology), options=merged
            )

    plan = launched or _plan_on_first_rank(make_plan, device_mesh)
    with raised_on_all_ranks(device_mesh):
        parallelize(
            model,
            plan,
            device_mesh,
            constants=constants,
            custom_operators=custom_operators,
            seed=seed,
            other_shapes=other_shapes,
            ignore_state=ignore_state,
        )
    if _is_first_rank(device_mesh):
        origin = ", given to `autoshard launch`, with its options" if launched else ""
        sys.stderr.write(f"autoshard: {headline(plan)}. Plan {plan.id[:_SHOWN_DIGITS]}{origin}\n")
    return model


def _launched_plan() -> Plan | None:
    """The plan that the program was launched with, if any.

    Raises:
        PlanError: its file has none, or the ranks do not fit it.
    """
    return get_context().plan if os.environ.get(PLAN_VARIABLE) else None


def _check_same_mesh(mesh: DeviceMesh | str | int | Sequence[int] | None, launched: Plan) -> None:
    if mesh is None:
        return
    if isinstance(mesh, DeviceMesh):
        sizes: Sequence[int] = mesh.mesh.shape
    else:
        sizes = parse_shape(mesh)[0] if isinstance(mesh, str) else mesh_sizes(mesh)
    if tuple(sizes) != launched.mesh.axis_sizes:
        raise MeshError(
            f"the program asks for the mesh {'x'.join(map(str, sizes))}, but was launched with a "
            f"plan for {mesh_text(launched.mesh)}: leave mesh= out, or launch it with a plan for "
            "that mesh, or with torchrun to make one"
        )


def _is_first_rank(device_mesh: DeviceMesh) -> bool:
    return dist.get_rank() == int(device_mesh.mesh.flatten()[0])


def _client(server: str | Literal[False] | None, cache: bool | str | Path) -> Client:  # noqa: FBT001  as callers give it
    url = os.environ.get(SERVER_VARIABLE) if server is None else server
    return Client(url, cache=cache) if url else Client.local(cache=cache)


def _plan_on_first_rank(make_plan: Callable[[], Plan], device_mesh: DeviceMesh) -> Plan:
    """Make a plan on the first rank of a mesh, and send it to the others.

    Raises:
        AutoshardError: the first rank failed; on the other ranks of the same type if it is one of
            this library.
    """
    text, failure = "", None
    if _is_first_rank(device_mesh):
        try:
            text = _PLAN + make_plan().to_json()
        except Exception as error:  # noqa: BLE001  raised again, after the other ranks know
            failure = error
            text = f"{_ERROR}{type(error).__name__} {error}"
    text = broadcast_text(text, device_mesh)
    if failure is not None:
        raise failure
    if text.startswith(_ERROR):
        name, _, message = text.removeprefix(_ERROR).partition(" ")
        raise _error_of(name, message)
    return Plan.from_json(text.removeprefix(_PLAN))


def _error_of(name: str, message: str) -> AutoshardError:
    """The error of the first rank, by the name of its type."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.InputError):
        return kind(message)
    return AutoshardError(f"the rank that plans failed: {name}: {message}")


def _device_mesh(
    mesh: DeviceMesh | str | int | Sequence[int] | None,
    device_type: str | None,
    launched: Plan | None,
) -> DeviceMesh:
    """The mesh of the ranks, with names of its axes.

    Raises:
        MeshError: there is no process group, or the mesh has another number of ranks, or is not
            that of the plan that was launched.
    """
    if launched is not None:
        _check_same_mesh(mesh, launched)
        if not isinstance(mesh, DeviceMesh):
            return get_context().device_mesh
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is not None:
            return mesh
        names = default_axis_names(mesh.ndim)
        return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        raise MeshError(
            "there is no process group: start the program with torchrun or `autoshard launch`, or "
            "call torch.distributed.init_process_group first"
        )
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    sizes: Sequence[int]
    if isinstance(mesh, str):
        sizes, found = parse_shape(mesh)
    else:
        sizes, found = (num_ranks,) if mesh is None else mesh_sizes(mesh), None
    if prod(sizes) != num_ranks:
        raise MeshError(
            f"the mesh {'x'.join(map(str, sizes))} has {prod(sizes)} devices, but there are "
            f"{num_ranks} ranks; give a mesh of {num_ranks}"
        )
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    names = found or default_axis_names(len(sizes))
    return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=names)
