"""A planned stage at other sizes than it was planned for."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from autoshard.errors import GraphError, LayoutError, PlanError
from autoshard.graph import Graph, graph_to_json, resized
from autoshard.layouts import Layout
from autoshard.plan import PlacedInput, PlacedOutput, Stage

PlacedT = TypeVar("PlacedT", PlacedInput, PlacedOutput)


def resized_stage(
    stage: Stage, graph: Graph, sizes: Mapping[str, int], axis_sizes: Sequence[int]
) -> Stage:
    """The stage with other numbers for the sizes that the export left open.

    Layouts and reshardings are those of the plan. Its figures are too, and say nothing of the
    new sizes.

    Args:
        stage: as planned.
        graph: its program.
        sizes: numbers by name of the symbol.
        axis_sizes: size of each mesh axis.

    Raises:
        PlanError: the program is not made for the numbers, or the plan cannot cut them.
    """
    try:
        program = resized(graph, sizes)
        update = {
            "program": graph_to_json(program),
            "inputs": tuple(_resized(i, program, axis_sizes) for i in stage.inputs),
            "outputs": tuple(_resized(o, program, axis_sizes) for o in stage.outputs),
        }
    except GraphError as error:
        raise PlanError(f"the arguments do not fit the program: {error}") from error
    except LayoutError as error:
        raise PlanError(str(error)) from error
    _check_cuts(stage, graph, program, axis_sizes)
    return stage.model_copy(update=update)


def _check_cuts(stage: Stage, planned: Graph, resized: Graph, axis_sizes: Sequence[int]) -> None:
    """Refuse sizes that would be cut unevenly where the planned ones are not.

    Whether an operator may be cut so is for its rule to say, which was asked for planned sizes.

    Raises:
        PlanError: there is such a size.
    """
    for node in stage.nodes:
        call = planned.nodes[planned.numbers[node.name]]
        layouts = zip((*call.inputs, *call.outputs), (*node.inputs, *node.outputs), strict=True)
        for value, text in layouts:
            layout = Layout.parse(text)
            before, now = planned.values[value].shape, resized.values[value].shape
            parts = [layout.num_parts(dim, axis_sizes) for dim in range(len(now))]
            if any(
                size % n and not old % n for size, old, n in zip(now, before, parts, strict=True)
            ):
                raise PlanError(
                    f"layout {text} of {value!r} does not divide shape {now} over axes of "
                    f"{tuple(axis_sizes)}"
                )


def _resized(placed: PlacedT, graph: Graph, axis_sizes: Sequence[int]) -> PlacedT:
    shape = graph.values[placed.name].shape
    local = Layout.parse(placed.layout).local_shape(shape, axis_sizes)
    return placed.model_copy(update={"shape": shape, "local_shape": local})
