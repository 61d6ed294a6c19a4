"""Plans: the document, and everything that reads one. Does not import solver or planner."""

from typing import TYPE_CHECKING

from autoshard.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.plan.axis_roles import (
        AxisRole,
        AxisUse,
        find_roles,
    )
    from autoshard.plan.checker import check_plan
    from autoshard.plan.compare import (
        Change,
        CollectiveChange,
        Figure,
        PlanDifference,
        compare_plans,
        mesh_text,
    )
    from autoshard.plan.comparisons import (
        Baseline,
        Unrestricted,
    )
    from autoshard.plan.coverage import (
        Coverage,
        OperatorUse,
        operator_coverage,
    )
    from autoshard.plan.document import (
        PLAN_VERSION,
        Checkpoint,
        Conflict,
        GraphSummary,
        Pipeline,
        PlacedInput,
        PlacedNode,
        PlacedOutput,
        Plan,
        PlannedStep,
        Provenance,
        Resharding,
        Stage,
        StageTimes,
    )
    from autoshard.plan.exports import (
        EXPORT_TARGETS,
        Expressed,
        export_plan,
        expressed_share,
    )
    from autoshard.plan.like import read_like
    from autoshard.plan.megatron_arguments import (
        MegatronLayout,
        read_megatron,
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
    from autoshard.plan.parameter_rows import (
        ParameterRow,
        fold_parameters,
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
    from autoshard.plan.restriction_cost import restriction_sentences
    from autoshard.plan.schedule_simulation import (
        ScheduleSimulation,
        simulate_pipeline,
        simulate_schedule,
        step_time_lower_bound,
    )
    from autoshard.plan.schedule_view import (
        plan_trace,
        schedule_svg,
        schedule_trace,
    )
    from autoshard.plan.schedules import (
        Schedule,
        schedule_error,
        schedule_name,
    )
    from autoshard.plan.simulation import (
        Event,
        Simulation,
        chrome_trace,
        simulate,
    )
    from autoshard.plan.stage_plans import (
        only_stage,
        stage_plan,
    )
    from autoshard.plan.sub_meshes import stage_devices
    from autoshard.plan.summary import summarise
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "EXPORT_TARGETS",
    "PLAN_VERSION",
    "Algorithm",
    "AxisRole",
    "AxisUse",
    "Baseline",
    "Certificate",
    "Change",
    "Checkpoint",
    "CollectiveChange",
    "CollectiveCount",
    "Conflict",
    "Costs",
    "Coverage",
    "Direction",
    "Event",
    "Expressed",
    "Figure",
    "ForbiddenCollective",
    "GraphSummary",
    "MegatronLayout",
    "Memory",
    "Mode",
    "OperatorUse",
    "ParameterRow",
    "Performance",
    "Pins",
    "Pipeline",
    "PlacedInput",
    "PlacedNode",
    "PlacedOutput",
    "Plan",
    "PlanDifference",
    "PlanOptions",
    "PlannedStep",
    "ProblemSize",
    "Provenance",
    "Resharding",
    "Schedule",
    "ScheduleSimulation",
    "Simulation",
    "Stage",
    "StageModules",
    "StageTimes",
    "Unrestricted",
    "check_plan",
    "chrome_trace",
    "compare_plans",
    "export_plan",
    "expressed_share",
    "find_roles",
    "fold_parameters",
    "mesh_text",
    "only_stage",
    "operator_coverage",
    "plan_trace",
    "read_like",
    "read_megatron",
    "restriction_sentences",
    "schedule_error",
    "schedule_name",
    "schedule_svg",
    "schedule_trace",
    "simulate",
    "simulate_pipeline",
    "simulate_schedule",
    "stage_devices",
    "stage_modules",
    "stage_plan",
    "step_time_lower_bound",
    "summarise",
]
