"""Planning options, in groups by subject; each is declared once, for Python, JSON and commands.

Comes in: keywords, or a JSON document. Goes out: `PlanOptions`, checked and immutable. Imports the
names of optimizers and nothing else of costs; it knows no graph but in `of_stages`.
"""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.plan.options.constraints import (
        MIN_EXPRESSED,
        Algorithm,
        CollectiveKind,
        ConstraintOptions,
        ExportableTo,
        ExportRole,
        Family,
        ForbiddenCollective,
        Moved,
        Pins,
        SkipReplicated,
    )
    from autoshard.plan.options.group import Declared, OptionGroup, declared
    from autoshard.plan.options.memory import MemoryOptions, Recomputing
    from autoshard.plan.options.pipeline import (
        MAX_STAGES,
        Cut,
        PipelineOptions,
        ScheduleName,
        SubMeshes,
        Weight,
    )
    from autoshard.plan.options.plan_options import (
        Mode,
        PlanOptions,
        option_groups,
        to_options,
    )
    from autoshard.plan.options.runtime import (
        OWN_RUNTIME,
        AttentionKernel,
        ExecutionMode,
        RuntimeOptions,
        described_profiles,
        runtime_profiles,
    )
    from autoshard.plan.options.solver import SolverOptions
    from autoshard.plan.options.training import MAX_MICRO_BATCHES, StateDType, TrainingOptions
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "MAX_MICRO_BATCHES",
    "MAX_STAGES",
    "MIN_EXPRESSED",
    "OWN_RUNTIME",
    "Algorithm",
    "AttentionKernel",
    "CollectiveKind",
    "ConstraintOptions",
    "Cut",
    "Declared",
    "ExecutionMode",
    "ExportRole",
    "ExportableTo",
    "Family",
    "ForbiddenCollective",
    "MemoryOptions",
    "Mode",
    "Moved",
    "OptionGroup",
    "Pins",
    "PipelineOptions",
    "PlanOptions",
    "Recomputing",
    "RuntimeOptions",
    "ScheduleName",
    "SkipReplicated",
    "SolverOptions",
    "StateDType",
    "SubMeshes",
    "TrainingOptions",
    "Weight",
    "declared",
    "described_profiles",
    "option_groups",
    "runtime_profiles",
    "to_options",
]
