import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

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
    "__version__",
    "auto_parallelize",
    "check_optimality",
    "check_plan",
    "compare_baselines",
    "compare_plans",
    "dcp_state_dict",
    "discover",
    "explain",
    "export_model",
    "export_plan",
    "find_largest",
    "fit_model",
    "full_tensor",
    "get_context",
    "get_topology",
    "init_empty_weights",
    "launch",
    "list_topologies",
    "load_checkpoint",
    "load_graph",
    "local",
    "make_mesh",
    "make_plan",
    "make_plans",
    "operator_coverage",
    "parallelize",
    "pipeline",
    "plan_model",
    "rng_step",
    "save_checkpoint",
    "search_meshes",
    "shard_loader",
    "simulate",
    "size_model",
    "split_model",
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


def test_dir_lists_every_public_name() -> None:
    for package in LAZY:
        module = import_module(package)
        assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'make_plam'"):
        _ = autoshard.make_plam


LAZY = [
    "autoshard",
    "autoshard.client",
    "autoshard.costs",
    "autoshard.graph",
    "autoshard.layouts",
    "autoshard.ops",
    "autoshard.plan",
    "autoshard.planner",
]
"""Packages whose names are imported on first use."""


@pytest.mark.parametrize("package", LAZY)
def test_names_imported_on_first_use_are_not_those_of_submodules(package: str) -> None:
    """Importing the submodule would replace them."""
    module = import_module(package)
    submodules = {found.name for found in iter_modules(module.__path__)}
    assert not submodules & set(module.__all__)


SLOW = {"fastapi", "highspy", "rich", "scipy", "torch", "transformers", "typer"}


def imported_by(program: str) -> set[str]:
    """Names of all modules that are loaded after a program."""
    code = f"{program}\nimport sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())  # noqa: S603  our own program


def test_the_package_imports_nothing_of_its_own() -> None:
    found = imported_by("import autoshard; autoshard.__version__; dir(autoshard)")
    own = {name for name in found if name.startswith("autoshard.")}
    assert own == {"autoshard.base", "autoshard.base.lazy_imports", "autoshard.version"}
    assert not found & {*SLOW, "numpy", "pydantic"}


@pytest.mark.parametrize(
    "program",
    [
        "from autoshard import Client",
        "from autoshard import AsyncClient; AsyncClient('http://127.0.0.1:1', cache=False)",
        "from autoshard import Plan, PlanOptions, make_mesh; PlanOptions(); make_mesh((2, 4))",
        "import typer, rich, autoshard.cli.commands.planning",
    ],
)
def test_clients_and_documents_start_without_solver_and_torch(program: str) -> None:
    found = imported_by(program)
    # Those that the program names, it may import.
    assert not found & {name for name in SLOW if name not in program}
    assert not {
        name for name in found if name.startswith(("autoshard.solve", "autoshard.planner."))
    }


def test_planning_starts_without_torch() -> None:
    found = imported_by(
        "import autoshard.cli; from autoshard import explain, make_plan, search_meshes"
    )
    assert "torch" not in found
