"""The batch on one axis of the user's choice."""

from autoshard.errors import OptionError
from autoshard.graph import Graph, InputKind
from autoshard.layouts import can_be_cut, largest_share
from autoshard.ops import call_of, rule_for
from autoshard.plan.active_axes import ActiveAxes
from autoshard.plan.constraints.demands import CutDemand, Demand, Dim, can_cut
from autoshard.plan.constraints.origins import Origin, Origins
from autoshard.plan.constraints.pins import Place


def batch_demands(graph: Graph, axes: ActiveAxes, axis: int | None) -> dict[Place, Demand]:
    """The batch is cut on one axis wherever it can be, and on no other axis.

    Args:
        graph: the program.
        axes: the mesh.
        axis: number of the active axis; None where it has one rank, so that no axis cuts.

    Raises:
        OptionError: there is no batch, or the axis cannot cut it.
    """
    origins = Origins(graph)
    sizes = axes.sizes
    if origins.batch_size is None:
        raise OptionError("batch_axis is given, but the caller passes no tensor that has dims")
    if axis is not None and not can_be_cut(origins.batch_size, sizes[axis]):
        raise OptionError(
            f"batch_axis {axes.mesh.axis_names[axes.axes[axis]]!r} of {sizes[axis]} ranks does "
            f"not divide the batch of {origins.batch_size}, and in slices of "
            f"{largest_share(origins.batch_size, sizes[axis])} it leaves nothing for the last rank"
        )
    demands: dict[Place, Demand] = {}
    for graph_input in graph.inputs:
        if graph_input.kind is InputKind.USER:
            dims = origins.of_input(graph_input.name, Origin.BATCH)
            every = origins.of_input(graph_input.name, *Origin)
            demands["input", graph_input.name] = _demand(axis, len(sizes), dims, every, can=True)
    for node in graph.nodes:
        dims = origins.of_call(node, Origin.BATCH)
        every = origins.of_call(node, *Origin)
        rule = rule_for(call_of(graph, node))
        can = axis is not None and can_cut(rule, sizes[axis], dims) is not None
        demands["operator", node.name] = _demand(axis, len(sizes), dims, every, can=can)
    return demands


def _demand(
    axis: int | None, num_axes: int, batch: frozenset[Dim], every: frozenset[Dim], *, can: bool
) -> CutDemand:
    return CutDemand(
        tuple(None if a == axis else every - batch for a in range(num_axes)),
        tuple(batch if a == axis and can else frozenset() for a in range(num_axes)),
    )
