"""Planning: from a graph, a mesh and options to a plan."""

from autoshard.planner.explain import Alternative, Explanation, explain
from autoshard.planner.mesh_search import (
    Candidate,
    SearchProgress,
    candidate_meshes,
    search_meshes,
)
from autoshard.planner.planner import make_plan, plan_id, torch_version
from autoshard.planner.problem_size import ProblemSize, problem_size

__all__ = [
    "Alternative",
    "Candidate",
    "Explanation",
    "ProblemSize",
    "SearchProgress",
    "candidate_meshes",
    "explain",
    "make_plan",
    "plan_id",
    "problem_size",
    "search_meshes",
    "torch_version",
]
