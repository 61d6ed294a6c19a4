"""Planning: makes a plan for a graph, a mesh and options."""

from autoshard.planner.explain import Alternative, Explanation, explain
from autoshard.planner.joint import JointPlans, make_plans
from autoshard.planner.mesh_search import (
    Candidate,
    SearchProgress,
    candidate_meshes,
    search_meshes,
)
from autoshard.planner.pipeline.micro_batches import MicroBatches, choose_micro_batches
from autoshard.planner.pipeline.named_cuts import cut_names
from autoshard.planner.pipeline.pipeline_planner import make_plan
from autoshard.planner.pipeline.request_size import problem_size
from autoshard.planner.planner import (
    ProblemSize,
    plan_id,
    torch_version,
)

__all__ = [
    "Alternative",
    "Candidate",
    "Explanation",
    "JointPlans",
    "MicroBatches",
    "ProblemSize",
    "SearchProgress",
    "candidate_meshes",
    "choose_micro_batches",
    "cut_names",
    "explain",
    "make_plan",
    "make_plans",
    "plan_id",
    "problem_size",
    "search_meshes",
    "torch_version",
]
