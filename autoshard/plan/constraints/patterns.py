"""Fixed patterns of parallelism as constraints: the option `algo`."""

from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.plan.constraints.constraints import Constraint
from autoshard.plan.constraints.data_parallel import (
    data_parallel_constraints,
    data_parallel_forbids,
)
from autoshard.plan.constraints.megatron import megatron_constraints, megatron_forbids
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.option_restrictions import option_label
from autoshard.plan.options import Pattern


def pattern_constraint(
    graph: Graph, axes: NontrivialAxes, pattern: Pattern, *, batch_axis: str | None = None
) -> Constraint:
    """The constraint that plans are within a pattern.

    Args:
        graph: the program.
        axes: the mesh.
        pattern: its name.
        batch_axis: for the patterns of Megatron-LM, the only axis that may shard the batch.

    Raises:
        OptionError: the program or the mesh does not allow the pattern.
    """
    label = option_label("algo", pattern)
    if pattern in {"megatron", "megatron-sp"}:
        by_sequence = pattern == "megatron-sp"
        strategies = megatron_constraints(
            graph, axes, batch_axis=batch_axis, by_sequence=by_sequence
        )
        return Constraint(label, strategies, megatron_forbids(axes, by_sequence=by_sequence))
    try:
        strategies = data_parallel_constraints(graph, axes, pattern)
    except OptionError as error:
        raise OptionError(f"{label}: {error}") from None
    return Constraint(label, strategies, data_parallel_forbids(axes, pattern))
