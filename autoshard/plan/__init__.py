"""Plans: made from a graph and a mesh, checked, explained."""

from autoshard.plan.checker import check_plan
from autoshard.plan.document import (
    PLAN_VERSION,
    Certificate,
    CollectiveCount,
    Conversion,
    Costs,
    GraphSummary,
    Memory,
    PlacedInput,
    PlacedNode,
    PlacedOutput,
    Plan,
    PlannedStep,
    Provenance,
    Stage,
)
from autoshard.plan.options import Mode, PlanOptions
from autoshard.plan.planner import make_plan, plan_id
from autoshard.plan.summary import ParameterRow, fold_parameters

__all__ = [
    "PLAN_VERSION",
    "Certificate",
    "CollectiveCount",
    "Conversion",
    "Costs",
    "GraphSummary",
    "Memory",
    "Mode",
    "ParameterRow",
    "PlacedInput",
    "PlacedNode",
    "PlacedOutput",
    "Plan",
    "PlanOptions",
    "PlannedStep",
    "Provenance",
    "Stage",
    "check_plan",
    "fold_parameters",
    "make_plan",
    "plan_id",
]
