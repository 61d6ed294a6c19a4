"""Parameters of a model, and buffers that forward updates: comparison with the plan, sharding."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.layouts import Layout, to_placements
from autoshard.plan import PlacedInput, Stage
from autoshard.runtime.checks.agreement import check_equal_weights
from autoshard.runtime.global_tensors.dtensors import from_local, local_tensor
from autoshard.runtime.program.local_node import Place
from autoshard.runtime.shards import local_shard
from autoshard.torch_private import own_parameters

NUM_DIFFERENCES = 5
"""Maximum number of differences between plan and model in an error message."""


@dataclass(frozen=True, slots=True)
class ModuleAttribute:
    """A tensor attribute of a module, looked up at each use since it may be replaced."""

    module: nn.Module
    name: str

    @classmethod
    def of(cls, model: nn.Module, path: str) -> "ModuleAttribute":
        """The attribute at a dotted path.

        Raises:
            AttributeError: the model has no such submodule.
        """
        owner, _, name = path.rpartition(".")
        return cls(model.get_submodule(owner), name)

    def get(self) -> torch.Tensor:
        """The current tensor."""
        # Faster than getattr, which is for buffers and for what has replaced a parameter.
        parameter = own_parameters(self.module).get(self.name)
        tensor: torch.Tensor = getattr(self.module, self.name) if parameter is None else parameter
        return tensor


def check_parameters(model: nn.Module, stage: Stage, *, frozen: frozenset[str]) -> None:
    """Check that model and plan have the same parameters.

    Args:
        model: the model.
        stage: the plan's stage.
        frozen: names of the parameters for which the plan computes no gradient.

    Raises:
        PlanError: the parameters differ; the message lists the first differences.
    """
    differences = list(_differences(model, stage, frozen))
    if differences:
        shown = first_of(differences, NUM_DIFFERENCES)
        raise PlanError(f"the plan was made for another model: {shown}")


def first_of(differences: Sequence[str], most: int) -> str:
    """The first `most` differences as text, and the number of the others."""
    more = len(differences) - most
    rest = [f"and {more} more differences"] if more > 0 else []
    return "; ".join([*differences[:most], *rest])


def _differences(model: nn.Module, stage: Stage, frozen: frozenset[str]) -> Iterator[str]:
    present = dict(model.named_parameters(remove_duplicate=False))
    known: set[str] = set()
    placed_as: dict[int, str] = {}
    for placed in stage.parameters:
        names = (placed.target, *placed.aliases)
        known.update(names)
        missing = [name for name in names if name not in present]
        if missing:
            yield from (f"the model has no parameter {name!r}" for name in missing)
            continue
        parameter = present[placed.target]
        first = placed_as.setdefault(id(parameter), placed.target)
        if first != placed.target:
            yield (
                f"the parameters {first}, {placed.target} are tied in the model, but not in the "
                f"plan; tie them before export_model: build the model on the meta device, since "
                f"model.to('meta') unties them"
            )
        if any(present[name] is not parameter for name in names):
            yield f"the parameters {', '.join(names)} are tied in the plan, but not in the model"
        if tuple(parameter.shape) != placed.shape:
            yield (
                f"parameter {placed.target!r} has shape {tuple(parameter.shape)}, but "
                f"{placed.shape} in the plan"
            )
        if parameter.dtype != getattr(torch, placed.dtype):
            yield (
                f"parameter {placed.target!r} is {parameter.dtype}, but {placed.dtype} in the plan"
            )
        if parameter.requires_grad and placed.name in frozen:
            yield (
                f"parameter {placed.target!r} requires a gradient, which the plan does not compute"
            )
    for name in present:
        if name not in known:
            yield f"the plan has no parameter {name!r}"


def check_stored_alike(stages: Mapping[str, Stage]) -> None:
    """Check that plans for one model store its parameters and buffers in one layout.

    Args:
        stages: of the plans, by name.

    Raises:
        PlanError: two plans differ; the message names both and the tensor.
    """
    known: dict[str, tuple[str, str]] = {}
    for name, stage in stages.items():
        for placed in stage.inputs:
            if placed.kind not in ("parameter", "buffer"):
                continue
            other, layout = known.setdefault(placed.target, (name, placed.layout))
            # At rest, a replicated tensor is the same whether it has a gradient or not.
            if layout.replace("I", "R") != placed.layout.replace("I", "R"):
                raise PlanError(
                    f"the plans {other!r} and {name!r} store {placed.target!r} as {layout} and "
                    f"{placed.layout}: make one with the pins of the other, as "
                    f"PlanOptions(pins=plan.state_pins()), or with `autoshard plan --stored-as`"
                )


def stored_names(
    stages: Iterable[Stage], kinds: Collection[str] = ("parameter",)
) -> frozenset[str]:
    """Names of the parameters that plans store, or of other inputs, with aliases.

    Args:
        stages: of the plans.
        kinds: of inputs.
    """
    inputs = (i for stage in stages for i in stage.inputs if i.kind in kinds)
    return frozenset(name for i in inputs for name in (i.target, *i.aliases))


def distribute_state(
    model: nn.Module, stages: Iterable[Stage], mesh: DeviceMesh, place: Place
) -> None:
    """Replace parameters, and buffers that are sharded, by DTensors of this rank's shard.

    Tied parameters stay tied.

    Args:
        model: has the full tensors.
        stages: of plans that store them alike.
        mesh: the devices.
        place: coordinate of this rank.

    Raises:
        PlanError: the ranks have different weights.
    """
    placed = {i.target: i for stage in stages for i in stage.inputs}
    parameters = [one.target for one in placed.values() if one.kind == "parameter"]
    check_equal_weights({name: model.get_parameter(name) for name in parameters}, mesh)
    for one in placed.values():
        if one.kind == "parameter":
            _distribute_parameter(model, one, mesh, place)
        elif one.kind == "buffer" and one.local_shape != one.shape:
            attribute = ModuleAttribute.of(model, one.target)
            setattr(
                attribute.module, attribute.name, _distributed(attribute.get(), one, mesh, place)
            )


def _distribute_parameter(
    model: nn.Module, placed: PlacedInput, mesh: DeviceMesh, place: Place
) -> None:
    whole = model.get_parameter(placed.target)
    parameter = nn.Parameter(
        _distributed(whole, placed, mesh, place), requires_grad=whole.requires_grad
    )
    for name in (placed.target, *placed.aliases):
        attribute = ModuleAttribute.of(model, name)
        attribute.module.register_parameter(attribute.name, parameter)


def _distributed(
    tensor: torch.Tensor, placed: PlacedInput, mesh: DeviceMesh, place: Place
) -> DTensor:
    layout = Layout.parse(placed.layout)
    # distribute_tensor would broadcast from the first rank, and needs the full tensor on the
    # device; here only the shard is copied to the device.
    local = local_shard(tensor.detach(), layout, place.axis_sizes, place.coordinate)
    local = local.clone(memory_format=torch.contiguous_format)
    if not local.is_meta:
        local = local.to(place.device)
    placements = to_placements(layout, place.axis_sizes)
    distributed: DTensor = from_local(local, mesh, placements, placed.shape)
    return distributed


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer as a plan stores it.

    Attributes:
        placed: its shape, element type and layout.
        mesh: the devices.
        place: coordinate of this rank.
    """

    placed: PlacedInput
    mesh: DeviceMesh
    place: Place

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlannedBuffer":
        """Return the object itself: it has no state of a model."""
        return self

    def stored(self, attribute: ModuleAttribute) -> torch.Tensor:
        """The buffer as the plan stores it; a full tensor that has replaced it is sharded.

        Raises:
            PlanError: what has replaced it does not fit.
        """
        tensor, placed = attribute.get(), self.placed
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != placed.shape:
            raise PlanError(
                f"buffer {placed.target!r} was replaced by {shown(tensor)}, and the plan is for a "
                f"tensor of shape {placed.shape}: assign one of this shape, or copy into the buffer"
            )
        if tensor.dtype != getattr(torch, placed.dtype):
            raise PlanError(
                f"buffer {placed.target!r} is {tensor.dtype} now, and the plan is for "
                f"torch.{placed.dtype}: assign a tensor of this type, or convert the model first, "
                f"then export and plan"
            )
        if placed.kind != "buffer" or placed.local_shape == placed.shape:
            return tensor
        wanted = to_placements(Layout.parse(placed.layout), self.place.axis_sizes)
        if not isinstance(tensor, DTensor):
            tensor = _distributed(tensor, placed, self.mesh, self.place)
            setattr(attribute.module, attribute.name, tensor)
        elif tensor.placements != wanted:
            raise PlanError(
                f"buffer {placed.target!r} is placed {tensor.placements} now, and the plan stores "
                f"it as {wanted}: assign a full tensor, or copy into the buffer"
            )
        return tensor


