"""Plans: made from a graph and a mesh, checked, explained."""

from autoshard.plan.checking.checker import check_plan
from autoshard.plan.compare import (
    Change,
    CollectiveChange,
    Figure,
    PlanDifference,
    compare_plans,
    mesh_text,
)
from autoshard.plan.coverage import Coverage, OperatorUse, operator_coverage
from autoshard.plan.document import (
    PLAN_VERSION,
    Certificate,
    Checkpoint,
    CollectiveCount,
    Conflict,
    Conversion,
    Costs,
    Direction,
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
from autoshard.plan.explain import Alternative, Explanation, explain
from autoshard.plan.mesh_search import (
    Candidate,
    SearchProgress,
    candidate_meshes,
    search_meshes,
)
from autoshard.plan.options import Algorithm, ForbiddenCollective, Mode, Pins, PlanOptions
from autoshard.plan.planner import make_plan, plan_id
from autoshard.plan.summary import ParameterRow, fold_parameters

__all__ = [
    "PLAN_VERSION",
    "Algorithm",
    "Alternative",
    "Candidate",
    "Certificate",
    "Change",
    "Checkpoint",
    "CollectiveChange",
    "CollectiveCount",
    "Conflict",
    "Conversion",
    "Costs",
    "Coverage",
    "Direction",
    "Explanation",
    "Figure",
    "ForbiddenCollective",
    "GraphSummary",
    "Memory",
    "Mode",
    "OperatorUse",
    "ParameterRow",
    "Pins",
    "PlacedInput",
    "PlacedNode",
    "PlacedOutput",
    "Plan",
    "PlanDifference",
    "PlanOptions",
    "PlannedStep",
    "Provenance",
    "SearchProgress",
    "Stage",
    "candidate_meshes",
    "check_plan",
    "compare_plans",
    "explain",
    "fold_parameters",
    "make_plan",
    "mesh_text",
    "operator_coverage",
    "plan_id",
    "search_meshes",
]
