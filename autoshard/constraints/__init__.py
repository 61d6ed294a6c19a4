"""Constraints on plans: pins, forbidden collectives, the batch axis, the Megatron-LM pattern."""

from autoshard.constraints.batch import BatchSharding, DimOrigins, dim_origins, outermost_dims
from autoshard.constraints.constraints import (
    UNCONSTRAINED,
    ChoiceId,
    Constraint,
    PlanConstraints,
    ShardingConstraint,
    StrategyConstraint,
)
from autoshard.constraints.data_parallel import (
    check_batch,
    parameter_shards,
    sharding_axes,
)
from autoshard.constraints.exportable import export_roles
from autoshard.constraints.from_options import plan_constraints
from autoshard.constraints.layout_pattern import LayoutPattern
from autoshard.constraints.megatron import MegatronAxes, framework_pattern, megatron_pattern
from autoshard.constraints.pins import pinned_sub_shards

__all__ = [
    "UNCONSTRAINED",
    "BatchSharding",
    "ChoiceId",
    "Constraint",
    "DimOrigins",
    "LayoutPattern",
    "MegatronAxes",
    "PlanConstraints",
    "ShardingConstraint",
    "StrategyConstraint",
    "check_batch",
    "dim_origins",
    "export_roles",
    "framework_pattern",
    "megatron_pattern",
    "outermost_dims",
    "parameter_shards",
    "pinned_sub_shards",
    "plan_constraints",
    "sharding_axes",
]
