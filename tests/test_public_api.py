import subprocess
import sys

import autoshard

PUBLIC = [
    "AsyncClient",
    "AutoshardError",
    "Client",
    "ForbiddenCollective",
    "Graph",
    "Launched",
    "Mesh",
    "Pins",
    "Plan",
    "PlanOptions",
    "Status",
    "check_plan",
    "checkpointable",
    "compare_plans",
    "discover",
    "explain",
    "export_model",
    "export_plan",
    "gathered",
    "get_topology",
    "launch",
    "launched",
    "load_checkpoint",
    "load_graph",
    "make_mesh",
    "make_plan",
    "operator_coverage",
    "parallelize",
    "parameters_on_meta",
    "save_checkpoint",
    "search_meshes",
    "shard_loader",
    "simulate",
    "step_counter",
    "topology_names",
]


def test_the_public_names_are_frozen() -> None:
    assert autoshard.__all__ == PUBLIC == sorted(PUBLIC)


def test_every_public_name_is_there() -> None:
    for name in PUBLIC:
        assert getattr(autoshard, name) is not None


def test_planning_starts_without_torch() -> None:
    code = "import sys, autoshard, autoshard.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own program
