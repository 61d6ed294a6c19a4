"""Constraints from planning options: pins, forbidden collectives and sharding patterns."""

from collections.abc import Iterator, Sequence

from autoshard.constraints.batch import batch_constraints
from autoshard.constraints.constraints import (
    ChoiceId,
    Constraint,
    Dim,
    PlanConstraints,
    ShardingConstraint,
)
from autoshard.constraints.distributed import distributed_constraints
from autoshard.constraints.exportable import exportable_constraint
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.constraints.patterns import pattern_constraint
from autoshard.constraints.pins import pin_constraints
from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.ops import weights_of
from autoshard.plan.options import PlanOptions, SkipReplicated
from autoshard.plan.options.restrictions import forbid_label, option_label, skip_label


def plan_constraints(graph: Graph, mesh: Mesh, options: PlanOptions) -> PlanConstraints:
    """The constraints that the options set on plans of a graph on a mesh.

    Raises:
        OptionError: an option names something that does not exist, or a layout that the tensor
            cannot have.
    """
    axes = NontrivialAxes.of(mesh)
    found = [*pin_constraints(graph, axes, options), *_forbidden(graph, axes, options)]
    batch: dict[ChoiceId, ShardingConstraint] = {}
    if options.constraints.batch_axis is not None:
        axis = _axis(axes, options.constraints.batch_axis, "batch_axis")
        batch = batch_constraints(graph, axes, axis)
        found.append(Constraint(option_label("batch_axis", options.constraints.batch_axis), batch))
    if options.constraints.unsharded_below:
        found.append(_unsharded(graph, axes, options.constraints.unsharded_below))
    if options.constraints.skip_fully_replicated:
        wanted = _axes_to_fill(axes, options.constraints.skip_fully_replicated)
        found.append(
            Constraint(
                skip_label(options.constraints.skip_fully_replicated),
                distributed_constraints(graph, axes, wanted, batch),
            )
        )
    if options.constraints.distributed_optimizer and options.constraints.algo == "optimal":
        raise OptionError(
            "distributed_optimizer needs an algo, such as ddp; algo='optimal' shards parameters "
            "wherever that is best"
        )
    if options.constraints.algo != "optimal":
        found.append(
            pattern_constraint(
                *(graph, axes, options.constraints.algo),
                batch_axis=options.constraints.batch_axis,
                distributed=options.constraints.distributed_optimizer,
            )
        )
    if options.constraints.exportable_to is not None:
        found.append(
            exportable_constraint(
                graph,
                axes,
                options.constraints.exportable_to,
                batch_axis=options.constraints.batch_axis,
                roles=options.constraints.export_roles,
            )
        )
    return PlanConstraints(found)


def _forbidden(graph: Graph, axes: NontrivialAxes, options: PlanOptions) -> Iterator[Constraint]:
    weights = weights_of(graph)
    for forbidden in options.constraints.forbid:
        numbers: Sequence[int | None] = range(len(axes.sizes))
        if forbidden.axis is not None:
            numbers = [_axis(axes, forbidden.axis, "forbid")]
        found = frozenset((forbidden.kind, axis) for axis in numbers if axis is not None)
        label = forbid_label(forbidden)
        if forbidden.of is None:
            yield Constraint(label, collectives=found)
        elif forbidden.of == "parameters":
            yield Constraint(label, values=dict.fromkeys(weights, found))
        else:
            others = [value for value in graph.values if value not in weights]
            yield Constraint(label, inside=found, values=dict.fromkeys(others, found))


def _unsharded(graph: Graph, axes: NontrivialAxes, limit: int) -> Constraint:
    """The constraint that no axis shards parameters of fewer elements than a limit."""
    nothing = (frozenset[Dim](),) * len(axes.sizes)
    whole = ShardingConstraint(allowed=nothing, required=nothing)
    small = (p.name for p in graph.parameters if graph.values[p.name].numel < limit)
    return Constraint(
        option_label("unsharded_below", limit), {("input", name): whole for name in small}
    )


def _axis(axes: NontrivialAxes, name: str, option: str) -> int | None:
    """Index of an axis among the non-trivial ones; None if its size is 1."""
    names = axes.mesh.axis_names
    if name not in names:
        raise OptionError(f"{option} names axis {name!r}, but the mesh has {', '.join(names)}")
    number = names.index(name)
    return axes.axes.index(number) if number in axes.axes else None


def _axes_to_fill(axes: NontrivialAxes, wanted: SkipReplicated) -> list[int] | None:
    """The non-trivial axes that `skip_fully_replicated` names; None if it names none."""
    if isinstance(wanted, bool):
        return None
    numbers = [_axis(axes, name, "skip_fully_replicated") for name in wanted]
    return [number for number in numbers if number is not None]
