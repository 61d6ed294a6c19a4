"""Inputs of a program that are no parameters or buffers: constants, and what is computed once."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.graph.export.python_state.description.paths import PythonPlace, find_place, read_path
from autoshard.layouts import Layout
from autoshard.plan import PlacedInput, Stage
from autoshard.runtime.program.local_node import Place
from autoshard.runtime.program.operators import OperatorCall
from autoshard.runtime.shards import local_shard


def constant_value(graph: Graph, name: str, device: torch.device) -> torch.Tensor | None:
    """The value of a constant input on a device; None if the graph does not contain it."""
    contents = next((i.contents for i in graph.inputs if i.name == name), None)
    if contents is None:
        return None
    tensor = graph.values[name]
    elements = torch.frombuffer(bytearray(contents) or bytearray(1), dtype=torch.uint8)
    elements = elements[: len(contents)].view(getattr(torch, tensor.dtype))
    return elements.view(tensor.shape).to(device)


def find_held(model: nn.Module, target: str) -> PythonPlace | None:
    """The place of a constant that a model holds; None if it has nothing there."""
    holder: Any = model
    place: PythonPlace | None = None
    for part in read_path(target):
        place = find_place(holder, part)
        if place is None:
            return None
        holder = place.value
    return place


@dataclass(frozen=True, slots=True)
class HeldConstant:
    """A tensor that the model holds in an attribute, a container or an object.

    Attributes:
        path: where it is, as text.
        place: likewise; it is looked up at each use, since it may be replaced.
    """

    path: str
    place: PythonPlace

    @classmethod
    def of(
        cls, model: nn.Module, placed: PlacedInput, device: torch.device
    ) -> "HeldConstant | None":
        """The constant of a model, on the device; None if the model has none there.

        Raises:
            PlanError: it has another shape than planned.
        """
        place = find_held(model, placed.target)
        if place is None:
            return None
        held = place.value
        check_held(held, placed)
        moved = replace(place, value=held if held.is_meta else held.to(device))
        moved.put()
        return cls(placed.target, moved)

    def get(self) -> torch.Tensor:
        """The current tensor.

        Raises:
            PlanError: it has no value.
        """
        place = self.place if isinstance(self.place.holder, tuple) else self.place.now()
        if place is None or place.value.is_meta:
            raise PlanError(
                f"the constant {self.path!r} of the model has no value on this rank: checkpoints "
                f"do not have it, so build the model outside of torch.device('meta'), as under "
                f"autoshard's init_empty_weights, or make it a buffer"
            )
        value: torch.Tensor = place.value
        return value


def check_held(value: object, placed: PlacedInput) -> None:
    """Check what a model has in place of a buffer or a constant of a plan.

    Raises:
        PlanError: it is no tensor of the planned shape.
    """
    if not isinstance(value, torch.Tensor) or value.shape != placed.shape:
        raise PlanError(f"{placed.target!r} is not a tensor of shape {placed.shape} in the model")


def prepared_inputs(graph: Graph, stage: Stage, place: Place) -> dict[str, torch.Tensor]:
    """This rank's shards of the inputs that `graph.preparation` computes, by name.

    Every rank computes the full tensors, so there is no communication.

    Raises:
        PlanError: the preparation calls an operator that plans may not call, or a tensor has
            another shape or dtype than planned.
        LayoutError: a layout cannot shard its tensor.
    """
    if graph.preparation is None:
        return {}
    whole = _run(graph.preparation, place.device)
    for name, made in whole.items():
        known = graph.values[name]
        if tuple(made.shape) != known.shape or made.dtype is not getattr(torch, known.dtype):
            raise PlanError(
                f"the prepared input {name!r} is {made.dtype} {list(made.shape)} here, but "
                f"{known.dtype} {list(known.shape)} in the plan"
            )
    return {
        placed.name: _own_shard(whole[placed.name], Layout.parse(placed.layout), place)
        for placed in stage.inputs
        if placed.kind == "prepared"
    }


@torch.no_grad()
def _run(program: Graph, device: torch.device) -> dict[str, torch.Tensor]:
    """The outputs of a program without inputs; each value is freed after its last use."""
    wanted = {output.name for output in program.outputs}
    last = {name: i for i, node in enumerate(program.nodes) for name in node.inputs}
    values: dict[str, torch.Tensor] = {}
    for i, node in enumerate(program.nodes):
        made = OperatorCall(node, device)([values[name] for name in node.inputs])
        values.update(zip(node.outputs, made, strict=True))
        for name in {*node.inputs, *node.outputs} - wanted:
            if last.get(name, i) == i:
                del values[name]
    return values


def _own_shard(whole: torch.Tensor, layout: Layout, place: Place) -> torch.Tensor:
    """The rank's shard, copied so that the full tensor can be freed."""
    shard = local_shard(whole, layout, place.axis_sizes, place.coordinate)
    return whole if shard.shape == whole.shape else shard.clone()
