import re
import subprocess
import sys
from pathlib import Path

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
    "MixedPrecision",
    "OpaqueModule",
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
    "make_plans",
    "operator_coverage",
    "parallelize",
    "pipeline",
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


def test_the_client_is_frozen() -> None:
    assert client.__all__ == CLIENT == sorted(CLIENT)


def test_the_page_of_the_client_has_a_row_for_each_method() -> None:
    page = (Path(__file__).parents[1] / "docs" / "client.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)\(", row)}
    for kind in (client.Client, client.AsyncClient):
        public = {name for name in dir(kind) if not name.startswith("_")}
        assert public - {"close", "local"} == named


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(autoshard, name) is not None


def test_planning_starts_without_torch() -> None:
    code = "import sys, autoshard, autoshard.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own program
