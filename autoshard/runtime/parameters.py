"""A model's parameters as the plan stores them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.layouts import Layout, to_placements
from autoshard.plan import PlacedInput, Stage
from autoshard.runtime.local_node import Place
from autoshard.runtime.signature import from_local
from autoshard.runtime.slices import local_slice

NUM_DIFFERENCES = 5
"""How many differences between plan and model an error names."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a model keeps a tensor; looked up anew at each use, since it may be replaced."""

    module: nn.Module
    name: str

    @classmethod
    def of(cls, model: nn.Module, path: str) -> "Holder":
        """The holder of a dotted path.

        Raises:
            AttributeError: the model has no such submodule.
        """
        owner, _, name = path.rpartition(".")
        return cls(model.get_submodule(owner), name)

    def get(self) -> torch.Tensor:
        """The tensor as it is now."""
        tensor: torch.Tensor = getattr(self.module, self.name)
        return tensor


def check_parameters(model: nn.Module, stage: Stage, *, frozen: frozenset[str]) -> None:
    """Check that model and plan have the same parameters.

    Args:
        model: the model.
        stage: of the plan.
        frozen: names of the parameters for which the plan computes no gradient.

    Raises:
        PlanError: they differ; the message names the first differences.
    """
    differences = list(_differences(model, stage, frozen))
    if differences:
        shown = first_of(differences, NUM_DIFFERENCES)
        raise PlanError(f"the plan was made for another model: {shown}")


def first_of(differences: Sequence[str], most: int) -> str:
    """The first differences as a text, and how many more there are."""
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
                f"the parameters {first}, {placed.target} are one in the model, but not in the "
                f"plan; export the model with export_model where they are one: it may be built "
                f"on the meta device, but model.to('meta') makes them two"
            )
        if any(present[name] is not parameter for name in names):
            yield f"the parameters {', '.join(names)} are one in the plan, but not in the model"
        if tuple(parameter.shape) != placed.shape:
            yield (
                f"parameter {placed.target!r} has shape {tuple(parameter.shape)}, "
                f"in the plan {placed.shape}"
            )
        if parameter.dtype != getattr(torch, placed.dtype):
            yield f"parameter {placed.target!r} is {parameter.dtype}, in the plan {placed.dtype}"
        if parameter.requires_grad and placed.name in frozen:
            yield (
                f"parameter {placed.target!r} requires a gradient, which the plan does not compute"
            )
    for name in present:
        if name not in known:
            yield f"the plan has no parameter {name!r}"


def distribute_parameters(
    model: nn.Module, stage: Stage, mesh: DeviceMesh, place: Place
) -> list[Holder]:
    """Replace each parameter by a DTensor that holds this rank's slice.

    Names that shared a parameter share the new one.

    Returns:
        Where each parameter is, in the order of `stage.parameters`.
    """
    holders = []
    for placed in stage.parameters:
        names = (placed.target, *placed.aliases)
        parameter = _distributed(model.get_parameter(placed.target), placed, mesh, place)
        for name in names:
            holder = Holder.of(model, name)
            holder.module.register_parameter(holder.name, parameter)
        holders.append(Holder.of(model, placed.target))
    return holders


def _distributed(
    parameter: nn.Parameter, placed: PlacedInput, mesh: DeviceMesh, place: Place
) -> nn.Parameter:
    layout = Layout.parse(placed.layout)
    # DTensor's own distribute_tensor would broadcast from the first rank, and would need the
    # whole tensor on the device; the slice alone is moved there.
    whole = parameter.detach()
    local = local_slice(whole, layout, place.axis_sizes, place.coordinate)
    local = local.clone(memory_format=torch.contiguous_format)
    if not local.is_meta:
        local = local.to(place.device)
    placements = to_placements(layout, place.axis_sizes)
    distributed: DTensor = from_local(local, mesh, placements, placed.shape)
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)
