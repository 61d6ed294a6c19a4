import subprocess
import sys

import autoshard
from autoshard import client

PUBLIC = [
    "AsyncClient",
    "AutoshardError",
    "Client",
    "ForbiddenCollective",
    "Graph",
    "LaunchContext",
    "Mesh",
    "Pins",
    "Plan",
    "PlanOptions",
    "SolveStatus",
    "check_plan",
    "compare_plans",
    "dcp_state_dict",
    "discover",
    "explain",
    "export_model",
    "export_plan",
    "full_tensor",
    "get_context",
    "get_topology",
    "init_empty_weights",
    "launch",
    "list_topologies",
    "load_checkpoint",
    "load_graph",
    "make_mesh",
    "make_plan",
    "operator_coverage",
    "parallelize",
    "rng_step",
    "save_checkpoint",
    "search_meshes",
    "shard_loader",
    "simulate",
]


def test_the_public_names_are_frozen() -> None:
    assert autoshard.__all__ == PUBLIC == sorted(PUBLIC)


CLIENT = [
    "AsyncClient",
    "Client",
    "JobProgress",
    "JobStatus",
    "MeshSearch",
    "PlanEntry",
    "PlanResult",
    "Retry",
    "SearchResult",
    "SearchedMesh",
    "Validation",
]

METHODS = [
    "cancel",
    "close",
    "compare",
    "coverage",
    "delete_topology",
    "explain",
    "export",
    "get_job",
    "get_plan",
    "get_topology",
    "health",
    "list_jobs",
    "list_plans",
    "list_topologies",
    "local",
    "plan",
    "put_topology",
    "request_plan",
    "request_search",
    "search",
    "validate",
    "wait_for_job",
    "wait_for_search",
]


def test_the_client_is_frozen() -> None:
    assert client.__all__ == CLIENT == sorted(CLIENT)
    for kind in (client.Client, client.AsyncClient):
        assert [name for name in dir(kind) if not name.startswith("_")] == METHODS


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(autoshard, name) is not None


def test_planning_starts_without_torch() -> None:
    code = "import sys, autoshard, autoshard.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own program