def shown(value: object) -> str:
    """A value in an error: the shape of a tensor, the beginning of anything else."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.80}"


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """This rank's shard of a buffer.

    Attributes:
        attribute: of the buffer.
        planned: how the plan stores it.
        updated: True if forward updates it.
    """

    attribute: ModuleAttribute
    planned: PlannedBuffer
    updated: bool = False

    def get(self) -> torch.Tensor:
        """The shard before the step.

        A copy of what forward updates, while gradients are computed: autograd may save it, and
        refuses saved tensors that `set` changes before the backward pass.

        Raises:
            PlanError: the buffer was replaced by a tensor that does not fit.
        """
        shard = local_tensor(self.planned.stored(self.attribute))
        return shard.clone() if self.updated and torch.is_grad_enabled() else shard

    @torch.no_grad()
    def set(self, contents: torch.Tensor) -> None:
        """Store the shard after the step, in the same memory."""
        local_tensor(self.attribute.get()).copy_(contents)


def store_updates(buffers: Sequence[StoredBuffer], outputs: Sequence[Any]) -> Sequence[Any]:
    """Store the new contents of buffers, and return the results of forward.

    Args:
        buffers: that forward updates.
        outputs: of a program: the results, then the new contents of the buffers.
    """
    num_results = len(outputs) - len(buffers)
    if not buffers:
        present = outputs
    else:
        # A result may be what a buffer had before the step, and so may the contents of another.
        memory = {_memory(local_tensor(buffer.attribute.get())) for buffer in buffers}
        present = [
            x.clone() if isinstance(x, torch.Tensor) and _memory(x) in memory else x
            for x in outputs
        ]
    for buffer, contents in zip(buffers, present[num_results:], strict=True):
        buffer.set(contents)
    return present[:num_results]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
