"""Fixed patterns of parallelism as constraints: the option `algo`."""

from autoshard.constraints.constraints import Constraint
from autoshard.constraints.data_parallel import (
    data_parallel_constraints,
    data_parallel_forbids,
    sharding_axes,
)
from autoshard.constraints.megatron import megatron_constraints, megatron_forbids
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.plan.options import Family
from autoshard.plan.options.restrictions import option_label

_DISTRIBUTED: tuple[Family, ...] = ("ddp", "megatron", "megatron-sp")
"""Patterns with replicated parameters, of which a distributed optimizer shards those at rest."""


def pattern_constraint(
    graph: Graph,
    axes: NontrivialAxes,
    pattern: Family,
    *,
    batch_axis: str | None = None,
    distributed: bool = False,
) -> Constraint:
    """The constraint that plans are within a pattern.

    Args:
        graph: the program.
        axes: the mesh.
        pattern: its name.
        batch_axis: for the patterns of Megatron-LM, the only axis that may shard the batch.
        distributed: True to shard parameters at rest over the data-parallel axes, ZeRO-1.

    Raises:
        OptionError: the program or the mesh does not allow the pattern.
    """
    label = option_label("algo", pattern)
    if distributed and pattern not in _DISTRIBUTED:
        raise OptionError(
            f"distributed_optimizer is for algo {', '.join(_DISTRIBUTED)}, but algo is {pattern!r}"
        )
    if pattern in {"megatron", "megatron-sp"}:
        by_sequence = pattern == "megatron-sp"
        strategies = megatron_constraints(
            *(graph, axes),
            batch_axis=batch_axis,
            by_sequence=by_sequence,
            distributed=distributed,
        )
        forbidden = megatron_forbids(axes, by_sequence=by_sequence, distributed=distributed)
        return Constraint(label, strategies, forbidden)
    sharding = sharding_axes(axes, "fsdp2" if distributed and pattern == "ddp" else pattern)
    try:
        strategies = data_parallel_constraints(graph, axes, pattern, sharding)
    except OptionError as error:
        raise OptionError(f"{label}: {error}") from None
    return Constraint(label, strategies, data_parallel_forbids(axes, sharding))
