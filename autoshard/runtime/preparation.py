"""What is the same in every step: made once on each rank, and held as the plan says."""

import torch

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.layouts import Layout
from autoshard.plan import Stage
from autoshard.runtime.local_node import Place
from autoshard.runtime.operators import OperatorCall
from autoshard.runtime.slices import local_slice


def prepared_inputs(graph: Graph, stage: Stage, place: Place) -> dict[str, torch.Tensor]:
    """This rank's slices of the inputs that the graph says how to make, by name.

    Every rank makes them whole, from nothing, so no rank waits for another one.

    Raises:
        PlanError: a plan may not call what they are made with, or something else comes out.
        LayoutError: axes may not cut them as the plan says.
    """
    if graph.preparation is None:
        return {}
    whole = _run(graph.preparation, place.device)
    for name, made in whole.items():
        known = graph.values[name]
        if tuple(made.shape) != known.shape or made.dtype is not getattr(torch, known.dtype):
            raise PlanError(
                f"what is prepared as {name!r} is {made.dtype} {list(made.shape)}, and the plan "
                f"says {known.dtype} {list(known.shape)}"
            )
    return {
        placed.name: _own(whole[placed.name], Layout.parse(placed.layout), place)
        for placed in stage.inputs
        if placed.kind == "prepared"
    }


@torch.no_grad()
def _run(program: Graph, device: torch.device) -> dict[str, torch.Tensor]:
    """The outputs of a program without inputs, each value freed behind its last reader."""
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


def _own(whole: torch.Tensor, layout: Layout, place: Place) -> torch.Tensor:
    """A slice in memory of its own, so that the rest is freed."""
    own = local_slice(whole, layout, place.axis_sizes, place.coordinate)
    return whole if own.shape == whole.shape else own.clone()
