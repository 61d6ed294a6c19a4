"""Options of one stage of a pipeline, from those of the whole program."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from autoshard.graph import Graph, Input, InputKind, module_paths
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions

_SINGLE_STAGE: dict[str, object] = {"stages": 1, "cuts": (), "balance": None}
"""Options of the plan of one stage that differ from those of the pipeline."""

_INFERENCE: dict[str, object] = {"micro_batches": 1, "in_flight": 1}
"""Options in inference, where micro-batches have no sums of gradients and nothing is kept."""


def stage_options(
    options: PlanOptions, program: Graph, mesh: Mesh, *, in_flight: int, budget: int
) -> PlanOptions:
    """The options that concern one stage: pins of what it has, collectives on its axes.

    Args:
        options: of the whole program.
        program: the stage's program.
        mesh: the stage's devices.
        in_flight: number of micro-batches whose activations it holds.
        budget: bytes per device.
    """
    pins, inputs = options.constraints.pins, program.inputs
    users = [i for i in inputs if i.kind is InputKind.USER]
    parameters = [i for i in inputs if i.kind is InputKind.PARAMETER]
    buffers = [i for i in inputs if i.kind is InputKind.BUFFER]
    results = set[str]()
    if not any(output.sent for output in program.outputs):
        for position, output in enumerate(program.outputs):
            results |= {str(position)} if output.name is None else {str(position), output.name}
    paths = {name for node in program.nodes for name in (node.name, *module_paths(node.module))}
    own = {
        "inputs": _matching(pins.inputs, _names(users)),
        "parameters": _matching(pins.parameters, _names(parameters)),
        "buffers": _matching(pins.buffers, _names(buffers)),
        "outputs": _matching(pins.outputs, results),
        "nodes": _matching(pins.nodes, paths),
    }
    changes = {
        "pins": pins.model_copy(update=own),
        **_on_axes(options, mesh.axis_names),
        "in_flight": in_flight,
        "memory_budget": budget,
        **_SINGLE_STAGE,
        **(_INFERENCE if options.mode == "inference" else {}),
    }
    return options.with_values(**changes)


def on_sub_mesh(options: PlanOptions, mesh: Mesh, whole: Mesh) -> PlanOptions:
    """Options without what concerns axes that a sub-mesh does not have.

    These are collectives that are forbidden there, and axes of `skip_fully_replicated`.

    Args:
        options: of the whole mesh.
        mesh: the sub-mesh.
        whole: the whole mesh; axes that it does not have either are left, and refused later.
    """
    absent = set(whole.axis_names) - set(mesh.axis_names)
    return options.with_values(**_without_axes(options, absent))


def with_pinned_ends(
    options: PlanOptions, program: Graph, layouts: Mapping[str, str]
) -> PlanOptions:
    """Options of a stage, with pins of what it receives and sends.

    Args:
        options: of the stage.
        program: its program.
        layouts: layout on its devices of each value that it receives or sends.
    """
    received = [i.name for i in program.inputs if i.kind is InputKind.RECEIVED]
    sent = [output.name for output in program.outputs if output.sent and output.name]
    pins = options.constraints.pins
    own = {
        "inputs": {**pins.inputs, **{value: layouts[value] for value in received}},
        "outputs": {
            **pins.outputs,
            **{str(position): layouts[value] for position, value in enumerate(sent)},
        },
    }
    return options.with_values(pins=pins.model_copy(update=own))


def _on_axes(options: PlanOptions, names: Collection[str]) -> dict[str, object]:
    """The options that name axes, restricted to these axes."""
    skipped = options.constraints.skip_fully_replicated
    forbidden = (one.axis for one in options.constraints.forbid)
    named = () if isinstance(skipped, bool) else skipped
    return _without_axes(options, {x for x in (*forbidden, *named) if x} - set(names))


def _without_axes(options: PlanOptions, absent: Collection[str]) -> dict[str, object]:
    """The options that name axes, without those on these axes."""
    skipped = options.constraints.skip_fully_replicated
    if not isinstance(skipped, bool):
        skipped = tuple(name for name in skipped if name not in absent)
    return {
        "forbid": tuple(one for one in options.constraints.forbid if one.axis not in absent),
        "skip_fully_replicated": skipped,
    }


def _names(inputs: Iterable[Input]) -> set[str]:
    return {name for i in inputs for name in (i.target, i.name, *i.aliases)}


def _matching(pins: Mapping[str, str], names: Iterable[str]) -> Mapping[str, str]:
    known = tuple(names)
    return {
        pattern: text
        for pattern, text in pins.items()
        if any(fnmatchcase(name, pattern) for name in known)
    }
