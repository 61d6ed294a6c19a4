"""Constraints on plans: pins, forbidden collectives, the batch axis, the Megatron-LM pattern."""

from autoshard.plan.constraints.batch import DimOrigins
from autoshard.plan.constraints.constraints import (
    UNCONSTRAINED,
    ChoiceId,
    Constraint,
    PlanConstraints,
    StrategyConstraint,
)
from autoshard.plan.constraints.from_options import LayoutPattern, plan_constraints

__all__ = [
    "UNCONSTRAINED",
    "ChoiceId",
    "Constraint",
    "DimOrigins",
    "LayoutPattern",
    "PlanConstraints",
    "StrategyConstraint",
    "plan_constraints",
]
