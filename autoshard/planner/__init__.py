"""Planning: makes a plan for a graph, a mesh and options."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.planner.baselines import OneStage, compare_baselines
    from autoshard.planner.explanation import (
        Alternative,
        Explanation,
        explain,
    )
    from autoshard.planner.joint import (
        JointPlans,
        make_plans,
    )
    from autoshard.planner.meshes.candidates import (
        MeshCandidate,
        candidate_meshes,
    )
    from autoshard.planner.meshes.proof import search_bound, search_statement
    from autoshard.planner.meshes.search import (
        SearchProgress,
        search_meshes,
    )
    from autoshard.planner.optimality import (
        OptimalityCheck,
        check_optimality,
    )
    from autoshard.planner.pipeline.estimates import PipelineEstimate, estimate_pipeline
    from autoshard.planner.pipeline.micro_batches import (
        MicroBatches,
        activations_fit,
        choose_micro_batches,
        estimate_micro_batches,
    )
    from autoshard.planner.pipeline.named_cuts import cut_names
    from autoshard.planner.pipeline.pipeline_planner import compare_plan, make_plan
    from autoshard.planner.pipeline.request_size import problem_size
    from autoshard.planner.planner import (
        GraphIdentity,
        identity_of,
        plan_id,
        torch_version,
    )
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "Alternative",
    "Explanation",
    "GraphIdentity",
    "JointPlans",
    "MeshCandidate",
    "MicroBatches",
    "OneStage",
    "OptimalityCheck",
    "PipelineEstimate",
    "SearchProgress",
    "activations_fit",
    "candidate_meshes",
    "check_optimality",
    "choose_micro_batches",
    "compare_baselines",
    "compare_plan",
    "cut_names",
    "estimate_micro_batches",
    "estimate_pipeline",
    "explain",
    "identity_of",
    "make_plan",
    "make_plans",
    "plan_id",
    "problem_size",
    "search_bound",
    "search_meshes",
    "search_statement",
    "torch_version",
]
