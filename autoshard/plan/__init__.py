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
from autoshard.plan.exports import EXPORT_TARGETS, export_plan
from autoshard.plan.mesh_search import (
    Candidate,
    SearchProgress,
    candidate_meshes,
    search_meshes,
)
from autoshard.plan.options import Algorithm, ForbiddenCollective, Mode, Pins, PlanOptions
from autoshard.plan.planner import make_plan, plan_id, torch_version
from autoshard.plan.simulation import Event, Simulation, chrome_trace, simulate
from autoshard.plan.sizing import ProblemSize, problem_size
from autoshard.plan.summary import ParameterRow, fold_parameters

__all__ = [
    "EXPORT_TARGETS",
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
    "Event",
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
    "ProblemSize",
    "Provenance",
    "SearchProgress",
    "Simulation",
    "Stage",
    "candidate_meshes",
    "check_plan",
    "chrome_trace",
    "compare_plans",
    "explain",
    "export_plan",
    "fold_parameters",
    "make_plan",
    "mesh_text",
    "operator_coverage",
    "plan_id",
    "problem_size",
    "search_meshes",
    "simulate",
    "torch_version",
]
