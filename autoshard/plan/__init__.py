"""Plans: the document, and everything that reads one. Does not import solver or planner."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.plan.comparisons import (
        Baseline,
        Unrestricted,
    )
    from autoshard.plan.document import (
        PLAN_VERSION,
        Conflict,
        GraphSummary,
        Pipeline,
        Plan,
        Provenance,
        StageTimes,
    )
    from autoshard.plan.modules import (
        StageModules,
        stage_modules,
    )
    from autoshard.plan.options import (
        Algorithm,
        ForbiddenCollective,
        Mode,
        Pins,
        PlanOptions,
    )
    from autoshard.plan.predictions import (
        Certificate,
        CollectiveCount,
        Costs,
        Direction,
        Memory,
        Performance,
    )
    from autoshard.plan.problem_size import ProblemSize
    from autoshard.plan.stage import (
        Checkpoint,
        PlacedInput,
        PlacedNode,
        PlacedOutput,
        PlannedStep,
        Resharding,
        Stage,
    )
    from autoshard.plan.stage_plans import (
        only_stage,
        stage_plan,
    )
    from autoshard.plan.sub_meshes import stage_devices
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "PLAN_VERSION",
    "Algorithm",
    "Baseline",
    "Certificate",
    "Checkpoint",
    "CollectiveCount",
    "Conflict",
    "Costs",
    "Direction",
    "ForbiddenCollective",
    "GraphSummary",
    "Memory",
    "Mode",
    "Performance",
    "Pins",
    "Pipeline",
    "PlacedInput",
    "PlacedNode",
    "PlacedOutput",
    "Plan",
    "PlanOptions",
    "PlannedStep",
    "ProblemSize",
    "Provenance",
    "Resharding",
    "Stage",
    "StageModules",
    "StageTimes",
    "Unrestricted",
    "only_stage",
    "stage_devices",
    "stage_modules",
    "stage_plan",
]
